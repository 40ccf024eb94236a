"""The step `evaluate`: is the model right, how fast is it, and compared with what."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import mlflow
import pydantic_core
from mlflow.entities import Run
from mlflow.exceptions import MlflowException

from ansor_mlflow import names
from ansor_mlflow.device import available_cpus
from ansor_mlflow.errors import CorrectnessError, one_line
from ansor_mlflow.files import scratch_directory, write_text
from ansor_mlflow.measuring import (
    Deviation,
    KernelTimes,
    Latency,
    MachineNoise,
    MakeInference,
    choose_examples,
    deviation_of,
    expected_of,
    library_inference,
    measure_in_turns,
    outputs_of,
    require_broken_stays_broken,
    require_examples,
    require_rivals,
    same_for_all,
    time_kernels,
    time_parts,
    timed_call,
    tolerance_for,
    tuned_inference,
    what_to_do,
)
from ansor_mlflow.model import (
    BuildJob,
    LibraryEntry,
    Manifest,
    build_in_child_process,
    choose_for_server,
    choose_library,
    threads_here,
    timed_parts,
    verified_manifest,
)
from ansor_mlflow.options import EvaluateOptions, TuneOptions
from ansor_mlflow.settings import LoweringSettings
from ansor_mlflow.steps.evaluation.on_server import ModelOnServer
from ansor_mlflow.steps.evaluation.rivals import absent_rivals, best_of, check_rivals, rival_metrics, rival_task
from ansor_mlflow.steps.evaluation.sizes import require_harmless_padding, time_sizes
from ansor_mlflow.tensors import Arrays, NetworkShapes, all_sizes
from ansor_mlflow.tracking import (
    Message,
    StepRun,
    command_lines,
    evaluation_note,
    html_table,
    kernels_page,
    params_used,
    pinned_uri,
    step_run,
    summary_rows,
    translated_errors,
)
from ansor_mlflow.tuning import NetworkServer, fleet_settings

_log = logging.getLogger("ansor_mlflow")

_TUNED, _UNTUNED, _INSTANT = "tuned", "untuned", "instant"


@dataclass(frozen=True, kw_only=True)
class EvaluateResult:
    """What a model is worth."""

    run_id: str
    network: str
    target: str
    """Short description of the library that ran, such as "llvm znver4 ×2"."""
    metrics: dict[str, float]
    """The metrics of `names.SUMMARY_METRICS` that were measured."""

    def _repr_html_(self) -> str:
        return html_table(f"{self.network} for {self.target}", [*summary_rows(self.metrics), ("run", self.run_id)])


def evaluate(options: EvaluateOptions) -> EvaluateResult:
    """Checks a model against ONNX Runtime, and measures its latency beside its rivals and its untuned build.

    Raises:
        CorrectnessError: The outputs differ by more than the tolerance. The metrics are logged all the same.
        AnsorMlflowError: The model cannot be read, or does not run here, or on the server.
        MachineError: A rival that is asked for is not installed, no server is free for too long, or it is lost.
        UserInputError: `data` or the tracker is not usable.
    """
    require_examples(options.data)
    require_rivals("rivals", options.rivals)
    with scratch_directory() as scratch:
        is_here = Path(options.model_uri).is_dir()
        model_uri = options.model_uri if is_here else pinned_uri(options.model_uri, "model_uri")
        directory = Path(model_uri) if is_here else _download(model_uri, Path(scratch))
        with _server_of(options) as server, step_run("evaluate", options, "evaluate") as run:
            return _evaluate(options.model_copy(update={"model_uri": model_uri}), run, directory, server)


def _download(model_uri: str, scratch: Path) -> Path:
    """The directory of a model, copied into `scratch`."""
    with translated_errors(f"read the model {model_uri}"):
        return Path(mlflow.artifacts.download_artifacts(artifact_uri=model_uri, dst_path=str(scratch)))


@contextlib.contextmanager
def _server_of(options: EvaluateOptions) -> Iterator[NetworkServer | None]:
    """A server of the fleet for as long as the model is evaluated; None where it runs here."""
    fleet = fleet_settings(options)
    if fleet is None:
        yield None
        return
    _log.info("asking the tracker at %s for a server of key %s", fleet.tracker, fleet.key)
    with contextlib.closing(NetworkServer(fleet)) as server:
        yield server


def _evaluate(options: EvaluateOptions, run: StepRun, directory: Path, server: NetworkServer | None) -> EvaluateResult:
    manifest = verified_manifest(directory)
    entry = choose_for_server(directory, manifest, server.device) if server else choose_library(directory, manifest)
    device = entry.fingerprint
    _describe(run, options, manifest, entry, device.num_threads if server else threads_here(entry))
    network = directory / names.NETWORK_FILE
    sizes = all_sizes(manifest)
    examples = choose_examples(options.data, sizes, options.seed, network)
    on_server = ModelOnServer(server, manifest, entry) if server else None
    checked = _Checked(directory, manifest, entry, on_server, examples)
    tolerance = tolerance_for(options.tolerance, network, LoweringSettings.among(entry.provenance).dtype)
    metrics = _check(checked, tolerance, run)
    if manifest.pad:
        require_harmless_padding(manifest, checked.compare, tolerance, options.seed)
    task = rival_task(options.rivals, directory, manifest, entry, run.directory)
    if on_server:
        rivals = absent_rivals(options.rivals, task, on_server.why_no_rivals)
    else:
        rivals = check_rivals(options.rivals, task, examples, checked.expected, tolerance)
    of_each_size = examples[: len(sizes)]
    timed: dict[str, MakeInference] = {rival.name: rival.make_inference for rival in rivals if not rival.absent}
    tuned, noise, distrust = partial(tuned_inference, directory), MachineNoise(), ""
    with scratch_directory() as scratch:
        builds = _build_baselines(options, manifest, directory, entry, Path(scratch))
        if on_server:
            libraries = {_TUNED: (directory / entry.path, entry), **builds}
            latencies, distrust = on_server.measure(libraries, of_each_size, options.turns, options.measure_s)
        else:
            baselines = {
                name: partial(library_inference, path, manifest, built) for name, (path, built) in builds.items()
            }
            latencies = _measure(options, of_each_size, {_TUNED: tuned, **timed, **baselines}, noise)
    metrics |= _latency_metrics(latencies, sizes, entry.provenance.get("estimated_latency_ms"))
    metrics |= rival_metrics(rivals, latencies, latencies[_TUNED].median_ms)
    _log_json([rival.to_dict(latencies.get(rival.name)) for rival in rivals], names.RIVALS_FILE, run)
    kernels = None
    if not on_server:
        if manifest.sizes:
            of_sizes = time_sizes(sizes, of_each_size, tuned, timed, options, noise)
            _log_json([size.to_dict() for size in of_sizes], names.SIZES_FILE, run)
        metrics[names.PROBE_SPREAD] = noise.spread
        if any(part.runs_in == "onnxruntime" for part in entry.parts):
            metrics[names.ONNXRUNTIME_SHARE] = _time_parts(of_each_size, manifest, directory, entry, run)
        kernels = _time_kernels(of_each_size, manifest, directory, entry, run)
    run.log_metrics(metrics)
    best = best_of(rivals, latencies)
    tags = {names.TAG_TARGET: device.description, **({names.TAG_BEST_RIVAL: best} if best else {})}
    run.log_tags(tags)
    run.log_note(evaluation_note(manifest.network, command_lines("evaluate", options), tags, metrics, kernels))
    run.log_distrust(distrust or noise.distrust)
    return EvaluateResult(run_id=run.run_id, network=manifest.network, target=device.description, metrics=metrics)


def _describe(
    run: StepRun, options: EvaluateOptions, manifest: Manifest, entry: LibraryEntry, num_threads: int
) -> None:
    """Says in a run what is evaluated, and how it was tuned."""
    title = f"{manifest.network} · {entry.fingerprint.description}"
    run.log_tags(
        {
            names.TAG_NETWORK: manifest.network,
            names.TAG_TARGET: entry.fingerprint.description,
            names.TAG_NUM_THREADS: str(num_threads),
            names.TAG_MODEL_URI: options.model_uri,
            "mlflow.runName": f"evaluate {title}",
        }
    )
    if tuning := _find_tuning(entry):
        _repeat_tuning(tuning, run, title)


def _find_tuning(entry: LibraryEntry) -> Run | None:
    """The run whose records a library was compiled with; None where it has none, or where it is on another server."""
    run_id = entry.provenance.get("tune_run")
    if not run_id:
        return None
    try:
        return mlflow.get_run(str(run_id))
    except MlflowException as err:
        _log.info("nothing is known here of the tuning run %s: %s", run_id, one_line(err))
        return None


def _repeat_tuning(tuning: Run, run: StepRun, title: str) -> None:
    """Says in a run what the tuning of its model had, so that it stands for both.

    Args:
        tuning: The run of the tuning.
        run: The run.
        title: Network and device, with which a tuning run's name begins that no user has changed.
    """
    tags = {names.TAG_TUNE_RUN: tuning.info.run_id}
    tuned = (tuning.info.run_name or "").removeprefix("tune ")
    if tuned.startswith(f"{title} · "):
        tags["mlflow.runName"] = f"evaluate {tuned}"
    metrics, params = tuning.data.metrics, params_used(tuning, TuneOptions)
    message = Message(
        metrics={name: metrics[name] for name in names.TUNING_METRICS if name in metrics},
        params={name: params[name] for name in names.SEARCH_PARAMS if name in params},
        tags=tags,
    )
    with translated_errors("log what the tuning had"):
        message.deliver(run.run_id, run.directory)


@dataclass(frozen=True)
class _Checked:
    """A model whose outputs are compared with ONNX Runtime's, and the inputs that they are compared on."""

    directory: Path
    manifest: Manifest
    entry: LibraryEntry
    on_server: ModelOnServer | None
    examples: Sequence[Arrays]

    @property
    def network(self) -> Path:
        return self.directory / names.NETWORK_FILE

    @property
    def num_threads(self) -> int:
        return available_cpus() if self.on_server else threads_here(self.entry)

    @cached_property
    def expected(self) -> list[Arrays]:
        return expected_of(self.network, self.num_threads, self.examples)

    def compare(self, examples: Sequence[Arrays]) -> Deviation:
        """How far the outputs for some inputs are from ONNX Runtime's."""
        is_own = examples is self.examples
        expected = self.expected if is_own else expected_of(self.network, self.num_threads, examples)
        if self.on_server:
            return self.on_server.compare(self.directory / self.entry.path, examples, expected)
        return deviation_of(partial(tuned_inference, self.directory), examples, expected)

    def outputs(self, examples: Sequence[Arrays]) -> Sequence[Arrays]:
        """The outputs for some inputs, computed in another process."""
        if self.on_server:
            return self.on_server.outputs(self.directory / self.entry.path, examples)
        return outputs_of(partial(tuned_inference, self.directory), examples)


