"""The step `compile`: applies records to a network and logs the library as an MLflow model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from ansor_mlflow import flavor, names
from ansor_mlflow.device import Device, is_gpu, why_not_runnable
from ansor_mlflow.errors import UserInputError
from ansor_mlflow.files import scratch_directory
from ansor_mlflow.foreign import without_credentials
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
from ansor_mlflow.options import CompileOptions, RecordsOptions
from ansor_mlflow.records import find_records
from ansor_mlflow.serving import SignatureKind, get_signature
from ansor_mlflow.settings import Linker, LoweringSettings
from ansor_mlflow.steps.compiling.exactness import loses_digits
from ansor_mlflow.steps.compiling.paying import measure_parts
from ansor_mlflow.steps.compiling.tuned_devices import TunedDevice, require_one_network
from ansor_mlflow.steps.records import Recorded, distill_for_device, find_recorded, load_recorded_network
from ansor_mlflow.tracking import StepRun, html_table, step_run, translated_errors

WriteRecords = Callable[[LoweredNetwork, Device, Path], str]
"""Writes the records to apply to a network on a device into a directory. Returns for which device they are, in one
clause, where it is another."""
_log = logging.getLogger("ansor_mlflow")


@dataclass(frozen=True)
class CompileResult:
    """What the step made."""

    run_id: str
    model_uri: str
    coverage: Coverage

    def _repr_html_(self) -> str:
        covered = f"{self.coverage.task_share:.0%} of tasks, {self.coverage.flops_share:.1%} of operations"
        return html_table("compiled", [("model", self.model_uri), ("coverage", covered), ("run", self.run_id)])


@dataclass(frozen=True)
class Recipe:
    """How the library for one device is made."""

    lowering: LoweringSettings
    device: Device
    write_best: WriteRecords
    provenance: Mapping[str, object]
    """Where the library comes from: versions, layout, tuning run."""
    max_bytes: int | None = None
    """Size that its constants may have."""
    linker: Linker | None = None
    """What links it, where the device has another architecture."""


def compile_network(options: CompileOptions) -> CompileResult:
    """Compiles a network with records and logs the model.

    Raises:
        AnsorMlflowError: The options are not usable, the records are for another target or network, or a server is
            away.
    """
    with scratch_directory() as scratch:
        find = _recipes_for_devices if len(options.tune_runs) > 1 else _recipe
        network, recipes, used = find(options, Path(scratch))
        with step_run("compile", options, f"compile {options.network}") as run:
            run.log_options(used)
            run.log_tags({names.TAG_TUNE_RUN: ",".join(options.tune_runs)})
            libraries, coverage = build_libraries(network, recipes, run, step="compile", pad=options.pad)
            return CompileResult(run.run_id, log_model(libraries, run, options.signature), coverage)


def _recipe(options: CompileOptions, scratch: Path) -> tuple[Network, list[Recipe], RecordsOptions]:
    """A network, how to compile it for the one device, and the options that its records were made with."""
    recorded = find_recorded(options.model_copy(update={"tune_run": "".join(options.tune_runs)}), scratch)

    def write_best(_: LoweredNetwork, device: Device, best: Path) -> str:
        return distill_for_device(
            recorded.records, device.fingerprint, best, allow_mismatch=options.allow_target_mismatch
        )

    find_records(recorded.records)  # there are some, or it says what is missing
    used = recorded.options
    device = Device.resolve(used.target, used.num_threads) if options.allow_target_mismatch else recorded.device
    require_linker(device.fingerprint.machine, options.linker)
    provenance = provenance_of(recorded)
    recipe = Recipe(used.lowering, device, write_best, provenance, options.max_library_bytes, options.linker)
    return load_recorded_network(recorded), [recipe], used


def _recipes_for_devices(options: CompileOptions, scratch: Path) -> tuple[Network, list[Recipe], RecordsOptions]:
    """As `_recipe`, for the device of each of several tuning runs; the options are the first one's.

    Raises:
        UserInputError: They tuned different networks, or two of them the same device.
        RecordsError: It is not known for which device the records of one are.
        MachineError: Libraries for one of the devices cannot be linked here.
    """
    if options.allow_target_mismatch:
        raise UserInputError(
            "allow_target_mismatch with several tuning runs: each is compiled for its own device; leave it out"
        )
    tuned = []
    for number, tune_run in enumerate(options.tune_runs):
        directory = scratch / str(number)
        directory.mkdir()
        recorded = find_recorded(options.model_copy(update={"tune_run": tune_run}), directory)
        tuned.append(TunedDevice.of(recorded, options.linker))
    require_one_network(tuned)
    used = tuned[0].recorded.options.model_copy(update={"tune_run": options.tune_run})
    return load_recorded_network(tuned[0].recorded), [_recipe_of(member, options) for member in tuned], used


def _recipe_of(tuned: TunedDevice, options: CompileOptions) -> Recipe:
    """How to compile for the device that a tuning run measured on."""
    lowering, provenance = tuned.recorded.options.lowering, provenance_of(tuned.recorded)
    return Recipe(lowering, tuned.device, tuned.write_best, provenance, options.max_library_bytes, options.linker)


def build_libraries(
    network: Network, recipes: Sequence[Recipe], run: StepRun, *, step: str, pad: dict[str, float]
) -> tuple[list[CompiledNetwork], Coverage]:
    """Compiles a network in the run's scratch directory, and says in the run what it is and what is covered.

    Args:
        network: The network.
        recipes: How, for each device.
        run: The run of the step.
        step: Name of the step, for that of the run.
        pad: The value that an input is padded with to the next larger size, by its name.

    Returns:
        A library for each recipe, and the coverage of the one that is covered least.

    Raises:
        UserInputError: The network cannot be padded.
    """
    require_pad(pad, network.name, network)
    _describe_run(run, step, network.name, [recipe.device for recipe in recipes])
    write_onnx(network.model, run.directory / names.NETWORK_FILE)
    built = [_build_library(network, recipe, run) for recipe in recipes]
    library, coverage = min(built, key=lambda pair: pair[1].flops_share)
    _report_coverage(coverage, library.parts, run)
    return [replace(library, pad=pad) for library, _ in built], coverage


def _describe_run(run: StepRun, step: str, network: str, devices: Sequence[Device]) -> None:
    """Says in a run what is compiled, and for which devices."""
    descriptions = ", ".join(device.description for device in devices)
    run.log_tags(
        {
            names.TAG_NETWORK: network,
            names.TAG_TARGET: descriptions,
            names.TAG_NUM_THREADS: ", ".join(str(device.num_threads) for device in devices),
            "mlflow.runName": f"{step} {network} · {descriptions}",
        }
    )


def _build_library(network: Network, recipe: Recipe, run: StepRun) -> tuple[CompiledNetwork, Coverage]:
    """Compiles a network; of one that is partly ONNX Runtime's only the parts that pay."""
    directory, device = run.directory / recipe.device.fingerprint.name, recipe.device
    lowered = lower_sizes(network.models(), device.target, recipe.lowering, network.name)
    mismatch = recipe.write_best(lowered, device, directory / names.BEST_DIR)
    if mismatch:
        _log.warning("%s; they are applied nevertheless, and may be slow", mismatch)
        run.log_tags({names.TAG_TARGET_MISMATCH: mismatch})
    compile_in = partial(_compile, network, recipe, run.directory / names.NETWORK_FILE, directory, mismatch)
    compiled, coverage = compile_in(lowered)
    if loses_digits(compiled, coverage):
        directly = replace(recipe.lowering, algorithm="direct")
        provenance = {**recipe.provenance, "algorithm": "direct"}
        return _build_library(network, replace(recipe, lowering=directly, provenance=provenance), run)
    compiled, stays = measure_parts(compiled, lowered)
    if stays:
        lowered = lower_sizes(network.models(), device.target, recipe.lowering, network.name, stays)
        compiled, coverage = compile_in(lowered)
        compiled, _ = measure_parts(compiled, lowered)
    return compiled, coverage


