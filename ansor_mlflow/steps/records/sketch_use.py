"""Which sketches the fastest records are of, and what the sketches' own choices would have cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ansor_mlflow.lowering import TuningTask
from ansor_mlflow.records import FAILED_RUN_S, Database, RecordPair
from ansor_mlflow.sketches import find_decision, find_programs

if TYPE_CHECKING:
    from tvm.target import Target


@dataclass(frozen=True, kw_only=True)
class SketchUse:
    """The sketch of a task's fastest record."""

    sketch: str
    """It and its decisions, in words; empty for a program of MetaSchedule's space."""
    best_s: float
    """Seconds per call of that record."""
    own_ratio: float | None
    """Time of the program that is taken without a trial, over that of the fastest one; None where it was not
    measured."""


def sketch_uses(pair: RecordPair, tasks: Sequence[TuningTask], target: Target) -> dict[str, SketchUse]:
    """The sketches of those tasks that have a valid record, by the hash of their workload.

    Args:
        pair: All records, not the winners alone: times are compared as they were first measured.
        tasks: Tasks of a network.
        target: What they were tuned for.
    """
    database = Database(pair)
    times: dict[str, dict[str, float]] = {task.info.workload_hash: {} for task in tasks}
    with pair.records.open("rb") as file:
        for record in database.records:
            hash_ = database.hashes[record.workload]
            if hash_ in times and record.run_s < FAILED_RUN_S:
                file.seek(record.offset)
                text = file.read(record.length).decode(errors="replace")  # a line may be damaged in the middle
                of_task, decision = times[hash_], find_decision(text)
                of_task[decision] = min(record.run_s, of_task.get(decision, record.run_s))
    return {
        task.info.workload_hash: _use_of(task, target, of_task)
        for task in tasks
        if (of_task := times[task.info.workload_hash])
    }


def _use_of(task: TuningTask, target: Target, times: dict[str, float]) -> SketchUse:
    """What was found for a task, from the time of each decision; "" stands for MetaSchedule's programs."""
    best = min(times, key=lambda decision: times[decision])
    programs = find_programs(task.mod, target)
    own_s = times.get(programs.first_decision) if programs else None
    return SketchUse(
        sketch=best,
        best_s=times[best],
        own_ratio=own_s / times[best] if own_s is not None else None,
    )