def _check(checked: _Checked, tolerance: float, run: StepRun) -> dict[str, float]:
    """Compares the outputs with the reference's, and logs how far they are from it, and what was not really compared.

    Raises:
        CorrectnessError: They are too far.
    """
    network, num_inputs = checked.manifest.network, len(checked.examples)
    _log.info("comparing the outputs of %s with ONNX Runtime's on %d inputs", network, num_inputs)
    difference = checked.compare(checked.examples)
    metrics = {names.MAX_ABS_ERROR: difference.max_abs_error, names.MAX_REL_ERROR: difference.max_rel_error}
    run.log_metrics(metrics)
    if unchecked := ", ".join(same_for_all(checked.expected)):
        _log.warning(
            "ONNX Runtime's outputs %s are the same for all inputs that were tried (%d), so that comparing them says "
            "little; give data with which they differ",
            *(unchecked, num_inputs),
        )
        run.log_tags({names.TAG_UNCHECKED: unchecked})
    if not difference.max_rel_error <= tolerance:
        advice = what_to_do(checked.network, checked.num_threads, checked.examples, tolerance)
        raise CorrectnessError(
            f"the outputs of {network} differ from ONNX Runtime's by max_rel_error={difference.max_rel_error:.3g}, "
            f"allowed is {tolerance:g}; {advice}"
        )
    require_broken_stays_broken(checked.outputs, checked.network, checked.num_threads, checked.examples[0])
    return metrics


