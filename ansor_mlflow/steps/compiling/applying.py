"""Whether a network may have layers by other algorithms than the direct one: it must stay within the tolerance."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ansor_mlflow.device import Device, why_not_runnable
from ansor_mlflow.errors import AnsorMlflowError, CorrectnessError, RecordsError
from ansor_mlflow.files import scratch_directory
from ansor_mlflow.lowering import LOWERING_VERSION, LoweredNetwork, TuningTask
from ansor_mlflow.measuring import (
    compare_with_reference,
    library_inference,
    outputs_of,
    require_broken_stays_broken,
    seeded_inputs,
    tolerance_for,
)
from ansor_mlflow.model import CompiledNetwork, Coverage, threads_here
from ansor_mlflow.parameters import CompileOptions
from ansor_mlflow.records import Database, RecordPair, RecordText, find_pairs, write_pair
from ansor_mlflow.steps.recorded import Recorded, distill_for_device
from ansor_mlflow.tensors import all_sizes
from ansor_mlflow.tuning import candidate_of

if TYPE_CHECKING:
    from tvm.target import Target

_SEEDS = range(4)
_MARGIN = 0.75
"""Share of the tolerance that these inputs may take. The largest error differs between inputs: of eight random ones it
was up to 1.6 times as large for one as for another, and a fifth more than the largest of the first four."""
_log = logging.getLogger("ansor_mlflow")


def loses_digits(compiled: CompiledNetwork, coverage: Coverage) -> bool:
    """Whether a network with layers by other algorithms is off by more than `evaluate` lets pass, or nearly.

    A library that does not run here, or a network that ONNX Runtime cannot compute from random inputs, is not checked:
    `evaluate` does it where the model runs.
    """
    if not coverage.has_other_algorithms or why_not_runnable(compiled.fingerprint):
        return False
    runs = {"algorithms": partial(library_inference, compiled.library, compiled, compiled.entry)}
    threads = threads_here(compiled.entry)
    examples = seeded_inputs(compiled.network, all_sizes(compiled), _SEEDS)
    try:
        found = compare_with_reference(runs, compiled.network, threads, examples)["algorithms"]
        require_broken_stays_broken(partial(outputs_of, runs["algorithms"]), compiled.network, threads, examples[0])
    except CorrectnessError as err:
        _log.warning("with Winograd's convolutions, %s: all layers are direct", err)
        return True
    except AnsorMlflowError as err:
        _log.warning("the outputs of %s are not checked: %s", compiled.name, err)
        return False
    tolerance = tolerance_for("auto", compiled.network, str(compiled.provenance.get("dtype", "float32")))
    if found.max_rel_error <= _MARGIN * tolerance:
        return False
    _log.warning(
        "max_rel_error %.2g with Winograd's convolutions, near or above the %.2g allowed: all layers are direct",
        found.max_rel_error,
        tolerance,
    )
    return True


_MAX_CANDIDATES = 8
"""Records of a workload that are tried, beside its winner."""


@dataclass(frozen=True, kw_only=True)
class LostRecords:
    """The records of a workload, of which none applies any more."""

    workload_hash: str
    task: str
    """Name of the task today; empty where the network has it no more."""
    reason: Literal["no_such_kernel", "does_not_apply"]
    run_s: float
    """Seconds per call of the winner."""


def write_records(
    recorded: Recorded, lowered: LoweredNetwork, device: Device, best: Path, options: CompileOptions
) -> tuple[str, list[LostRecords]]:
    """Writes a database with the fastest record of each task."""
    may_mismatch = options.allow_target_mismatch
    if not options.allow_missing:
        mismatch = distill_for_device(recorded.records, device.fingerprint, best, allow_mismatch=may_mismatch)
        _require_todays_tasks(recorded, lowered.tasks, best)
        return mismatch, []
    with scratch_directory() as scratch:
        fastest: list[Path] = []
        for pair in find_pairs(recorded.records):  # the winners, which were measured twice, before all records
            fastest.append(Path(scratch, str(len(fastest))))
            mismatch = distill_for_device(
                pair.records, device.fingerprint, fastest[-1], keep=_MAX_CANDIDATES, allow_mismatch=may_mismatch
            )
        return mismatch, _write_applying(fastest, lowered.tasks, device.target, best)


def _require_todays_tasks(recorded: Recorded, tasks: Sequence[TuningTask], best: Path) -> None:
    made_by = recorded.provenance.lowering_version if recorded.provenance else LOWERING_VERSION
    if made_by == LOWERING_VERSION:
        return
    database = Database(RecordPair.in_directory(best))
    hashes = {str(database.hashes[record.workload]) for record in database.records}
    layers = {task.info.layer_hash for task in tasks}
    missing = layers - {task.info.layer_hash for task in tasks if task.info.workload_hash in hashes}
    if missing:
        run = recorded.options.tune_run
        raise RecordsError(
            f"run {run} was tuned with lowering version {made_by}, this is {LOWERING_VERSION}: {len(missing)} of "
            f"{len(layers)} tasks have no record; tune again with warm_start={run}, or give allow_missing=true to "
            "compile nevertheless"
        )


def _write_applying(
    fastest: Sequence[Path], tasks: Sequence[TuningTask], target: Target, best: Path
) -> list[LostRecords]:
    """Writes for each task the first record that applies, of those in some directories; returns what is lost."""
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
    lost = []
    for hash_, records in by_hash.items():
        task = tasks_by_hash.get(hash_)
        found = next((record for record in records if task and candidate_of(record, task, target)), None)
        if found:
            applied[hash_] = found
            continue
        lost.append(
            LostRecords(
                workload_hash=hash_,
                task=task.info.name if task else "",
                reason="does_not_apply" if task else "no_such_kernel",
                run_s=records[0].run_s,
            )
        )
    lines = [record.line(index) for index, record in enumerate(applied.values())]
    write_pair(best, [workloads[hash_] for hash_ in applied], lines)
    return lost
