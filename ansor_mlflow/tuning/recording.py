"""What becomes of a measured candidate: a trial for observers, a result for the search, a record for the database."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ansor_mlflow.trials import Trial, TrialStatus
from ansor_mlflow.tuning.arguments import arg_info
from ansor_mlflow.tuning.runner import RunJob
from ansor_mlflow.tuning.workers import Outcome

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.s_tir.meta_schedule.database import Database
    from tvm.s_tir.meta_schedule.search_strategy import MeasureCandidate
    from tvm.target import Target

_FAILED_RUN_S = 1e10
"""Run time by which MetaSchedule's databases mark a failed trial."""
_STATUS = {"timed_out": TrialStatus.TIMED_OUT, "crashed": TrialStatus.CRASHED}
"""Failures that mean the same in building and in running."""


def run_jobs(
    candidates: Sequence[MeasureCandidate], built: Sequence[Outcome[Path]], task: str, best_s: float | None
) -> list[RunJob]:
    """What is to be measured of a task's candidates: those that could be built."""
    return [
        RunJob(outcome.value, tuple(arg_info(info) for info in candidate.args_info), task, best_s)
        for candidate, outcome in zip(candidates, built, strict=True)
        if outcome.value is not None
    ]


def make_trial(step: int, task: str, built: Outcome[Path], measured: Iterator[Outcome[tuple[float, ...]]]) -> Trial:
    """The trial of a candidate; takes the next of the measured outcomes if the candidate could be built."""
    if built.value is None:
        return Trial(
            step=step, task=task, status=_STATUS.get(built.failure, TrialStatus.BUILD_FAILED), error=built.error
        )
    outcome = next(measured)
    if outcome.value is None:
        return Trial(
            step=step, task=task, status=_STATUS.get(outcome.failure, TrialStatus.RUN_FAILED), error=outcome.error
        )
    return Trial(step=step, task=task, status=TrialStatus.OK, run_s=outcome.value)


def runner_result(trial: Trial) -> object:
    """A trial as MetaSchedule's cost models and searches take it."""
    from tvm.s_tir.meta_schedule.runner import RunnerResult

    return RunnerResult(list(trial.run_s) or None, trial.error or None)


def commit_trials(
    database: Database, mod: IRModule, target: Target, candidates: Sequence[MeasureCandidate], trials: Sequence[Trial]
) -> None:
    """Commits every trial of a task, failed ones too, as MetaSchedule's own AddToDatabase callback does."""
    from tvm.s_tir.meta_schedule.database import TuningRecord

    workload = database.commit_workload(mod)
    for candidate, trial in zip(candidates, trials, strict=True):
        run_s = list(trial.run_s) or [_FAILED_RUN_S]
        database.commit_tuning_record(
            TuningRecord(candidate.sch.trace, workload, run_s, target, list(candidate.args_info))
        )
