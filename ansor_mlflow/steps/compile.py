"""The step `compile`: applies records to a network and logs the library as an MLflow model."""

from __future__ import annotations

import logging
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from ansor_mlflow import flavor, names
from ansor_mlflow.compile import Coverage, compile_tuned, write_coverage
from ansor_mlflow.lowering import LOWERING_VERSION, lower
from ansor_mlflow.model import LIBRARY_FILE, CompiledNetwork
from ansor_mlflow.networks.onnx_file import write_onnx
from ansor_mlflow.options import CompileOptions
from ansor_mlflow.records import distill, find_records
from ansor_mlflow.steps.recorded import Recorded, find_recorded, load_recorded_network
from ansor_mlflow.targets import fingerprint, resolve_target
from ansor_mlflow.threads import resolve_num_threads
from ansor_mlflow.tracking import StepRun, step_run
from ansor_mlflow.tracking.failures import clear_failures

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
        compiled, coverage = _build(recorded, run)
    with clear_failures("log the model"):
        model_uri = flavor.log_model(compiled, name=names.MODEL_NAME).model_uri
    run.log_tags({names.TAG_MODEL_URI: model_uri})
    return CompileResult(run.run_id, model_uri, coverage)


def _build(recorded: Recorded, run: StepRun) -> tuple[CompiledNetwork, Coverage]:
    """Compiles the network in the run's scratch directory, and says in the run what it is and what is covered."""
    network = load_recorded_network(recorded)
    num_threads = resolve_num_threads(recorded.options.num_threads)
    target = resolve_target(recorded.options.target, num_threads)
    device = fingerprint(target, num_threads)
    run.log_tags(
        {
            names.TAG_NETWORK: network.name,
            names.TAG_TARGET: device.description,
            names.TAG_NUM_THREADS: str(num_threads),
            names.TAG_TUNE_RUN: recorded.options.tune_run,
            "mlflow.runName": f"compile {network.name} · {device.description}",
        }
    )
    best = run.directory / names.BEST_DIR
    distill(find_records(recorded.records), best, device.target)
    _log.info("compiling %s for %s", network.name, device.description)
    library = run.directory / LIBRARY_FILE
    coverage = compile_tuned(lower(network.model, target, **recorded.options.lowering()), target, best, library)
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
        provenance=_provenance(recorded),
    )
    return compiled, coverage


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
