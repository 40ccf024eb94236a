"""The step `evaluate`: is the model right, how fast is it, and compared with what."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import mlflow
from mlflow.entities import Run
from mlflow.exceptions import MlflowException

from ansor_mlflow import measuring, names, tracking
from ansor_mlflow.errors import CorrectnessError, MachineError, UserInputError, one_line
from ansor_mlflow.files import scratch_directory
from ansor_mlflow.fleet import ServerSession, fleet_settings, open_session
from ansor_mlflow.foreign import Report, Reported, Table
from ansor_mlflow.model import (
    BuildJob,
    build_in_child_process,
    computed_by,
    describe_sizes,
    fallback_among,
    has_library,
    verified_manifest,
)
from ansor_mlflow.parameters import EvaluateOptions
from ansor_mlflow.settings import LoweringSettings
from ansor_mlflow.steps.evaluation.benches import Bench, HostBench, Library, ServerBench, require_harmless_padding
from ansor_mlflow.steps.evaluation.rivals import best_of, check_rivals, rival_metrics, rival_task
from ansor_mlflow.tensors import Arrays, NetworkShapes, all_sizes

_log = logging.getLogger("ansor_mlflow")

_TUNED, _UNTUNED, _INSTANT = "tuned", "untuned", "instant"
_MAX_UNTUNED_S = 10.0
"""Seconds in which the untuned build has to be loaded and called: what takes minutes a call is worth no wait."""


@dataclass(frozen=True, kw_only=True)
class EvaluateResult(Reported):
    """What a model is worth."""

    run_id: str
    network: str
    target: str
    metrics: dict[str, float]

    def report(self) -> Report:
        return Report(
            f"{self.network} for {self.target}", [Table(tracking.summary_rows(self.metrics))], {"run": self.run_id}
        )


def evaluate(options: EvaluateOptions) -> EvaluateResult:
    """Checks a model against ONNX Runtime, and measures its latency beside its rivals and its untuned build."""
    measuring.require_examples(options.data)
    measuring.require_rivals("rivals", options.rivals)
    with scratch_directory() as scratch:
        is_here = Path(options.model_uri).is_dir()
        model_uri = options.model_uri if is_here else tracking.pinned_uri(options.model_uri, "model_uri")
        directory = Path(model_uri)
        if not is_here:
            with tracking.translated_errors(f"read the model {model_uri}"):
                directory = Path(mlflow.artifacts.download_artifacts(artifact_uri=model_uri, dst_path=str(scratch)))
        with _server_of(options) as server, tracking.step_run("evaluate", options, "evaluate") as run:
            model_id = "" if is_here else tracking.logged_model_of(directory)
            tracking.take_model(run.run_id, model_id)
            return _evaluate(options.model_copy(update={"model_uri": model_uri}), run, directory, server, model_id)


@contextlib.contextmanager
def _server_of(options: EvaluateOptions) -> Iterator[ServerSession | None]:
    """A server of the fleet for as long as the model is evaluated; None where it runs here."""
    fleet = fleet_settings(options)
    if fleet is None:
        yield None
        return
    _log.info("asking the tracker at %s for a server of key %s", fleet.tracker, fleet.key)
    with contextlib.closing(open_session(fleet)) as server:
        yield server


def _evaluate(
    options: EvaluateOptions, run: tracking.StepRun, directory: Path, server: ServerSession | None, model_id: str
) -> EvaluateResult:
    manifest = verified_manifest(directory)
    bench = ServerBench(directory, manifest, server) if server else HostBench(directory, manifest)
    device, provenance = bench.entry.fingerprint, bench.entry.provenance
    described, of_tuning = _describe(run, options, bench)
    sizes = all_sizes(manifest)
    examples = measuring.choose_examples(options.data, sizes, options.seed, bench.network)
    run.log_data(options.data, examples[0])
    expected, broken = measuring.with_broken(bench.expected, examples, examples[0])
    metrics, tolerance = _check(bench, examples, expected, broken, options, run)
    if manifest.pad:
        require_harmless_padding(manifest, bench.compare, tolerance, options.seed)
    task = rival_task(options.rivals, directory, manifest, bench.entry, run.directory, trust=options.trust)
    rivals = check_rivals(options.rivals, task, examples, expected, tolerance, bench.why_no_rivals)
    timed: dict[str, measuring.MakeInference] = {
        rival.name: rival.make_inference for rival in rivals if not rival.absent
    }
    of_each_size = examples[: len(sizes)]
    with scratch_directory() as scratch:
        baselines = _build_baselines(options, bench, Path(scratch))
        latencies = _measure(options, of_each_size, bench, timed, baselines)
    metrics |= _latency_metrics(latencies, sizes, provenance.get("estimated_latency_ms"))
    metrics |= rival_metrics(rivals, latencies, latencies[_TUNED].median_ms)
    run.log_json([rival.to_dict(latencies.get(rival.name)) for rival in rivals], names.RIVALS_FILE)
    run.log_json({name: latency.turns_ms for name, latency in latencies.items() if latency.turns_ms}, names.TURNS_FILE)
    details, kernels = bench.details(of_each_size, timed, options, run)
    metrics |= details
    run.log_metrics(metrics, model_id)
    run.log_metrics(of_tuning)
    best = best_of(rivals, latencies)
    tags = {names.TAG_TARGET: device.description, **({names.TAG_BEST_RIVAL: best} if best else {})}
    run.log_tags(tags)
    run.log_unreliable(bench.noise.unreliable)
    tags[names.TAG_UNRELIABLE] = bench.noise.unreliable
    note = tracking.evaluation_note(
        manifest.network, tracking.command_lines("evaluate", options), {**described, **tags}, metrics, kernels
    )
    run.log_note(note)
    tracking.describe_model(model_id, {**described, **tags}, note)
    return EvaluateResult(run_id=run.run_id, network=manifest.network, target=device.description, metrics=metrics)


def _describe(run: tracking.StepRun, options: EvaluateOptions, bench: Bench) -> tuple[dict[str, str], dict[str, float]]:
    """Names and tags the run, and returns the tags that the model has, too, and the metrics of its tuning."""
    device = bench.entry.fingerprint.description
    title = bench.manifest.network, device
    described = {
        names.TAG_NETWORK: bench.manifest.network,
        names.TAG_TARGET: device,
        names.TAG_NUM_THREADS: str(bench.num_threads),
        names.TAG_COMPUTED_BY: computed_by(bench.entry.parts),
        **({names.TAG_SIZES: sizes} if (sizes := describe_sizes(bench.manifest)) else {}),
    }
    run.log_tags(
        {**described, names.TAG_MODEL_URI: options.model_uri, "mlflow.runName": f"evaluate {' · '.join(title)}"}
    )
    described[names.TAG_DTYPE] = LoweringSettings.among(bench.entry.provenance).dtype
    of_tuning: dict[str, float] = {}
    if run_id := bench.entry.provenance.get("tune_run"):
        try:
            tuning = mlflow.get_run(str(run_id))
        except MlflowException as err:  # it may be on another server
            _log.info("nothing is known here of the tuning run %s: %s", run_id, one_line(err))
        else:
            _repeat_tuning(tuning, run, title)
            metrics = tuning.data.metrics
            of_tuning = {name: metrics[name] for name in names.TUNING_METRICS if name in metrics}
            described[names.TAG_TUNE_RUN] = tuning.info.run_id
            if measured := metrics.get(names.TRIALS_MEASURED):
                described[names.TAG_NUM_TRIALS] = f"{measured:.0f}"
    return described, of_tuning


def _repeat_tuning(tuning: Run, run: tracking.StepRun, title: tuple[str, str]) -> None:
    """Says in a run how its model was tuned, so that it stands for both."""
    run.log_tags({names.TAG_TUNE_RUN: tuning.info.run_id})
    tuned = (tuning.info.run_name or "").removeprefix("tune ")
    network, device = title
    if tuned.startswith(f"{network} · ") and tuned.endswith(f" · {device}"):  # it was tuned for this one alone
        run.log_tags({"mlflow.runName": f"evaluate {tuned}"})
    params = tracking.logged_params(tuning)
    with tracking.translated_errors("log what the tuning had"):
        searched = {name: params[name] for name in names.SEARCH_PARAMS if name in params}
        tracking.Message(params=searched).deliver(run.run_id, run.directory)


def _check(
    bench: Bench,
    examples: Sequence[Arrays],
    expected: Sequence[Arrays],
    expected_broken: measuring.Computed,
    options: EvaluateOptions,
    run: tracking.StepRun,
) -> tuple[dict[str, float], float]:
    """Finds how far the outputs are from ONNX Runtime's, and what was not really compared; too far is an error, and
    logged. Returns the metrics, and how far is allowed.
    """
    network, num_inputs = bench.manifest.network, len(examples)
    _log.info("comparing the outputs of %s with ONNX Runtime's on %d inputs", network, num_inputs)
    outputs, broken = measuring.with_broken(bench.outputs, examples, examples[0])
    pairs = zip(outputs, expected, strict=True)
    difference = measuring.Deviation.worst([measuring.compare_outputs(*pair) for pair in pairs])
    metrics = {names.MAX_ABS_ERROR: difference.max_abs_error, names.MAX_REL_ERROR: difference.max_rel_error}
    if unchecked := ", ".join(measuring.same_for_all(expected)):
        _log.warning(
            "ONNX Runtime's outputs %s are the same for all inputs that were tried (%d), so that comparing them says "
            "little; give data with which they differ",
            *(unchecked, num_inputs),
        )
        run.log_tags({names.TAG_UNCHECKED: unchecked})
    dtype = LoweringSettings.among(bench.entry.provenance).dtype
    tolerance = measuring.allowed_error(
        difference.max_rel_error, options.tolerance, bench.network, dtype, bench.reference_threads, examples
    )
    if not difference.max_rel_error <= tolerance:
        run.log_metrics(metrics)
        advice = measuring.what_to_do(bench.network, bench.reference_threads, examples, tolerance)
        raise CorrectnessError(
            f"the outputs of {network} differ from ONNX Runtime's by max_rel_error={difference.max_rel_error:.3g}, "
            f"allowed is {tolerance:g}; {advice}"
        )
    measuring.require_broken_stays_broken(expected_broken, broken, bench.network)
    return metrics, tolerance


def _build_baselines(options: EvaluateOptions, bench: Bench, scratch: Path) -> dict[str, Library]:
    """Builds the same network as TVM does by itself, and, where it is asked for, as sketches choose without trials."""
    libraries, entry = {}, bench.entry
    wanted = {_UNTUNED: options.baseline == _UNTUNED, _INSTANT: options.instant}
    for name in filter(wanted.get, wanted):
        _log.info("building the baseline: %s", name)
        library = scratch / name / f"{name}.so"  # a server that has loaded one of a name takes it for the other one
        library.parent.mkdir()
        job = BuildJob(
            network=str(bench.network),
            sizes=bench.manifest.sizes,
            records="",
            untuned=name == _UNTUNED,
            device=entry.fingerprint,
            lowering=LoweringSettings.among(entry.provenance),
            library=str(library),
            linker=options.linker,
            fallback=fallback_among(entry.provenance),
        )
        try:
            built = build_in_child_process(job)
        except (MachineError, UserInputError) as err:  # DLight may know no schedule
            _log.warning("there is no such baseline: %s", err)
            continue
        if has_library(built.parts):
            libraries[name] = library, built
        else:
            _log.info("there is no such baseline: TVM computes nothing of %s", bench.manifest.network)
    return libraries


def _measure(
    options: EvaluateOptions,
    of_each_size: Sequence[Arrays],
    bench: Bench,
    rivals: Mapping[str, measuring.MakeInference],
    baselines: Mapping[str, Library],
) -> dict[str, measuring.Latency]:
    """Times the model and its rivals in turns, on the same number of threads, and the untuned build once.

    Of a network with several sizes, a call of each is timed, one after the other.
    """
    _log.info("measuring latency in %d turns", options.turns)
    turns = {_TUNED: bench.turn(None, of_each_size, options.measure_s)}
    for name, make_inference in rivals.items():
        turns[name] = partial(
            measuring.turn_in_process, partial(measuring.timed_call, make_inference, of_each_size), options.measure_s
        )
    if instant := baselines.get(_INSTANT):
        turns[_INSTANT] = bench.turn(instant, of_each_size, options.measure_s)
    latencies = measuring.take_turns(turns, options.turns, bench.noise)
    if untuned := baselines.get(_UNTUNED):
        try:
            latencies[_UNTUNED] = bench.time_first_calls(untuned, of_each_size, _MAX_UNTUNED_S)
        except MachineError as err:
            _log.warning("the untuned build is not timed: %s", err)
    return latencies


def _latency_metrics(
    latencies: dict[str, measuring.Latency], sizes: Sequence[NetworkShapes], estimated_ms: float | None
) -> dict[str, float]:
    tuned = latencies[_TUNED]
    batch_size = sum(size.inputs[0].shape[0] if size.inputs and size.inputs[0].shape else 1 for size in sizes)
    metrics = {
        names.LATENCY_MS: tuned.median_ms,
        names.LATENCY_P90_MS: tuned.p90_ms,
        names.LATENCY_P99_MS: tuned.p99_ms,
        names.LATENCY_STD_MS: tuned.std_ms,
        names.THROUGHPUT_PER_S: batch_size / tuned.median_ms * 1e3,
    }
    if untuned := latencies.get(_UNTUNED):
        metrics[names.UNTUNED_LATENCY_MS] = untuned.median_ms
        metrics[names.SPEEDUP_VS_UNTUNED] = untuned.median_ms / tuned.median_ms
    if instant := latencies.get(_INSTANT):
        metrics[names.INSTANT_LATENCY_MS] = instant.median_ms
    if estimated_ms:
        metrics[names.ESTIMATE_RATIO] = tuned.median_ms / estimated_ms
    return metrics
