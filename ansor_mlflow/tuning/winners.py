"""The fastest programs of each task, measured a second time before one of them is applied.

The fastest of many noisy measurements is also the luckiest: of programs that are about as fast, it may not be the best,
and its time promises too much.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING

from ansor_mlflow.files import replace_directory
from ansor_mlflow.lowering import TuningTask
from ansor_mlflow.records import RecordLog, RecordText, write_pair
from ansor_mlflow.trials import Trial
from ansor_mlflow.tuning.candidates import log_lines
from ansor_mlflow.workers import RunJob, Runner

if TYPE_CHECKING:
    from tvm.s_tir.meta_schedule.search_strategy import MeasureCandidate
    from tvm.target import Target

MAX_FINALISTS = 3
"""Programs of a task that are measured again."""
_MARGIN = 1.05
"""First time over the best one's beyond which a program is no finalist."""
_MIN_PASSES = 2
_MAX_PASSES = 3
"""Most measurements of a finalist that nothing disturbed."""
_MAX_REPEATS = 3
"""Passes that are added where other programs disturbed the measurements."""


@dataclass
class Finalist:
    trial: Trial
    candidate: MeasureCandidate
    job: RunJob
    again_s: list[float] = field(default_factory=list)
    """Seconds per call in each later measurement that nothing disturbed; infinite where it failed."""
    disturbed_s: list[float] = field(default_factory=list)
    """Seconds per call in each later measurement that other programs disturbed."""

    @property
    def later_s(self) -> list[float]:
        """The later measurements that nothing disturbed, else the fastest of them."""
        return self.again_s or ([min(self.disturbed_s)] if self.disturbed_s else [])

    @property
    def confirmed_s(self) -> float | None:
        """Median of the later measurements; None where there is none, or most failed."""
        return median(self.later_s) if self.later_s and math.isfinite(median(self.later_s)) else None

    @property
    def first_s(self) -> float:
        return self.trial.latency_s or math.inf

    @property
    def latency_s(self) -> float:
        return median(self.later_s) if self.later_s else self.first_s


