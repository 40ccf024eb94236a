"""The step `compile`: applies records to a network and logs the library as an MLflow model."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ansor_mlflow import flavor, names
from ansor_mlflow.compile import Coverage, compile_tuned, write_coverage
from ansor_mlflow.lowering import LOWERING_VERSION, LoweredNetwork, lower
from ansor_mlflow.model import LIBRARY_FILE, CompiledNetwork
from ansor_mlflow.networks import Network
from ansor_mlflow.networks.onnx_file import write_onnx
from ansor_mlflow.options import CompileOptions, NetworkOptions
from ansor_mlflow.steps.recorded import Recorded, distill_for_device, find_recorded, load_recorded_network
from ansor_mlflow.targets import DeviceFingerprint, fingerprint, resolve_target
from ansor_mlflow.threads import resolve_num_threads
from ansor_mlflow.tracking import StepRun, step_run
from ansor_mlflow.tracking.failures import clear_failures

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
        recorded = find_recorded(options, Path(scratch))
        run.log_options(recorded.options)
        run.log_tags({names.TAG_TUNE_RUN: recorded.options.tune_run})

        def write_best(kernels: LoweredNetwork, target: Target, device: DeviceFingerprint, best: Path) -> str:  # noqa: ARG001
            allow_mismatch = options.allow_target_mismatch
            return distill_for_device(recorded.records, device, best, allow_mismatch=allow_mismatch)

        compiled, coverage = build_model(
            load_recorded_network(recorded), recorded.options, run, write_best, _provenance(recorded), step="compile"
        )
    return CompileResult(run.run_id, log_model(compiled, run), coverage)


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
    run.log_tags(
        {
            names.TAG_NETWORK: network.name,
            names.TAG_TARGET: device.description,
            names.TAG_NUM_THREADS: str(num_threads),
            "mlflow.runName": f"{step} {network.name} · {device.description}",
        }
    )
    lowered = lower(network.model, target, **options.lowering())
    best = run.directory / names.BEST_DIR
    mismatch = write_best(lowered, target, device, best)
    if mismatch:
        _log.warning("%s; they are applied nevertheless, and may be slow", mismatch)
        run.log_tags({names.TAG_TARGET_MISMATCH: mismatch})
    _log.info("compiling %s for %s", network.name, device.description)
    library = run.directory / LIBRARY_FILE
    coverage = compile_tuned(lowered, target, best, library)
    _report(coverage, run)
    write_onnx(network.model, run.directory / names.NETWORK_FILE)
    compiled = CompiledNetwork(
        name=network.name,
        network=run.directory / names.NETWORK_FILE,
        inputs=network.inputs,
        outputs=network.outputs,
        library=library,
        records=best,
        fingerprint=device,
        coverage=coverage.to_dict(),
        provenance={**provenance, "target_mismatch": mismatch},
    )
    return compiled, coverage


def log_model(compiled: CompiledNetwork, run: StepRun) -> str:
    """Logs a compiled network to the run of the step, and returns the model's URI."""
    with clear_failures("log the model"):
        model_uri = str(flavor.log_model(compiled, name=names.MODEL_NAME).model_uri)
    run.log_tags({names.TAG_MODEL_URI: model_uri})
    return model_uri


def _report(coverage: Coverage, run: StepRun) -> None:
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