def _build_baselines(
    options: EvaluateOptions, manifest: Manifest, directory: Path, entry: LibraryEntry, scratch: Path
) -> dict[str, tuple[Path, LibraryEntry]]:
    """Builds the same network as TVM does by itself, and, where it is asked for, as sketches choose without trials.

    Their parts may be others than those of the model, which leaves to ONNX Runtime what was faster there.
    """
    libraries = {}
    for name in (_UNTUNED, _INSTANT) if options.instant else (_UNTUNED,):
        _log.info("building the baseline: %s", name)
        library = scratch / name / f"{name}.so"  # a server that has loaded one of a name takes it for the other one
        library.parent.mkdir()
        job = BuildJob(
            network=str(directory / names.NETWORK_FILE),
            sizes=manifest.sizes,
            records="",
            plain=name == _UNTUNED,
            target=entry.fingerprint.target,
            num_threads=entry.fingerprint.num_threads,
            lowering=LoweringSettings.among(entry.provenance),
            library=str(library),
            linker=options.linker,
        )
        built = build_in_child_process(job)
        libraries[name] = library, replace(entry, parts=built.parts)
    return libraries


def _measure(
    options: EvaluateOptions, of_each_size: Sequence[Arrays], runs: Mapping[str, MakeInference], noise: MachineNoise
) -> dict[str, Latency]:
    """Times the model, its rivals and its baselines, on the same number of threads.

    Of a network with several sizes, a call of each is timed, one after the other.
    """
    _log.info("measuring latency in %d turns", options.turns)
    calls = {name: partial(timed_call, make_inference, of_each_size) for name, make_inference in runs.items()}
    return measure_in_turns(calls, options.turns, noise, options.measure_s)


