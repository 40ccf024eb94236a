"""The bookkeeping of a tuning, and those who are told of it."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from ansor_mlflow.foreign import duration
from ansor_mlflow.records import Journal, RecordLog, decision_of
from ansor_mlflow.trials import (
    Durations,
    ServerState,
    TaskInfo,
    TaskState,
    Trial,
    TuningObserver,
    TuningPlan,
    TuningResult,
    TuningRound,
)
from ansor_mlflow.tuning.candidates import log_lines

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.s_tir.meta_schedule.search_strategy import MeasureCandidate
    from tvm.target import Target

_BUSY = 1.0
"""Probe spread from which the machine is said to be busy: the fixed computation took twice as long."""
_log = logging.getLogger("ansor_mlflow")


class RoundLog:
    """A `TuningObserver` that logs to the logger `ansor_mlflow`."""

    def __init__(self) -> None:
        self._was_busy = False

    def tuning_started(self, plan: TuningPlan) -> None:
        _log.info("tuning %s · %s: %d tasks, %d trials", plan.network, plan.target, len(plan.tasks), plan.num_trials)

    def round_finished(self, round_: TuningRound) -> None:
        best_s, total_s = round_.task.best_s, round_.estimated_latency_s
        failures = ""
        if failed := [trial for trial in round_.trials if trial.error]:
            first = f"{failed[0].status.value}: {' '.join(failed[0].error.split())[:160]}"
            failures = f"  ({len(failed)} failed, first {first})"
        _log.info(
            "%5d trials %6.1f s  %s: %s  network: %s  %.1f/min%s%s",
            round_.total_trials,
            round_.elapsed_s,
            round_.task.info.name,
            duration(best_s) if best_s is not None else "no valid trial",
            duration(total_s) if total_s is not None else "not all tasks measured",
            round_.trials_per_minute,
            f"  ended by: {round_.task.stop_reason}" if round_.task.stop_reason else "",
            failures,
        )
        if round_.probe_spread > _BUSY and not self._was_busy:
            self._was_busy = True
            _log.warning("other programs use the CPUs: what they disturb is measured again, which takes longer")

    def tuning_finished(self, result: TuningResult) -> None:
        """Says how it ended, and what the second measurements of the winners say."""
        estimated_s, confirmed_s, confirmation = result.estimated_latency_s, result.confirmed_latency_s, ""
        if estimated_s and confirmed_s:
            confirmation = f"; confirmed: {duration(confirmed_s)}, optimism {confirmed_s / estimated_s:.3g}"
        how = (result.total_trials, result.elapsed_s, result.stop_reason, confirmation)
        _log.info("%d trials in %.1f s, stopped by: %s%s", *how)


class Ledger:
    """Counts the trials of a tuning, and writes each round of them to the records and the journal, if there is one."""

    def __init__(
        self,
        tasks: Sequence[TaskInfo],
        log: RecordLog,
        journal: Journal | None = None,
        durations: Durations | None = None,
    ) -> None:
        self.states = tuple(TaskState(info=info) for info in tasks)
        self.earlier_s: dict[int, float] = {}
        """Seconds per call of the fastest record that a task began with, by the task's index."""
        self.total_trials = 0
        self.durations = durations or Durations()
        self._log = log
        self._journal = journal
        self._num_rounds = 0
        self._past_s = 0.0
        self._started_s: float | None = None

    def start(self) -> None:
        self._started_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Time of tuning until now, that of earlier processes included."""
        return self._past_s + (time.monotonic() - self._started_s if self._started_s is not None else 0.0)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the time inside to one of the durations."""
        started_s = time.monotonic()
        try:
            yield
        finally:
            setattr(self.durations, name, getattr(self.durations, name) + time.monotonic() - started_s)

    def begin_with(self, state: TaskState, best_s: float) -> None:
        self.earlier_s[state.info.index] = state.best_s = best_s

    def record(
        self,
        state: TaskState,
        trials: Sequence[Trial],
        mod: IRModule,
        target: Target,
        candidates: Sequence[MeasureCandidate],
    ) -> list[Trial]:
        """Counts a round of trials, failed ones too, and writes them; returns them with all that is known of them."""
        self._count(state, trials)
        workload, records = log_lines(mod, target, candidates, [trial.run_s for trial in trials])
        # the records come first: the journal says that its trials have one each
        self._log.append(workload, records)
        hash_, number, elapsed_s = state.info.workload_hash, self._num_rounds, self.elapsed_s
        decisions = [decision_of(record.text) for record in records]
        recorded = [
            replace(trial, workload_hash=hash_, round_=number, elapsed_s=elapsed_s, decision=decision)
            for trial, decision in zip(trials, decisions, strict=True)
        ]
        if self._journal is not None:
            self._journal.append(recorded, self.durations)
        return recorded

    def restore(self, past: Sequence[Trial]) -> Iterator[tuple[TaskState, list[Trial]]]:
        """Counts the rounds of an earlier process of the same tuning, and yields each of them when it is counted."""
        states = {state.info.workload_hash: state for state in self.states}
        for number, entries in itertools.groupby(past, key=lambda entry: entry.round_):
            trials: list[Trial] = []
            for entry in entries:
                state, self._past_s = states[entry.workload_hash], entry.elapsed_s
                trials.append(replace(entry, step=self.total_trials + len(trials) + 1, task=state.info.name))
            self._count(state, trials)
            self._num_rounds = number
            yield state, trials

    def round(
        self, state: TaskState, trials: Sequence[Trial], probe_spread: float = 0.0, servers: Sequence[ServerState] = ()
    ) -> TuningRound:
        """The round of a task that was just recorded, as observers hear of it."""
        return TuningRound(
            trials=tuple(trials),
            task=state.snapshot(),
            tasks=tuple(task.snapshot() for task in self.states),
            total_trials=self.total_trials,
            elapsed_s=self.elapsed_s,
            durations=replace(self.durations),
            probe_spread=probe_spread,
            servers=tuple(servers),
        )

    def result(self, stop_reason: str, probe_spread: float = 0.0, unreliable: str = "") -> TuningResult:
        """How the tuning ended; a task that nothing else ended, ended with it."""
        if self._journal is not None:
            self._journal.append((), self.durations)
        return TuningResult(
            tasks=tuple(replace(task.snapshot(), stop_reason=task.stop_reason or stop_reason) for task in self.states),
            total_trials=self.total_trials,
            elapsed_s=self.elapsed_s,
            durations=replace(self.durations),
            stop_reason=stop_reason,
            probe_spread=probe_spread,
            unreliable=unreliable,
        )

    def _count(self, state: TaskState, trials: Sequence[Trial]) -> None:
        self._num_rounds += 1
        self.total_trials += len(trials)
        for trial in trials:
            state.add(trial)


class Announcer:
    """Calls observers in order, from one thread, so that a slow server holds up neither search nor builds.

    `wait` comes before every measurement, which is to have the host for itself. To be closed.
    """

    def __init__(self, observers: Sequence[TuningObserver]) -> None:
        self._observers = observers
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="observers")
        self._pending: list[Future[None]] = []

    def tell(self, call: Callable[[TuningObserver], None]) -> None:
        """Makes a call to every observer, soon."""

        def tell_all() -> None:
            for observer in self._observers:
                call(observer)

        self._pending.append(self._executor.submit(tell_all))

    def wait(self) -> None:
        """Returns when the observers know everything; raises what one of them raised."""
        pending, self._pending = self._pending, []
        for future in pending:
            future.result()

    def close(self) -> None:
        """Ends the thread; what was not told yet is dropped."""
        self._executor.shutdown(cancel_futures=True)
