"""Which sketches the fastest records are of, and what the sketches' own choices would have cost."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ansor_mlflow import names
from ansor_mlflow.lowering import TuningTask
from ansor_mlflow.records import FAILED_RUN_S, Database, RecordPair
from ansor_mlflow.sketches import find_decision, find_programs

if TYPE_CHECKING:
    from tvm.target import Target


@dataclass(frozen=True, kw_only=True)
class SketchUse:
    """The sketch of a task's winner, or, before there are winners, of its fastest record."""

    sketch: str
    """It and its decisions, in words; empty for a program of MetaSchedule's space."""
    best_s: float
    """Seconds per call of that record, as it was first measured."""
    own_ratio: float | None
    """Time of the program that is taken without a trial, over that of this one; None where it was not measured. It is
    below 1 where the winner was the faster one in the second measurements alone."""


def sketch_uses(pair: RecordPair, tasks: Sequence[TuningTask], target: Target) -> dict[str, SketchUse]:
    """The sketches of those tasks that have a valid record, by the hash of their workload.

    Args:
        pair: All records; winners are looked for beside them. Times are compared as they were first measured.
        tasks: Tasks of a network.
        target: What they were tuned for.
    """
    hashes = {task.info.workload_hash for task in tasks}
    times = _times(pair, hashes)
    winners = RecordPair.in_directory(pair.root / names.BEST_DIR)
    won = _times(winners, hashes) if winners.exists() else {}
    return {
        hash_: _use_of(task, target, times[hash_], won.get(hash_, {}))
        for task in tasks
        if (hash_ := task.info.workload_hash) in times
    }


def _times(pair: RecordPair, hashes: Set[str]) -> dict[str, dict[str, float]]:
    """The best time of each decision in seconds, by the hash of the workload; "" stands for MetaSchedule's programs."""
    database = Database(pair)
    times: dict[str, dict[str, float]] = {}
    with pair.records.open("rb") as file:
        for record in database.records:
            hash_ = database.hashes[record.workload]
            if hash_ in hashes and record.run_s < FAILED_RUN_S:
                file.seek(record.offset)
                text = file.read(record.length).decode(errors="replace")  # a line may be damaged in the middle
                of_task, decision = times.setdefault(str(hash_), {}), find_decision(text)
                of_task[decision] = min(record.run_s, of_task.get(decision, record.run_s))
    return times


def _use_of(task: TuningTask, target: Target, times: dict[str, float], won: dict[str, float]) -> SketchUse:
    """What was found for a task, from the first time of each decision, and the second one of the winner's."""
    best = min(won.keys() & times.keys() or times, key=lambda decision: times[decision])
    programs = find_programs(task.mod, target)
    own_s = times.get(programs.first_decision) if programs else None
    return SketchUse(
        sketch=best,
        best_s=times[best],
        own_ratio=own_s / times[best] if own_s is not None else None,
    )
