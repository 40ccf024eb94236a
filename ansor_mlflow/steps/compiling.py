"""The step `compile`: applies records to a network and logs the library as an MLflow model."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ansor_mlflow import flavor, measuring, model, names
from ansor_mlflow.device import Device, why_not_runnable
from ansor_mlflow.errors import RecordsError, UserInputError
from ansor_mlflow.files import scratch_directory
from ansor_mlflow.foreign import Report, Reported, duration, without_credentials
from ansor_mlflow.lowering import LOWERING_VERSION, LoweredNetwork, lower_sizes
from ansor_mlflow.networks import Network, write_onnx
from ansor_mlflow.parameters import CompileOptions
from ansor_mlflow.processes import WorkerPool
from ansor_mlflow.records import (
    find_records,
    read_fingerprint,
)
from ansor_mlflow.serving import get_signature
from ansor_mlflow.settings import FallbackReasons, LoweringSettings
from ansor_mlflow.steps.quantizing import log_quantization, quantized
from ansor_mlflow.steps.recorded import (
    LostRecords,
    Recorded,
    find_recorded,
    load_recorded_network,
    write_best,
)
from ansor_mlflow.steps.runtimes import (
    MIN_SLOWDOWN,
    WRONG_HERE,
    leave_to_onnxruntime,
    losing_segments,
    measure_parts,
    milliseconds_of,
    prefer_fastest,
    why_wrong,
)
from ansor_mlflow.tracking import StepRun, model_name, step_run, translated_errors

if TYPE_CHECKING:
    pass

_MARGIN = 0.75
"""Share of the tolerance that these inputs may take. The largest error differs between inputs: of eight random ones it
was up to 1.6 times as large for one as for another, and a fifth more than the largest of the first four."""
_MAX_COMPILE_S = 30.0
"""Seconds of a compilation beyond which no other ones are made of the same network: there would be two more."""
_NUM_SEGMENTS = 8
_MIN_MIXED_MS = 0.2
"""Milliseconds of a call below which handing tensors over takes more than a mix gains."""
_MUCH_FASTER = 0.8
"""Time of TVM over that of ONNX Runtime below which it is not asked whether a mix is faster."""
_log = logging.getLogger("ansor_mlflow")


@dataclass(frozen=True)
class CompileResult(Reported):
    """What the step made."""

    run_id: str
    model_uri: str
    coverage: model.Coverage
    computed_by: str
    """The runtimes that compute the network, separated by commas."""

    def report(self) -> Report:
        covered = f"{self.coverage.task_share:.0%} of tasks, {self.coverage.flops_share:.1%} of operations"
        return Report(
            f"computed by {self.computed_by}; coverage {covered}", where={"run": self.run_id, "model": self.model_uri}
        )


@dataclass(frozen=True)
class _Recipe:
    """How the library for one device is made."""

    recorded: Recorded
    device: Device
    lowering: LoweringSettings
    provenance: Mapping[str, object]


def compile_network(options: CompileOptions) -> CompileResult:
    """Compiles a network with records and logs the model."""
    if "openvino" in options.runtimes:
        measuring.require_rivals("runtimes", ["openvino"])
    with scratch_directory() as scratch:
        recipes = _recipes(options, Path(scratch))
        recorded = recipes[0].recorded
        network, quantization = load_recorded_network(recorded), None
        if not options.tune_run:  # which has quantised it
            network, quantization = quantized(network, options, recipes[0].device.target)
        with step_run("compile", options, f"compile {options.network}") as run:
            run.log_options(recorded.options.model_copy(update={"tune_run": options.tune_run}))
            model.require_pad(options.pad, network.name, network)
            if quantization:
                log_quantization(run, quantization)
            devices = [recipe.device for recipe in recipes]
            descriptions = ", ".join(device.description for device in devices)
            run.log_tags(
                {
                    names.TAG_TUNE_RUN: ",".join(options.tune_runs),
                    names.TAG_NETWORK: network.name,
                    names.TAG_TARGET: descriptions,
                    names.TAG_NUM_THREADS: ", ".join(str(device.num_threads) for device in devices),
                    "mlflow.runName": f"compile {network.name} · {descriptions}",
                }
            )
            write_onnx(network.model, run.directory / names.NETWORK_FILE)
            with contextlib.closing(model.build_pool()) as pool:
                built = [_build_library(network, recipe, options, run, pool) for recipe in recipes]
            library, coverage, _ = min(built, key=lambda of_device: of_device[1].flops_share)
            metrics = _report_coverage(coverage, library.parts, run)
            if options.allow_missing:
                metrics |= _report_lost([lost for _, _, of_device in built for lost in of_device], run)
            libraries = [replace(library, pad=options.pad) for library, _, _ in built]
            if sizes := model.describe_sizes(libraries[0]):
                _log.info("sizes: %s", sizes)
            signature = get_signature(network.inputs, network.outputs, options.signature)
            with translated_errors("log the model"):
                logged = flavor.log_model(libraries, name=model_name(network.name, descriptions), signature=signature)
            computed_by = model.computed_by(library.parts)
            run.log_tags({names.TAG_MODEL_URI: str(logged.model_uri), names.TAG_COMPUTED_BY: computed_by})
            run.log_metrics(metrics)  # before, MLflow would make them the first ones of the model
            return CompileResult(run.run_id, str(logged.model_uri), coverage, computed_by)


def _recipes(options: CompileOptions, scratch: Path) -> list[_Recipe]:
    """How to compile for the device of each tuning run, or for the one of the records that are given."""
    if len(options.tune_runs) > 1 and options.allow_target_mismatch:
        raise UserInputError(
            "allow_target_mismatch with several tuning runs: each is compiled for its own device; leave it out"
        )
    recipes = []
    for number, tune_run in enumerate(options.tune_runs or ("",)):
        directory = scratch / str(number)
        directory.mkdir()
        recorded = find_recorded(options.model_copy(update={"tune_run": tune_run}), directory, any_lowering=True)
        find_records(recorded.records)  # there are some, or it says what is missing
        device = _device_of(recorded, options)
        model.require_linker(device.fingerprint.machine, options.linker)
        recipes.append(_Recipe(recorded, device, recorded.options.lowering, provenance_of(recorded)))
    _require_one_network(recipes)
    return recipes


def _device_of(recorded: Recorded, options: CompileOptions) -> Device:
    """What is compiled for: of several tuning runs the device of each, which need not be this host."""
    if len(options.tune_runs) > 1:
        made_for = read_fingerprint(recorded.records)
        if made_for is None:
            run = recorded.options.tune_run
            raise RecordsError(f"run {run} does not say which device its records are for; compile it alone")
        model.require_linker(made_for.machine, options.linker)  # before LLVM is asked, which may not know the machine
        return Device.elsewhere(made_for)
    if options.allow_target_mismatch:
        return Device.resolve(recorded.options.target, recorded.options.num_threads)
    return recorded.device


def _require_one_network(recipes: Sequence[_Recipe]) -> None:
    """Refuses tuning runs whose libraries cannot be in one model: of other networks, or for the same device."""
    first = recipes[0].recorded
    devices: dict[str, str] = {}
    for recipe in recipes:
        run, options = recipe.recorded.options.tune_run, recipe.recorded.options
        if _digest_of(recipe.recorded) != _digest_of(first):
            raise UserInputError(
                f"tune_run: {first.options.tune_run} tuned {first.options.network} and {run} tuned {options.network}, "
                "or other weights of it; a model holds libraries of one network"
            )
        other = devices.setdefault(recipe.device.fingerprint.name, run)
        if other != run:
            raise UserInputError(
                f"tune_run: {other} and {run} are both for {recipe.device.description}; a model holds one library for "
                "each device: give one of them, or tune one with warm_start= the other"
            )


def _digest_of(recorded: Recorded) -> str:
    return recorded.provenance.network_sha256 if recorded.provenance else ""


def _build_library(
    network: Network,
    recipe: _Recipe,
    options: CompileOptions,
    run: StepRun,
    pool: WorkerPool,
    spent_s: float = 0.0,
) -> tuple[model.CompiledNetwork, model.Coverage, list[LostRecords]]:
    """Compiles a network, and leaves to other runtimes what TVM computes wrong or slower.

    It took `spent_s` to compile it in another way, which was wrong.
    """
    runtimes, device = options.runtimes.split(","), recipe.device
    lowered, known = _lower(network, recipe)
    directory = run.directory / device.fingerprint.name
    mismatch, lost = write_best(recipe.recorded, lowered, device, directory / names.BEST_DIR, options)
    if mismatch:
        _log.warning("%s; they are applied nevertheless, and may be slow", mismatch)
        run.log_tags({names.TAG_TARGET_MISMATCH: mismatch})
    maker = _Maker(network=network, recipe=recipe, options=options, run=run, pool=pool, mismatch=mismatch)
    started_s = time.monotonic()
    compiled, coverage, known = maker.compile(known)
    spent_s += time.monotonic() - started_s
    if not model.has_library(compiled.parts):
        if "onnxruntime" not in runtimes:
            raise UserInputError(
                f"network={network.name}: TVM computes nothing of it, and runtimes={options.runtimes} allows no other; "
                "leave runtimes out"
            )
        return compiled, coverage, lost
    has_other_algorithms = coverage.has_other_algorithms
    if wrong := why_wrong(compiled, share=_MARGIN if has_other_algorithms else 1.0):
        if has_other_algorithms:
            _log.warning("with Winograd's convolutions, %s: all layers are direct", wrong)
            directly = replace(recipe.lowering, algorithm="direct")
            provenance = {**recipe.provenance, "algorithm": "direct"}
            directly_computed = replace(recipe, lowering=directly, provenance=provenance)
            return (*_build_library(network, directly_computed, options, run, pool, spent_s)[:2], lost)
        if "onnxruntime" in runtimes and device.platform.in_process:
            _log.warning("TVM computes %s wrong, so that ONNX Runtime computes all of it: %s", network.name, wrong)
            return leave_to_onnxruntime(compiled, network, WRONG_HERE), coverage, lost
        _log.warning("TVM computes %s wrong: %s; find out where with ansor-mlflow bisect", network.name, wrong)
    if "onnxruntime" in runtimes and compiled.parts:
        compiled, losing = measure_parts(compiled, maker.lower(known))
        if losing:
            compiled, coverage = maker.without(known, losing)
    if recipe.lowering.dtype != "float32":  # which no other runtime is asked to compute in
        return compiled, coverage, lost
    preferred = prefer_fastest(compiled, network, runtimes)
    was_timed = "onnxruntime" in runtimes and "runtimes_ms" in preferred.provenance
    if was_timed and not (compiled.parts or compiled.sizes) and spent_s < _MAX_COMPILE_S:
        preferred, coverage = maker.mixed(preferred, coverage, known)
    return preferred, coverage, lost


def _lower(network: Network, recipe: _Recipe) -> tuple[LoweredNetwork, FallbackReasons]:
    """Lowers a network; in another process first, unless its tuning has done so with these versions."""
    import tvm

    known, made = model.fallback_among(recipe.provenance), recipe.recorded.provenance
    if made is not None and (made.lowering_version, made.tvm_version) == (LOWERING_VERSION, tvm.__version__):
        return lower_sizes(network.models(), recipe.device.target, recipe.lowering, network.name, known), known
    return model.lower_guarded(network, recipe.device, recipe.lowering, network.name, known)


@dataclass(frozen=True, kw_only=True)
class _Maker:
    """What makes the libraries of a network for a device, of which one is taken."""

    network: Network
    recipe: _Recipe
    options: CompileOptions
    run: StepRun
    pool: WorkerPool
    mismatch: str

    def lower(self, fallback: FallbackReasons, num_segments: int = 1) -> LoweredNetwork:
        network, recipe = self.network, self.recipe
        target, settings = recipe.device.target, recipe.lowering
        return lower_sizes(network.models(), target, settings, network.name, fallback, num_segments)

    def compile(
        self, fallback: FallbackReasons, variant: str = "", num_segments: int = 1
    ) -> tuple[model.CompiledNetwork, model.Coverage, FallbackReasons]:
        """Compiles the network in a process of its own, into a directory for each variant.

        Returns also what stays with ONNX Runtime because it ends the compiler.
        """
        network, device = self.network, self.recipe.device
        directory, max_mib = self.run.directory / device.fingerprint.name, self.options.max_library_mib
        _log.info("compiling %s for %s%s", network.name, device.description, f", {variant}" if variant else "")
        job = model.BuildJob(
            network=str(self.run.directory / names.NETWORK_FILE),
            called=network.name,
            sizes=network.sizes,
            records=str(directory / names.BEST_DIR),
            device=device.fingerprint,
            lowering=self.recipe.lowering,
            library=str(directory / variant / model.LIBRARY_FILE),
            linker=self.options.linker,
            fallback=fallback,
            max_bytes=max_mib * 2**20 if max_mib else None,
            num_segments=num_segments,
        )
        crashes = self.run.directory / names.CRASHES_DIR
        (entry, coverage), ended = model.guarded(job, model.build, crashes, self.pool)
        if crashes.exists():
            self.run.log_artifacts(crashes, names.CRASHES_DIR)
        if not device.platform.in_process and (reason := why_not_runnable(device.fingerprint)):
            _log.warning("the library for %s is compiled and was not run: %s", device.description, reason)
        compiled = model.CompiledNetwork(
            name=network.name,
            network=Path(job.network),
            inputs=network.inputs,
            outputs=network.outputs,
            library=Path(job.library),
            records=Path(job.records),
            fingerprint=device.fingerprint,
            coverage=entry.coverage,
            parts=entry.parts,
            sizes=network.sizes,
            provenance={**self.recipe.provenance, "target_mismatch": self.mismatch, "fallback": ended},
        )
        return compiled, coverage, ended

    def without(
        self, known: FallbackReasons, losing: FallbackReasons, variant: str = ""
    ) -> tuple[model.CompiledNetwork, model.Coverage]:
        """Compiles the network without what is slower in TVM, beside what is known to end the compiler."""
        both = {size: {**known.get(size, {}), **losing.get(size, {})} for size in {*known, *losing}}
        compiled, coverage, _ = self.compile(both, variant)
        compiled, _ = measure_parts(compiled, self.lower(both))
        return replace(compiled, provenance={**compiled.provenance, "fallback": known}), coverage

    def mixed(
        self, preferred: model.CompiledNetwork, coverage: model.Coverage, known: FallbackReasons
    ) -> tuple[model.CompiledNetwork, model.Coverage]:
        """The `preferred` of both runtimes, or a mix of them, where TVM alone is not much faster and a mix is."""
        (times,) = preferred.provenance["runtimes_ms"]
        fastest_ms = min(times.values())
        if fastest_ms < _MIN_MIXED_MS or times["tvm"] < _MUCH_FASTER * times["onnxruntime"]:
            return preferred, coverage
        cut, _, _ = self.compile(known, "in segments", _NUM_SEGMENTS)
        losing = losing_segments(cut, self.lower(known, _NUM_SEGMENTS), fastest_ms / 1e3) if cut.parts else {}
        if not losing:
            return preferred, coverage
        mixed, coverage_of_mixed = self.without(known, losing, "mixed")
        if wrong := why_wrong(mixed):
            _log.warning("%s in a mix of runtimes is wrong: %s", self.network.name, wrong)
            return preferred, coverage
        (found,) = milliseconds_of({"preferred": preferred, "mixed": mixed})
        if found["mixed"] * MIN_SLOWDOWN > found["preferred"]:
            return preferred, coverage
        _log.info("a mix of both runtimes takes %s", duration(found["mixed"] / 1e3))
        return replace(mixed, provenance={**mixed.provenance, "runtimes_ms": [{**times, **found}]}), coverage_of_mixed


def _report_coverage(coverage: model.Coverage, parts: Sequence[model.PartEntry], run: StepRun) -> dict[str, float]:
    """Says how much of a network the records cover, and returns the metrics; of several libraries, of the least
    covered one.
    """
    run.log_json({**coverage.to_dict(), "parts": parts}, names.COVERAGE_FILE)
    if coverage.missing:
        number = len(coverage.unscheduled)
        unscheduled = f", {number} as TVM has them, often a hundred times slower" if number else ""
        _log.warning(
            "%d of %d tasks have no record (%.1f %% of the operations are covered), such as %s: they run as chosen "
            "without a measurement%s; tune this network for this target and layout",
            len(coverage.missing),
            len(coverage.missing) + len(coverage.covered),
            coverage.flops_share * 100,
            coverage.missing[0].name,
            unscheduled,
        )
    return {
        names.COVERAGE_TASKS: coverage.task_share,
        names.COVERAGE_FLOPS: coverage.flops_share,
        names.LIBRARY_GROWTH_MIB: coverage.growth_bytes / 2**20,
    }


def _report_lost(lost: Sequence[LostRecords], run: StepRun) -> dict[str, float]:
    run.log_json(lost, names.LOST_RECORDS_FILE)
    if lost:
        _log.warning(
            "the records of %d workloads do not apply any more, such as %s; %s says which",
            len(lost),
            lost[0]["task"] or lost[0]["workload_hash"],
            names.LOST_RECORDS_FILE,
        )
    return {names.RECORDS_LOST: len(lost)}


def provenance_of(recorded: Recorded) -> dict[str, object]:
    """Where a library that is compiled with records comes from; a model keeps it."""
    import tvm

    versions = {"lowering_version": LOWERING_VERSION, "tvm_version": tvm.__version__}
    if recorded.provenance is not None:
        return {**asdict(recorded.provenance), **versions, "tune_run": recorded.options.tune_run}
    records = without_credentials(recorded.options.records)
    return {**asdict(recorded.options.lowering), **versions, "records": records}