def _compile(
    network: Network, recipe: Recipe, file: Path, directory: Path, mismatch: str, lowered: LoweredNetwork
) -> tuple[CompiledNetwork, Coverage]:
    """Compiles a network, as it was lowered, with the best records in a directory."""
    device, library, best = recipe.device, directory / LIBRARY_FILE, directory / names.BEST_DIR
    _log.info("compiling %s for %s", network.name, device.description)
    coverage = compile_tuned(lowered, device.target, best, library, max_bytes=recipe.max_bytes, linker=recipe.linker)
    if is_gpu(device.target) and (reason := why_not_runnable(device.fingerprint)):
        _log.warning("the library for %s is compiled and was not run: %s", device.description, reason)
    compiled = CompiledNetwork(
        name=network.name,
        network=file,
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


def log_model(libraries: Sequence[CompiledNetwork], run: StepRun, signature: SignatureKind) -> str:
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


def provenance_of(recorded: Recorded) -> dict[str, object]:
    """Where a library that is compiled with records comes from; a model keeps it."""
    import tvm

    if recorded.provenance is not None:
        return {**asdict(recorded.provenance), "tvm_version": tvm.__version__, "tune_run": recorded.options.tune_run}
    return {
        **asdict(recorded.options.lowering),
        "lowering_version": LOWERING_VERSION,
        "tvm_version": tvm.__version__,
        "records": without_credentials(recorded.options.records),
    }
