"""The step `compile`: applies records to a network and logs the library as an MLflow model."""

from __future__ import annotations

import logging
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import mlflow
import onnx

from ansor_mlflow import flavor, names
from ansor_mlflow.compile import Coverage, compile_tuned, write_coverage
from ansor_mlflow.errors import RecordsError, UserInputError
from ansor_mlflow.lowering import LOWERING_VERSION, lower
from ansor_mlflow.model import LIBRARY_FILE, CompiledNetwork
from ansor_mlflow.networks import Network, load_network
from ansor_mlflow.options import CompileOptions
from ansor_mlflow.records import Provenance, distill, find_records, read_provenance
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


@dataclass(frozen=True)
class _Source:
    """Records on disk with the options that their network is compiled with."""

    options: CompileOptions
    records: Path
    network: str
    """Built-in name, or the path of an ONNX file."""
    provenance: Provenance | None


def compile_network(options: CompileOptions) -> CompileResult:
    """Compiles a network with records and logs the model.

    Raises:
        AnsorMlflowError: The options are not usable, the records are for another target or network, or a server is
            away.
    """
    with step_run("compile", options, f"compile {options.network}") as run:
        return _compile(options, run)


def _compile(options: CompileOptions, run: StepRun) -> CompileResult:
    if bool(options.tune_run) == bool(options.records):
        given = "both were" if options.tune_run else "neither was"
        raise UserInputError(f"tune_run and records: {given} given; give the ID of a tuning run, or records=…")
    with tempfile.TemporaryDirectory(prefix="ansor_mlflow-") as scratch:
        find = _from_tune_run if options.tune_run else _from_records
        source = find(options, Path(scratch))
        run.log_options(source.options)
        compiled, coverage = _build(source, run)
    with clear_failures("log the model"):
        model_uri = flavor.log_model(compiled, name=names.MODEL_NAME).model_uri
    run.log_tags({names.TAG_MODEL_URI: model_uri})
    return CompileResult(run.run_id, model_uri, coverage)


def _build(source: _Source, run: StepRun) -> tuple[CompiledNetwork, Coverage]:
    """Compiles the network in the run's scratch directory, and says in the run what it is and what is covered."""
    network = _load(source)
    num_threads = resolve_num_threads(source.options.num_threads)
    target = resolve_target(source.options.target, num_threads)
    device = fingerprint(target, num_threads)
    run.log_tags(
        {
            names.TAG_NETWORK: network.name,
            names.TAG_TARGET: device.description,
            names.TAG_NUM_THREADS: str(num_threads),
            names.TAG_TUNE_RUN: source.options.tune_run,
            "mlflow.runName": f"compile {network.name} · {device.description}",
        }
    )
    best = run.directory / names.BEST_DIR
    distill(find_records(source.records), best, device.target)
    _log.info("compiling %s for %s", network.name, device.description)
    library = run.directory / LIBRARY_FILE
    coverage = compile_tuned(lower(network.model, target, source.options.layout), target, best, library)
    _report(coverage, run)
    onnx.save_model(network.model, str(run.directory / names.NETWORK_FILE))
    compiled = CompiledNetwork(
        name=network.name,
        network=run.directory / names.NETWORK_FILE,
        inputs=network.inputs,
        outputs=network.outputs,
        library=library,
        records=best,
        fingerprint=device,
        coverage=coverage.to_dict(),
        provenance=_provenance(source),
    )
    return compiled, coverage


def _from_tune_run(options: CompileOptions, scratch: Path) -> _Source:
    """The records of a tuning run, with the options that it used."""
    with clear_failures(f"read the records of run {options.tune_run}"):
        records = Path(
            mlflow.artifacts.download_artifacts(
                run_id=options.tune_run, artifact_path=names.RECORDS_DIR, dst_path=str(scratch)
            )
        )
    provenance = read_provenance(records)
    if provenance.lowering_version != LOWERING_VERSION:
        raise RecordsError(
            f"run {options.tune_run} was tuned with lowering version {provenance.lowering_version}, this is "
            f"{LOWERING_VERSION}: its records do not fit today's kernels; tune again"
        )
    network = provenance.network
    if provenance.from_file:
        with clear_failures(f"read the network of run {options.tune_run}"):
            network = mlflow.artifacts.download_artifacts(
                run_id=options.tune_run, artifact_path=names.NETWORK_FILE, dst_path=str(scratch)
            )
    used = {
        "network": provenance.network,
        "layout": provenance.layout,
        "target": provenance.target,
        "num_threads": provenance.num_threads,
        "batch_size": provenance.batch_size,
        "input_shapes": provenance.input_shapes,
        "seed": provenance.seed,
    }
    return _Source(options.model_copy(update=used), records, network, provenance)


def _from_records(options: CompileOptions, scratch: Path) -> _Source:
    """Records from a path or an artifact URI."""
    records = options.records
    if ":/" in records:
        with clear_failures(f"read records={records}"):
            records = mlflow.artifacts.download_artifacts(artifact_uri=records, dst_path=str(scratch))
    return _Source(options, Path(records), options.network, None)


def _load(source: _Source) -> Network:
    options = source.options
    is_copy = source.network != options.network
    network = load_network(
        source.network,
        batch_size=options.batch_size,
        input_shapes={} if is_copy else options.input_shapes,
        seed=options.seed,
    )
    if source.provenance is None:
        return network
    if network.sha256 != source.provenance.network_sha256:
        raise RecordsError(
            f"run {options.tune_run} tuned another version of {options.network} than the one at hand; tune again"
        )
    return replace(network, name=Path(options.network).stem) if is_copy else network


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


def _provenance(source: _Source) -> dict[str, object]:
    import tvm

    if source.provenance is not None:
        return {**asdict(source.provenance), "tvm_version": tvm.__version__, "tune_run": source.options.tune_run}
    return {
        "layout": source.options.layout,
        "lowering_version": LOWERING_VERSION,
        "tvm_version": tvm.__version__,
        "records": source.options.records,
    }
