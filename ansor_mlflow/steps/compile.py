"""The step `compile`: applies records to a network and logs the library as an MLflow model."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ansor_mlflow import flavor, names
from ansor_mlflow.compile import Coverage, compile_tuned, write_coverage
from ansor_mlflow.errors import UserInputError
from ansor_mlflow.lowering import LOWERING_VERSION, LoweredNetwork, lower
from ansor_mlflow.model import LIBRARY_FILE, CompiledNetwork
from ansor_mlflow.networks import Network
from ansor_mlflow.networks.onnx_file import write_onnx
from ansor_mlflow.options import CompileOptions, NetworkOptions
from ansor_mlflow.serving import SignatureKind, get_signature
from ansor_mlflow.steps.devices import TunedDevice, require_one_network
from ansor_mlflow.steps.recorded import Recorded, distill_for_device, find_recorded, load_recorded_network
from ansor_mlflow.targets import DeviceFingerprint, fingerprint, resolve_target
from ansor_mlflow.threads import resolve_num_threads
from ansor_mlflow.tracking.failures import clear_failures
from ansor_mlflow.tracking.run import StepRun, step_run

if TYPE_CHECKING:
    from tvm.target import Target

WriteRecords = Callable[[LoweredNetwork, "Target", DeviceFingerprint, Path], str]
"""Writes the records to apply to a network on a device into a directory. Returns for which device they are, in one
clause, where it is another."""
_log = logging.getLogger("ansor_mlflow")


@dataclass(frozen=True)
class CompileResult:
    """What the step made."""

    run_id: str
    model_uri: str
    coverage: Coverage


def compile_network(options: CompileOptions) -> CompileResult:
    """Compiles a network with records and logs the model.

    Raises:
        AnsorMlflowError: The options are not usable, the records are for another target or network, or a server is
            away.
    """
    with step_run("compile", options, f"compile {options.network}") as run:
        return _compile(options, run)


def _compile(options: CompileOptions, run: StepRun) -> CompileResult:
    with tempfile.TemporaryDirectory(prefix="ansor_mlflow-") as scratch:
        if len(options.tune_runs) > 1:
            libraries = compile_for_devices(options, run, Path(scratch))
            coverage = min((coverage for _, coverage in libraries), key=lambda coverage: coverage.flops_share)
            report_coverage(coverage, run)
            members = [member for member, _ in libraries]
            return CompileResult(run.run_id, log_model(members, run, options.signature), coverage)
        recorded = find_recorded(options, Path(scratch))
        run.log_options(recorded.options)
        run.log_tags({names.TAG_TUNE_RUN: recorded.options.tune_run})

        def write_best(kernels: LoweredNetwork, target: Target, device: DeviceFingerprint, best: Path) -> str:  # noqa: ARG001
            allow_mismatch = options.allow_target_mismatch
            return distill_for_device(recorded.records, device, best, allow_mismatch=allow_mismatch)

        compiled, coverage = build_model(
            load_recorded_network(recorded), recorded.options, run, write_best, _provenance(recorded), step="compile"
        )
    return CompileResult(run.run_id, log_model(compiled, run, options.signature), coverage)


def build_model(
    network: Network,
    options: NetworkOptions,
    run: StepRun,
    write_best: WriteRecords,
    provenance: Mapping[str, object],
    *,
    step: str,
) -> tuple[CompiledNetwork, Coverage]:
    """Compiles a network in the run's scratch directory, and says in the run what it is and what is covered.

    Args:
        network: The network.
        options: Its layout, target and threads.
        run: The run of the step.
        write_best: Writes the records that are applied.
        provenance: Where the model comes from.
        step: Name of the step, for that of the run.
    """
    num_threads = resolve_num_threads(options.num_threads)
    target = resolve_target(options.target, num_threads)
    device = fingerprint(target, num_threads)
    describe_run(run, step, network.name, [device])
    network_file = run.directory / names.NETWORK_FILE
    write_onnx(network.model, network_file)
    compiled, coverage = build_library(
        network, network_file, options, target, device, run, run.directory, write_best, provenance
    )
    report_coverage(coverage, run)
    return compiled, coverage


def describe_run(run: StepRun, step: str, network: str, devices: Sequence[DeviceFingerprint]) -> None:
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


def build_library(
    network: Network,
    network_file: Path,
    options: NetworkOptions,
    target: Target,
    device: DeviceFingerprint,
    run: StepRun,
    directory: Path,
    write_best: WriteRecords,
    provenance: Mapping[str, object],
) -> tuple[CompiledNetwork, Coverage]:
    """Compiles a network for a device.

    Args:
        network: The network.
        network_file: Its ONNX file.
        options: Its lowering.
        target: What code is generated for.
        device: The device, as the model describes it.
        run: The run of the step.
        directory: Where the library and the records are written.
        write_best: Writes the records that are applied.
        provenance: Where the library comes from.
    """
    lowered = lower(network.model, target, **options.lowering())
    best = directory / names.BEST_DIR
    mismatch = write_best(lowered, target, device, best)
    if mismatch:
        _log.warning("%s; they are applied nevertheless, and may be slow", mismatch)
        run.log_tags({names.TAG_TARGET_MISMATCH: mismatch})
    _log.info("compiling %s for %s", network.name, device.description)
    library = directory / LIBRARY_FILE
    coverage = compile_tuned(lowered, target, best, library)
    compiled = CompiledNetwork(
        name=network.name,
        network=network_file,
        inputs=network.inputs,
        outputs=network.outputs,
        library=library,
        records=best,
        fingerprint=device,
        coverage=coverage.to_dict(),
        provenance={**provenance, "target_mismatch": mismatch},
    )
    return compiled, coverage


def compile_for_devices(options: CompileOptions, run: StepRun, scratch: Path) -> list[tuple[CompiledNetwork, Coverage]]:
    """Compiles a network for the device of each of several tuning runs.

    Raises:
        UserInputError: They tuned different networks, or two of them the same device.
        RecordsError: It is not known for which device the records of one are.
        MachineError: Libraries for one of the devices cannot be linked here.
    """
    if options.allow_target_mismatch:
        raise UserInputError(
            "allow_target_mismatch with several tuning runs: each is compiled for its own device; leave it out"
        )
    tuned = [TunedDevice.of(tune_run, options, scratch) for tune_run in options.tune_runs]
    require_one_network(tuned)
    run.log_options(tuned[0].recorded.options.model_copy(update={"tune_run": options.tune_run}))
    run.log_tags({names.TAG_TUNE_RUN: ",".join(options.tune_runs)})
    network = load_recorded_network(tuned[0].recorded)
    describe_run(run, "compile", network.name, [member.device for member in tuned])
    network_file = run.directory / names.NETWORK_FILE
    write_onnx(network.model, network_file)
    return [
        build_library(
            network,
            network_file,
            member.recorded.options,
            member.target,
            member.device,
            run,
            run.directory / member.device.name,
            member.write_best,
            _provenance(member.recorded),
        )
        for member in tuned
    ]


def log_model(compiled: CompiledNetwork | Sequence[CompiledNetwork], run: StepRun, signature: SignatureKind) -> str:
    """Logs a compiled network to the run of the step, and returns the model's URI."""
    first = compiled if isinstance(compiled, CompiledNetwork) else compiled[0]
    with clear_failures("log the model"):
        logged = flavor.log_model(
            compiled,
            name=names.MODEL_NAME,
            signature=get_signature(first.inputs, first.outputs, signature),
        )
    model_uri = str(logged.model_uri)
    run.log_tags({names.TAG_MODEL_URI: model_uri})
    return model_uri


def report_coverage(coverage: Coverage, run: StepRun) -> None:
    """Says in a run how much of a network the records cover; of several libraries, of the least covered one."""
    run.log_metrics({names.COVERAGE_TASKS: coverage.task_share, names.COVERAGE_FLOPS: coverage.flops_share})
    path = run.directory / names.COVERAGE_FILE
    write_coverage(coverage, path)
    run.log_artifacts(path)
    if coverage.missing:
        _log.warning(
            "%d of %d tasks have no record (%.1f %% of the operations are covered), such as %s: they run untuned, "
            "often a hundred times slower; tune this network for this target and layout",
            len(coverage.missing),
            len(coverage.missing) + len(coverage.covered),
            coverage.flops_share * 100,
            coverage.missing[0].name,
        )


def _provenance(recorded: Recorded) -> dict[str, object]:
    import tvm

    if recorded.provenance is not None:
        return {**asdict(recorded.provenance), "tvm_version": tvm.__version__, "tune_run": recorded.options.tune_run}
    return {
        **recorded.options.lowering(),
        "lowering_version": LOWERING_VERSION,
        "tvm_version": tvm.__version__,
        "records": recorded.options.records,
    }
