"""The outer loop of tuning: pick a task, propose candidates, build, measure, record, learn, tell the observers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ansor_mlflow.errors import TuningError, UserInputError
from ansor_mlflow.lowering import TuningTask
from ansor_mlflow.options import TRIALS_PER_TASK, TuneOptions
from ansor_mlflow.trials import (
    Durations,
    StopReason,
    TaskState,
    Trial,
    TrialStatus,
    TuningObserver,
    TuningPlan,
    TuningResult,
    TuningRound,
)
from ansor_mlflow.tuning.builder import Builder
from ansor_mlflow.tuning.interrupt import deferred_interrupts
from ansor_mlflow.tuning.runner import ArgInfo, RunJob, Runner
from ansor_mlflow.tuning.scheduler import GradientScheduler
from ansor_mlflow.tuning.search import TaskSearch, make_cost_model
from ansor_mlflow.tuning.workers import Outcome

if TYPE_CHECKING:
    from tvm.s_tir.meta_schedule.database import Database
    from tvm.s_tir.meta_schedule.search_strategy import MeasureCandidate
    from tvm.target import Target

_FAILED_RUN_S = 1e10
"""Run time by which MetaSchedule's databases mark a failed trial."""
_FIRST_PASS_SHARE = 0.5
"""Most of the budget that the first pass may take; the rest goes where the gradient points."""


def resolve_num_trials(options: TuneOptions, num_tasks: int) -> int:
    """The budget in trials.

    Raises:
        UserInputError: It is smaller than the number of tasks, so that some would stay untuned.
    """
    if options.trials == "auto":
        num_trials = TRIALS_PER_TASK[options.preset] * num_tasks
    elif options.trials < num_tasks:
        raise UserInputError(
            f"trials={options.trials}, but the network has {num_tasks} tasks and each needs a trial; "
            f"give at least {num_tasks}, or auto"
        )
    else:
        num_trials = options.trials
    most = num_trials if options.trials_per_task is None else options.trials_per_task * num_tasks
    return min(num_trials, most)