class Winners:
    """Keeps the fastest programs of each task and chooses among them."""

    def __init__(self, num_tasks: int) -> None:
        self._finalists: list[list[Finalist]] = [[] for _ in range(num_tasks)]

    def offer(self, index: int, trial: Trial, candidate: MeasureCandidate, job: RunJob) -> None:
        """Takes a built program of a task; the libraries of those that failed or are too slow are removed."""
        finalists = self._finalists[index]
        finalists.append(Finalist(trial, candidate, job))
        # failed ones come last, with an infinite time; a program far behind cannot have been that unlucky
        finalists.sort(key=lambda finalist: finalist.first_s)
        limit_s = _MARGIN * finalists[0].first_s
        kept = [f for f in finalists[:MAX_FINALISTS] if math.isfinite(f.first_s) and f.first_s <= limit_s]
        for loser in finalists[len(kept) :]:
            loser.job.path.unlink(missing_ok=True)
        self._finalists[index] = kept

    def would_take(self, index: int, trial: Trial) -> bool:
        """Whether a program is about as fast as the fastest of a task, or faster."""
        fastest_s = min((finalist.first_s for finalist in self._finalists[index]), default=math.inf)
        return trial.latency_s is not None and trial.latency_s <= _MARGIN * fastest_s

    def of_task(self, index: int, earlier: RecordText | None = None) -> Finalist | None:
        """The winner of a task; None where it has no valid trial, or the fastest earlier record is clearly faster."""
        winner = min(self._finalists[index], key=lambda finalist: finalist.latency_s, default=None)
        # first times are compared: the earlier record has no second one under the same conditions
        if winner is not None and earlier is not None and earlier.run_s < winner.first_s / _MARGIN:
            return None
        return winner

    @property
    def num_disturbed(self) -> tuple[int, int]:
        """Tasks whose winner was disturbed whenever it was measured again, and tasks with a winner."""
        winners = [winner for index in range(len(self._finalists)) if (winner := self.of_task(index))]
        return sum(bool(winner.disturbed_s) and not winner.again_s for winner in winners), len(winners)

    def standard_error(self, winner: Finalist) -> float | None:
        """Relative standard error of a winner's confirmed time; None where nothing tells how far measurements differ.

        The noise of one measurement is pooled over all tasks: each program was measured only two or three times.
        """
        num_valid = sum(map(math.isfinite, winner.again_s))
        noise = self._noise()
        return noise / math.sqrt(num_valid) if noise and num_valid else None

    def measure_again(
        self, runner: Runner, after_pass: Callable[[], None] = lambda: None, without: Container[int] = ()
    ) -> None:
        """Measures the finalists in turns, until each winner is ahead by more than the noise, or a cap is reached."""
        undecided = [f for index, f in enumerate(self._finalists) if f and index not in without]
        for _ in range(_MAX_PASSES + _MAX_REPEATS):
            if not undecided:
                break
            # one after the other over all tasks, so that a disturbance does not hit all measurements of one program
            batch = [f[turn] for turn in range(MAX_FINALISTS) for f in undecided if turn < len(f)]
            outcomes = runner.run([finalist.job for finalist in batch])
            for finalist, outcome in zip(batch, outcomes, strict=True):
                times = finalist.disturbed_s if outcome.is_disturbed else finalist.again_s
                times.append(fmean(outcome.value) if outcome.value else math.inf)
            after_pass()
            noise = self._noise()
            undecided = [
                finalists
                for finalists in undecided
                if (num_passes := min(len(finalist.again_s) for finalist in finalists)) < _MIN_PASSES
                or (num_passes < _MAX_PASSES and not _is_decided(finalists, noise, num_passes))
            ]

    def write(self, directory: Path, tasks: Sequence[TuningTask], target: Target, log: RecordLog) -> None:
        """Writes a database with one record per task: the winner, with its second measurement where it had one.

        A record of an earlier tuning that is faster than the winner takes its place. The directory is replaced as a
        whole; nothing is written where no task has a record.
        """
        workloads: list[str] = []
        records: list[str] = []
        for task in tasks:
            earlier = next(iter(log.best(task.info.workload_hash)), None)
            winner = self.of_task(task.info.index, earlier)
            if winner is not None:
                run_s = [value for value in winner.later_s if math.isfinite(value)] or winner.trial.run_s
                workload, (record,) = log_lines(task.mod, target, [winner.candidate], [run_s])
            elif earlier is not None:
                workload, record = log_lines(task.mod, target, [], [])[0], earlier
            else:
                continue
            records.append(record.line(len(workloads)))
            workloads.append(workload)
        if not workloads:
            return
        new = directory.with_name(f".{directory.name}.new")
        shutil.rmtree(new, ignore_errors=True)
        write_pair(new, workloads, records)
        replace_directory(new, directory)

    def _noise(self) -> float:
        """Standard deviation of the logarithm of one measurement, pooled over all finalists."""
        squares, degrees = 0.0, 0
        for finalist in (finalist for finalists in self._finalists for finalist in finalists):
            # logarithms: noise is a share of the time, so that fast and slow programs can be pooled
            logs = [math.log(seconds) for seconds in finalist.again_s if math.isfinite(seconds)]
            squares += sum((value - fmean(logs)) ** 2 for value in logs)
            degrees += max(0, len(logs) - 1)
        return math.sqrt(squares / degrees) if degrees else 0.0


def _is_decided(finalists: Sequence[Finalist], noise: float, num_passes: int) -> bool:
    """Whether the fastest is ahead of the runner-up by two standard errors of the difference."""
    first, *others = sorted(finalist.latency_s for finalist in finalists)
    if not others or not math.isfinite(others[0]):  # whatever failed again is no rival
        return True
    return math.log(others[0] / first) > 2 * noise * math.sqrt(2 / num_passes)
