"""The step `recompile`: builds the model of an old run again, with today's TVM and the records that still apply."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import mlflow
from mlflow.entities import Run

from ansor_mlflow import names
from ansor_mlflow.device import Device
from ansor_mlflow.errors import UserInputError
from ansor_mlflow.files import scratch_directory, write_text
from ansor_mlflow.lowering import LOWERING_VERSION, LoweredNetwork, TuningTask
from ansor_mlflow.model import Coverage, Manifest, require_linker
from ansor_mlflow.networks import Network
from ansor_mlflow.options import NetworkOptions, RecompileOptions, RecordsOptions, load_options
from ansor_mlflow.records import Database, RecordPair, RecordText, find_pairs, write_pair
from ansor_mlflow.steps.compiling.compile import Recipe, build_libraries, log_model
from ansor_mlflow.steps.records import (
    distill_for_device,
    fetch_records,
    find_recorded,
    load_recorded_network,
    tuning_of,
)
from ansor_mlflow.tracking import (
    StepRun,
    network_of,
    params_used,
    register,
    registered_versions,
    step_run,
    translated_errors,
)
from ansor_mlflow.tuning import applies

if TYPE_CHECKING:
    from tvm.target import Target

_MAX_CANDIDATES = 8
"""Records of a workload that are tried, beside its winner."""
_log = logging.getLogger("ansor_mlflow")

Fate = Literal["applied", "no_such_kernel", "does_not_apply"]


@dataclass(frozen=True, kw_only=True)
class Survivor:
    """What became of the records of one workload."""

    workload_hash: str
    task: str
    """Name of the task today; empty where the network has it no more."""
    fate: Fate
    run_s: float
    """Seconds per call of the record that is applied, else of the winner."""


@dataclass(frozen=True, kw_only=True)
class RecompileResult:
    """What the step made."""

    run_id: str
    model_uri: str
    coverage: Coverage
    survivors: tuple[Survivor, ...]
    registered_versions: tuple[str, ...]
    """New versions of registered models that the old model is a version of, as name/version."""

    @property
    def num_applied(self) -> int:
        """Workloads whose records still apply."""
        return sum(survivor.fate == "applied" for survivor in self.survivors)


def recompile(options: RecompileOptions) -> RecompileResult:
    """Builds the model of an old run again and logs it.

    Where the old model is a version of a registered model, the new one becomes its next version; no alias moves.

    Raises:
        AnsorMlflowError: There is no such run, it has neither a model nor records, the records are for another device,
            or a server is away.
    """
    with translated_errors(f"read the run {options.run}"):
        old = mlflow.get_run(options.run)
    with scratch_directory() as scratch:
        source = _Source.of(old, Path(scratch))
        survivors: list[Survivor] = []

        def write_best(lowered: LoweredNetwork, device: Device, best: Path) -> str:
            fastest: list[Path] = []
            for pair in find_pairs(source.records):
                fastest.append(Path(scratch, f"fastest{len(fastest)}"))
                mismatch = distill_for_device(
                    pair.records,
                    device.fingerprint,
                    fastest[-1],
                    keep=_MAX_CANDIDATES,
                    allow_mismatch=options.allow_target_mismatch,
                )
            survivors[:] = _write_applying(fastest, lowered.tasks, device.target, best)
            return mismatch

        device = source.device
        if device is None or options.allow_target_mismatch:
            device = Device.resolve(source.options.target, source.options.num_threads)
        require_linker(device.fingerprint.machine, options.linker)
        recipe = Recipe(source.options.lowering, device, write_best, source.provenance, linker=options.linker)
        with step_run("recompile", options, f"recompile {options.run}") as run:
            libraries, coverage = build_libraries(source.network, [recipe], run, step="recompile", pad=source.pad)
            _report(survivors, run)
            run.log_tags({names.TAG_RECOMPILED_FROM: options.run, names.TAG_TUNE_RUN: source.tune_run})
            model_uri = log_model(libraries, run, options.signature)
            return RecompileResult(
                run_id=run.run_id,
                model_uri=model_uri,
                coverage=coverage,
                survivors=tuple(survivors),
                registered_versions=tuple(_register(model_uri, source.model_uri)),
            )


@dataclass(frozen=True, kw_only=True)
class _Source:
    """What an old run left behind."""

    model_uri: str
    tune_run: str
    network: Network
    options: NetworkOptions
    device: Device | None
    """What the records of a tuning run are for; None where there is no such run."""
    records: Path
    provenance: dict[str, object]
    pad: dict[str, float]
    """What the old model pads inputs with."""

    @staticmethod
    def of(old: Run, scratch: Path) -> _Source:
        """Reads it: the network of the model and the records of the tuning, as far as there are both.

        Raises:
            UserInputError: There is neither.
        """
        run_id, model_uri, tune_run = old.info.run_id, old.data.tags.get(names.TAG_MODEL_URI, ""), tuning_of(old)
        step = old.data.tags.get(names.TAG_STEP)
        is_of_others = step == "promote" or (step == "evaluate" and not tune_run)  # it says nothing of the lowering
        if is_of_others or not (model_uri or tune_run):
            raise UserInputError(
                f"run={run_id}: the run has neither a model of its own nor records; give one of compile, tune or main"
            )
        options: NetworkOptions
        device = None
        if tune_run:
            recorded = find_recorded(RecordsOptions(tune_run=tune_run), scratch, any_lowering=True)
            options, records, device = recorded.options, recorded.records, recorded.device
            network = network_of(options, model_uri) if model_uri else load_recorded_network(recorded)
        else:
            options = load_options(NetworkOptions, params_used(old, NetworkOptions))
            records = fetch_records(model_uri, scratch)
            network = network_of(options, model_uri)
        return _Source(
            model_uri=model_uri,
            tune_run=tune_run,
            network=network,
            options=options,
            device=device,
            records=records,
            provenance=_provenance(options, tune_run, run_id, model_uri),
            pad=_pad_of(model_uri) if model_uri else {},
        )


def _pad_of(model_uri: str) -> dict[str, float]:
    """What a model pads inputs with.

    Raises:
        MachineError: A server is away.
        ModelError: It is not of our flavor.
    """
    with translated_errors(f"read the model {model_uri}"):
        flavors = mlflow.models.get_model_info(model_uri).flavors
    return Manifest.from_dict(flavors.get(names.FLAVOR_NAME, {})).pad


def _provenance(options: NetworkOptions, tune_run: str, run_id: str, model_uri: str) -> dict[str, object]:
    import tvm

    return {
        **asdict(options.lowering),
        "lowering_version": LOWERING_VERSION,
        "tvm_version": tvm.__version__,
        "tune_run": tune_run,
        "recompiled_from": {"run": run_id, "model_uri": model_uri},
    }


def _write_applying(fastest: Sequence[Path], tasks: Sequence[TuningTask], target: Target, best: Path) -> list[Survivor]:
    """Writes for each task the first record that applies, and says what became of every workload's records.

    Args:
        fastest: Directories of databases: of winners, which were measured twice, before those of all records.
        tasks: Those of the network.
        target: Their device.
        best: Directory of the new database.
    """
    by_hash: dict[str, list[RecordText]] = {}
    workloads: dict[str, str] = {}
    for directory in fastest:
        database = Database(RecordPair.in_directory(directory))
        for record in database.records:
            hash_ = str(database.hashes[record.workload])
            by_hash.setdefault(hash_, []).append(RecordText(record.run_s, database.fields(record)))
            workloads[hash_] = database.workloads[record.workload]
    tasks_by_hash = {task.info.workload_hash: task for task in tasks}
    applied: dict[str, RecordText] = {}
    survivors = []
    for hash_, records in by_hash.items():
        task = tasks_by_hash.get(hash_)
        found = next((record for record in records if task and applies(record, task, target)), None)
        if found:
            applied[hash_] = found
        survivors.append(
            Survivor(
                workload_hash=hash_,
                task=task.info.name if task else "",
                fate="applied" if found else "does_not_apply" if task else "no_such_kernel",
                run_s=(found or records[0]).run_s,
            )
        )
    write_pair(
        best,
        [workloads[hash_] for hash_ in applied],
        [record.line(index) for index, record in enumerate(applied.values())],
    )
    return survivors


def _report(survivors: Sequence[Survivor], run: StepRun) -> None:
    path = run.directory / names.SURVIVORS_FILE
    write_text(path, json.dumps([asdict(survivor) for survivor in survivors], indent=1))
    run.log_artifacts(path)
    num_applied = sum(survivor.fate == "applied" for survivor in survivors)
    run.log_metrics({names.RECORDS_APPLIED: num_applied, names.RECORDS_LOST: len(survivors) - num_applied})
    if num_applied < len(survivors):
        _log.warning(
            "the records of %d of %d workloads do not apply any more; %s says which",
            len(survivors) - num_applied,
            len(survivors),
            names.SURVIVORS_FILE,
        )


def _register(model_uri: str, old_uri: str) -> Iterator[str]:
    """Makes a model the next version of what another is a version of."""
    for name, version in registered_versions(old_uri) if old_uri else ():
        yield f"{name}/{register(model_uri, name, {names.TAG_RECOMPILED_FROM: f'{name}/{version}'})}"