class Tuner:
    """Tunes a list of tasks within one budget. Not safe for use from several threads.

    Args:
        tasks: What to tune; the `index` of each is its position.
        target: Device to tune for.
        options: Budget, strategy and seed.
        num_trials: Number of candidates to measure, failed ones included.
        search_threads: Threads of the search.
        database: Takes a record of every trial.
        builder: Builds candidates.
        runner: Measures them.
        observers: Told about every round.
    """

    def __init__(
        self,
        tasks: Sequence[TuningTask],
        *,
        target: Target,
        options: TuneOptions,
        num_trials: int,
        search_threads: int,
        database: Database,
        builder: Builder,
        runner: Runner,
        observers: Sequence[TuningObserver] = (),
    ) -> None:
        self._tasks = tasks
        self._target = target
        self._options = options
        self._num_trials = num_trials
        self._search_threads = search_threads
        self._database = database
        self._builder = builder
        self._runner = runner
        self._observers = observers
        self._scheduler = GradientScheduler(len(tasks), options.seed)
        self._states = tuple(TaskState(info=task.info) for task in tasks)
        self._searches: dict[int, TaskSearch] = {}
        self._cost_model = make_cost_model(options.cost_model, search_threads, options.seed)
        self._durations = Durations()
        self._total_trials = 0
        self._started_s = 0.0

    def tune(self, plan: TuningPlan) -> TuningResult:
        """Spends the budget.

        Returns:
            The result, in which a task may have no valid trial: see `require_valid_trials`.

        Raises:
            KeyboardInterrupt: SIGINT or SIGTERM came; the round in hand was finished and recorded.
        """
        np.random.seed(self._options.seed)  # the untrained XGBModel draws from NumPy's global generator
        self._started_s = time.monotonic()
        self._tell("tuning_started", plan)
        try:
            result = self._finish(self._run_rounds())
        except KeyboardInterrupt:
            self._tell("tuning_finished", self._finish(StopReason.INTERRUPTED))
            raise
        self._tell("tuning_finished", result)
        return result

    def _run_rounds(self) -> str:
        """Works until a budget is spent; returns the reason to stop."""
        with deferred_interrupts() as raise_interrupt:
            while self._total_trials < self._num_trials:
                if self._out_of_time():
                    return StopReason.MINUTES
                index = self._scheduler.next_task(self._states)
                if index is None:
                    reasons = {state.stop_reason for state in self._states}
                    return StopReason.TRIALS if StopReason.TRIALS in reasons else StopReason.SPACE_EXHAUSTED
                self._run_round(index)
                raise_interrupt()
        return StopReason.TRIALS

    def save_cost_model(self, path: Path) -> None:
        """Writes the trained XGBoost model in its own format (UBJSON); nothing where there is none."""
        booster = getattr(self._cost_model, "booster", None)
        if booster is not None:
            booster.save_model(str(path))

    # -- one round -----------------------------------------------------------------------------------------------------

    def _run_round(self, index: int) -> None:
        state = self._states[index]
        with self._timed("search_s"):
            search = self._search(index)
            candidates = search.propose(self._round_limit(state))
        if not candidates:
            has_work = state.total_trials or state.info.flops
            state.stop_reason = StopReason.SPACE_EXHAUSTED if has_work else StopReason.NOTHING_TO_TUNE
            return
        trials = self._measure(state, candidates)
        self._record(index, candidates, trials)
        with self._timed("search_s"):
            search.learn(candidates, [_runner_result(trial) for trial in trials])
        self._scheduler.round_finished(state)
        limit = self._options.trials_per_task
        if limit is not None and state.total_trials >= limit:
            state.stop_reason = StopReason.TRIALS
        self._tell(
            "round_finished",
            TuningRound(
                trials=trials,
                task=state.snapshot(),
                tasks=tuple(task.snapshot() for task in self._states),
                total_trials=self._total_trials,
                elapsed_s=time.monotonic() - self._started_s,
                durations=replace(self._durations),
            ),
        )

    def _round_limit(self, state: TaskState) -> int:
        """Trials of the next round: what the budgets allow, and in the first pass no more than a task's share."""
        limits = [self._options.num_trials_per_round, self._num_trials - self._total_trials]
        if state.total_trials == 0:
            limits.append(max(1, int(self._num_trials * _FIRST_PASS_SHARE / len(self._states))))
        if self._options.trials_per_task is not None:
            limits.append(self._options.trials_per_task - state.total_trials)
        return min(limits)

    def _search(self, index: int) -> TaskSearch:
        if index not in self._searches:
            self._searches[index] = TaskSearch(
                self._tasks[index],
                target=self._target,
                strategy=self._options.strategy,
                num_trials_per_round=self._options.num_trials_per_round,
                num_threads=self._search_threads,
                seed=self._options.seed * 1009 + index + 1,
                database=self._database,
                cost_model=self._cost_model,
            )
        return self._searches[index]

    def _measure(self, state: TaskState, candidates: Sequence[MeasureCandidate]) -> tuple[Trial, ...]:
        with self._timed("build_s"):
            built = self._builder.build([candidate.sch.mod for candidate in candidates])
        jobs = [
            RunJob(outcome.value, tuple(_arg_info(info) for info in candidate.args_info))
            for candidate, outcome in zip(candidates, built, strict=True)
            if outcome.value is not None
        ]
        with self._timed("run_s"):
            measured = iter(self._runner.run(jobs))
        trials = []
        for outcome in built:
            self._total_trials += 1
            trial = _trial(self._total_trials, state.info.name, outcome, measured)
            state.add(trial)
            trials.append(trial)
            if outcome.value is not None:
                outcome.value.unlink(missing_ok=True)
        return tuple(trials)

    def _record(self, index: int, candidates: Sequence[MeasureCandidate], trials: Sequence[Trial]) -> None:
        """Commits every trial, failed ones too, as MetaSchedule's own AddToDatabase callback does."""
        from tvm.s_tir.meta_schedule.database import TuningRecord

        workload = self._database.commit_workload(self._tasks[index].mod)
        for candidate, trial in zip(candidates, trials, strict=True):
            run_secs = list(trial.run_s) or [_FAILED_RUN_S]
            self._database.commit_tuning_record(
                TuningRecord(candidate.sch.trace, workload, run_secs, self._target, list(candidate.args_info))
            )

    # -- the run -------------------------------------------------------------------------------------------------------

    def _out_of_time(self) -> bool:
        limit = self._options.max_minutes
        return limit is not None and time.monotonic() - self._started_s >= limit * 60

    def _finish(self, stop_reason: str) -> TuningResult:
        for search in self._searches.values():
            search.close()
        for state in self._states:
            state.stop_reason = state.stop_reason or stop_reason
        return TuningResult(
            tasks=self._states,
            total_trials=self._total_trials,
            elapsed_s=time.monotonic() - self._started_s,
            durations=self._durations,
            stop_reason=stop_reason,
        )

    def _tell(self, event: str, payload: TuningPlan | TuningRound | TuningResult) -> None:
        with self._timed("log_s"):
            for observer in self._observers:
                getattr(observer, event)(payload)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            setattr(self._durations, name, getattr(self._durations, name) + time.monotonic() - started)


def require_valid_trials(result: TuningResult) -> None:
    """Checks that every task with work to do has a schedule.

    Raises:
        TuningError: A task has none.
    """
    failed = [t for t in result.tasks if t.best_s is None and t.stop_reason != StopReason.NOTHING_TO_TUNE]
    if not failed:
        return
    task = failed[0]
    reason = " ".join(task.first_error.split())[:300] or "no candidate was measured"
    raise TuningError(
        f"{len(failed)} of {len(result.tasks)} tasks have no valid trial, such as {task.info.name} after "
        f"{task.total_trials} trials ({reason}); give more trials, more time (max_minutes, measure_timeout_s) or "
        "another target"
    )


def _trial(step: int, task: str, built: Outcome[Path], measured: Iterator[Outcome[tuple[float, ...]]]) -> Trial:
    if built.value is None:
        status = TrialStatus.TIMED_OUT if built.failure == "timed_out" else TrialStatus.BUILD_FAILED
        return Trial(step=step, task=task, status=status, error=built.error)
    outcome = next(measured)
    if outcome.value is None:
        status = TrialStatus.TIMED_OUT if outcome.failure == "timed_out" else TrialStatus.RUN_FAILED
        return Trial(step=step, task=task, status=status, error=outcome.error)
    return Trial(step=step, task=task, status=TrialStatus.OK, run_s=outcome.value)


def _runner_result(trial: Trial) -> object:
    from tvm.s_tir.meta_schedule.runner import RunnerResult

    return RunnerResult(list(trial.run_s) or None, trial.error or None)


def _arg_info(info: Any) -> ArgInfo:
    kind, dtype, shape = info.as_json()
    return str(kind), str(dtype), tuple(int(extent) for extent in shape)
