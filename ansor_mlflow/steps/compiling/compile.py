"""The step `compile`: applies records to a network and logs the library as an MLflow model."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from ansor_mlflow import flavor, names
from ansor_mlflow.device import Device, why_not_runnable
from ansor_mlflow.errors import RecordsError, UserInputError
from ansor_mlflow.files import scratch_directory, write_text
from ansor_mlflow.foreign import Report, Reported, without_credentials
from ansor_mlflow.lowering import LOWERING_VERSION, LoweredNetwork, lower_sizes
from ansor_mlflow.model import (
    LIBRARY_FILE,
    CompiledNetwork,
    Coverage,
    PartEntry,
    compile_tuned,
    part_entries,
    require_linker,
    require_pad,
    write_coverage,
)
from ansor_mlflow.networks import Network, write_onnx
from ansor_mlflow.parameters import CompileOptions
from ansor_mlflow.records import find_records, read_fingerprint
from ansor_mlflow.serving import SignatureKind, get_signature
from ansor_mlflow.settings import LoweringSettings
from ansor_mlflow.steps.compiling.applying import LostRecords, loses_digits, write_records
from ansor_mlflow.steps.part_times import measure_parts
from ansor_mlflow.steps.recorded import Recorded, find_recorded, load_recorded_network
from ansor_mlflow.tracking import StepRun, step_run, translated_errors

_log = logging.getLogger("ansor_mlflow")


@dataclass(frozen=True)
class CompileResult(Reported):
    """What the step made."""

    run_id: str
    model_uri: str
    coverage: Coverage

    def report(self) -> Report:
        """What the records cover, and the model."""
        covered = f"{self.coverage.task_share:.0%} of tasks, {self.coverage.flops_share:.1%} of operations"
        return Report(f"coverage {covered}", where={"run": self.run_id, "model": self.model_uri})


@dataclass(frozen=True)
class _Recipe:
    """How the library for one device is made."""

    recorded: Recorded
    device: Device
    lowering: LoweringSettings
    provenance: Mapping[str, object]
    """Where the library comes from: versions, layout, tuning run."""


def compile_network(options: CompileOptions) -> CompileResult:
    """Compiles a network with records and logs the model."""
    with scratch_directory() as scratch:
        recipes = _recipes(options, Path(scratch))
        recorded = recipes[0].recorded
        network = load_recorded_network(recorded)
        with step_run("compile", options, f"compile {options.network}") as run:
            run.log_options(recorded.options.model_copy(update={"tune_run": options.tune_run}))
            run.log_tags({names.TAG_TUNE_RUN: ",".join(options.tune_runs)})
            libraries, coverage = _build_libraries(network, recipes, options, run)
            return CompileResult(run.run_id, _log_model(libraries, run, options.signature), coverage)


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
        require_linker(device.fingerprint.machine, options.linker)
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
        require_linker(made_for.machine, options.linker)  # before LLVM is asked, which may not know the machine
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


def _build_libraries(
    network: Network, recipes: Sequence[_Recipe], options: CompileOptions, run: StepRun
) -> tuple[list[CompiledNetwork], Coverage]:
    """Compiles a network in the run's scratch directory, and says in the run what it is and what is covered."""
    require_pad(options.pad, network.name, network)
    _describe_run(run, network.name, [recipe.device for recipe in recipes])
    write_onnx(network.model, run.directory / names.NETWORK_FILE)
    built = [_build_library(network, recipe, options, run) for recipe in recipes]
    library, coverage, _ = min(built, key=lambda of_device: of_device[1].flops_share)
    _report_coverage(coverage, library.parts, run)
    if options.allow_missing:
        _report_lost([lost for _, _, of_device in built for lost in of_device], run)
    return [replace(library, pad=options.pad) for library, _, _ in built], coverage


def _describe_run(run: StepRun, network: str, devices: Sequence[Device]) -> None:
    """Says in a run what is compiled, and for which devices."""
    descriptions = ", ".join(device.description for device in devices)
    run.log_tags(
        {
            names.TAG_NETWORK: network,
            names.TAG_TARGET: descriptions,
            names.TAG_NUM_THREADS: ", ".join(str(device.num_threads) for device in devices),
            "mlflow.runName": f"compile {network} · {descriptions}",
        }
    )


