"""Tunings with fakes: the real search and the real engine, in well under a second."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from helpers.fakes import FakeBuilder, FakeRunner

from ansor_mlflow.lowering import LoweredNetwork
from ansor_mlflow.parameters import TuneOptions
from ansor_mlflow.processes import Outcome
from ansor_mlflow.records import RECORD_FILE, Journal, RecordLog, read_durations, read_journal
from ansor_mlflow.trials import Trial, TuningPlan, TuningResult, TuningRound
from ansor_mlflow.tuning import resolve_num_trials
from ansor_mlflow.tuning.engine import Tuner
from ansor_mlflow.workers import Builder, RunJob, Runner

if TYPE_CHECKING:
    from tvm.target import Target

NO_MODEL = {"strategy": "random", "cost_model": "none", "space": "metaschedule"}
"""The quickest search in a space that does not end."""


def plan_for(lowered: LoweredNetwork, num_trials: int) -> TuningPlan:
    tasks = tuple(task.info for task in lowered.tasks)
    return TuningPlan(network="dense", target="host", tasks=tasks, num_trials=num_trials)


def tune(
    lowered: LoweredNetwork,
    target: Target,
    records: Path,
    *,
    builder: Builder | None = None,
    runner: Runner | None = None,
    observers: Sequence[Any] = (),
    best: Path | None = None,
    resume: bool = False,
    **options: Any,
) -> TuningResult:
    """Tunes with fakes, on one search thread, without a cost model unless `options` names one."""
    checked = TuneOptions(**{**NO_MODEL, "num_trials_per_round": 4, **options})
    num_trials = resolve_num_trials(checked, len(lowered.tasks))
    with contextlib.closing(builder or FakeBuilder()) as builder, contextlib.closing(runner or FakeRunner()) as runner:
        log, journal = RecordLog(records, target.export()), Journal(records)
        if resume:
            journal.resume()
        else:
            journal.begin(log.num_earlier)
        tuner = Tuner(
            lowered.tasks,
            target=target,
            options=checked,
            num_trials=num_trials,
            search_threads=1,
            log=log,
            journal=journal,
            past=read_journal(records) if resume else (),
            durations=read_durations(records) if resume else None,
            builder=builder,
            runner=runner,
            observers=observers,
        )
        result = tuner.tune(plan_for(lowered, num_trials))
        if best is not None:
            tuner.save_winners(best)
        return result


def read_records(directory: Path) -> list[Any]:
    """The whole lines of a log; the next one may be about to be written."""
    *lines, _ = (directory / RECORD_FILE).read_text().split("\n")
    return [json.loads(line) for line in lines]


class TaskRunner(FakeRunner):
    """A `FakeRunner` whose times depend on the task, which it knows by the shape of its first argument: seconds of the
    first library, of the second, …, the last of which hold for all that follow. A library keeps its time.
    """

    def __init__(self, run_s: Mapping[tuple[int, ...], Sequence[float]]) -> None:
        super().__init__()
        self._times = {shape: list(seconds) for shape, seconds in run_s.items()}
        self._seconds: dict[Path, float] = {}

    def run(self, jobs: Sequence[RunJob]) -> list[Outcome[tuple[float, ...]]]:
        self.jobs += jobs
        return [Outcome((self._seconds_of(job),)) for job in jobs]

    def _seconds_of(self, job: RunJob) -> float:
        if job.path not in self._seconds:
            times = self._times[job.args_info[0][2]]
            self._seconds[job.path] = times.pop(0) if len(times) > 1 else times[0]
        return self._seconds[job.path]


class Notebook:
    """A `TuningObserver` that notes what it is told, and what is on disk at that moment."""

    def __init__(self, records: Path) -> None:
        self.events: list[str] = []
        self.plan: TuningPlan | None = None
        self.rounds: list[tuple[Trial, ...]] = []
        self.tasks: list[str] = []
        self.counts: list[dict[str, int]] = []
        self.latencies: list[float | None] = []
        self.result: TuningResult | None = None
        self._records = records

    def tuning_started(self, plan: TuningPlan) -> None:
        self.events.append("started")
        self.plan = plan

    def round_finished(self, round_: TuningRound) -> None:
        self.events.append("round")
        self.rounds.append(round_.trials)
        self.tasks.append(round_.task.info.name)
        self.counts.append(
            {
                "told": sum(map(len, self.rounds)),
                "total": round_.total_trials,
                "of tasks": sum(task.total_trials for task in round_.tasks),
                "on disk": len(read_records(self._records)),
            }
        )
        self.latencies.append(round_.estimated_latency_s)

    def tuning_finished(self, result: TuningResult) -> None:
        self.events.append("finished")
        self.result = result