def _time_parts(
    of_each_size: Sequence[Arrays], manifest: Manifest, directory: Path, entry: LibraryEntry, run: StepRun
) -> float:
    """Logs how long each part of a network takes; returns the share of ONNX Runtime's, from 0 to 1."""
    seconds = time_parts(directory / entry.path, manifest, entry, of_each_size)
    _log_json([asdict(part) for part in timed_parts(entry.parts, seconds)], names.PARTS_FILE, run)
    of_onnxruntime = (s for part, s in zip(entry.parts, seconds, strict=True) if part.runs_in == "onnxruntime")
    return sum(of_onnxruntime) / sum(seconds)


def _time_kernels(
    of_each_size: Sequence[Arrays], manifest: Manifest, directory: Path, entry: LibraryEntry, run: StepRun
) -> KernelTimes:
    """Logs where the time of a network goes."""
    kernels = time_kernels(directory / entry.path, manifest, entry, of_each_size)
    _log_json(kernels.to_dict(), names.KERNELS_FILE, run)
    page = kernels_page(manifest.network, entry.fingerprint.description, kernels)
    _log_text(page, names.KERNELS_REPORT_FILE, run)
    return kernels


def _log_json(values: object, name: str, run: StepRun) -> None:
    _log_text(pydantic_core.to_json(values, indent=1, inf_nan_mode="null").decode(), name, run)


def _log_text(text: str, name: str, run: StepRun) -> None:
    path = run.directory / name
    write_text(path, text)
    run.log_artifacts(path)


def _latency_metrics(
    latencies: dict[str, Latency], sizes: Sequence[NetworkShapes], estimated_ms: float | None
) -> dict[str, float]:
    tuned, untuned = latencies[_TUNED], latencies[_UNTUNED]
    batch_size = sum(size.inputs[0].shape[0] if size.inputs and size.inputs[0].shape else 1 for size in sizes)
    metrics = {
        names.LATENCY_MS: tuned.median_ms,
        names.LATENCY_P90_MS: tuned.p90_ms,
        names.LATENCY_STD_MS: tuned.std_ms,
        names.THROUGHPUT_PER_S: batch_size / tuned.median_ms * 1e3,
        names.UNTUNED_LATENCY_MS: untuned.median_ms,
        names.SPEEDUP_VS_UNTUNED: untuned.median_ms / tuned.median_ms,
    }
    if instant := latencies.get(_INSTANT):
        metrics[names.INSTANT_LATENCY_MS] = instant.median_ms
    if estimated_ms:
        metrics[names.ESTIMATE_RATIO] = tuned.median_ms / estimated_ms
    return metrics