def _build_library(
    network: Network, recipe: _Recipe, options: CompileOptions, run: StepRun
) -> tuple[CompiledNetwork, Coverage, list[LostRecords]]:
    """Compiles a network; of one that is partly ONNX Runtime's only the parts that pay."""
    directory, device = run.directory / recipe.device.fingerprint.name, recipe.device
    lowered = lower_sizes(network.models(), device.target, recipe.lowering, network.name)
    mismatch, lost = write_records(recipe.recorded, lowered, device, directory / names.BEST_DIR, options)
    if mismatch:
        _log.warning("%s; they are applied nevertheless, and may be slow", mismatch)
        run.log_tags({names.TAG_TARGET_MISMATCH: mismatch})
    compile_in = partial(_compile, network, recipe, options, run.directory, mismatch)
    compiled, coverage = compile_in(lowered)
    if loses_digits(compiled, coverage):
        directly = replace(recipe.lowering, algorithm="direct")
        provenance = {**recipe.provenance, "algorithm": "direct"}
        directly_computed = replace(recipe, lowering=directly, provenance=provenance)
        return (*_build_library(network, directly_computed, options, run)[:2], lost)
    compiled, fallback = measure_parts(compiled, lowered)
    if fallback:
        lowered = lower_sizes(network.models(), device.target, recipe.lowering, network.name, fallback)
        compiled, coverage = compile_in(lowered)
        compiled, _ = measure_parts(compiled, lowered)
    return compiled, coverage, lost


def _compile(
    network: Network, recipe: _Recipe, options: CompileOptions, root: Path, mismatch: str, lowered: LoweredNetwork
) -> tuple[CompiledNetwork, Coverage]:
    """Compiles a network, as it was lowered, with the best records in the directory of its device."""
    device, directory = recipe.device, root / recipe.device.fingerprint.name
    library, best = directory / LIBRARY_FILE, directory / names.BEST_DIR
    _log.info("compiling %s for %s", network.name, device.description)
    max_bytes = options.max_library_mib * 2**20 if options.max_library_mib else None
    coverage = compile_tuned(lowered, device.target, best, library, max_bytes=max_bytes, linker=options.linker)
    if not device.platform.in_process and (reason := why_not_runnable(device.fingerprint)):
        _log.warning("the library for %s is compiled and was not run: %s", device.description, reason)
    compiled = CompiledNetwork(
        name=network.name,
        network=root / names.NETWORK_FILE,
        inputs=network.inputs,
        outputs=network.outputs,
        library=library,
        records=best,
        fingerprint=device.fingerprint,
        coverage=coverage.to_dict(),
        parts=part_entries(lowered),
        sizes=network.sizes,
        provenance={**recipe.provenance, "target_mismatch": mismatch},
    )
    return compiled, coverage


def _log_model(libraries: Sequence[CompiledNetwork], run: StepRun, signature: SignatureKind) -> str:
    """Logs the libraries of a network as one model to the run of the step, and returns the model's URI."""
    first = libraries[0]
    with translated_errors("log the model"):
        logged = flavor.log_model(
            libraries, name=names.MODEL_NAME, signature=get_signature(first.inputs, first.outputs, signature)
        )
    model_uri = str(logged.model_uri)
    run.log_tags({names.TAG_MODEL_URI: model_uri})
    return model_uri


def _report_coverage(coverage: Coverage, parts: Sequence[PartEntry], run: StepRun) -> None:
    """Says in a run how much of a network the records cover; of several libraries, of the least covered one."""
    run.log_metrics(
        {
            names.COVERAGE_TASKS: coverage.task_share,
            names.COVERAGE_FLOPS: coverage.flops_share,
            names.LIBRARY_GROWTH_MIB: coverage.growth_bytes / 2**20,
        }
    )
    path = run.directory / names.COVERAGE_FILE
    write_coverage(coverage, parts, path)
    run.log_artifacts(path)
    if coverage.missing:
        _log.warning(
            "%d of %d tasks have no record (%.1f %% of the operations are covered), such as %s: they run as chosen "
            "without a measurement%s; tune this network for this target and layout",
            len(coverage.missing),
            len(coverage.missing) + len(coverage.covered),
            coverage.flops_share * 100,
            coverage.missing[0].name,
            f", {len(coverage.unscheduled)} as TVM has them, often a hundred times slower"
            if coverage.unscheduled
            else "",
        )


def _report_lost(lost: Sequence[LostRecords], run: StepRun) -> None:
    """Says in a run which records do not apply any more."""
    path = run.directory / names.LOST_RECORDS_FILE
    write_text(path, json.dumps([asdict(records) for records in lost], indent=1))
    run.log_artifacts(path)
    run.log_metrics({names.RECORDS_LOST: len(lost)})
    if lost:
        _log.warning(
            "the records of %d workloads do not apply any more, such as %s; %s says which",
            len(lost),
            lost[0].task or lost[0].workload_hash,
            names.LOST_RECORDS_FILE,
        )


def provenance_of(recorded: Recorded) -> dict[str, object]:
    """Where a library that is compiled with records comes from; a model keeps it."""
    import tvm

    versions = {"lowering_version": LOWERING_VERSION, "tvm_version": tvm.__version__}
    if recorded.provenance is not None:
        return {**asdict(recorded.provenance), **versions, "tune_run": recorded.options.tune_run}
    records = without_credentials(recorded.options.records)
    return {**asdict(recorded.options.lowering), **versions, "records": records}
