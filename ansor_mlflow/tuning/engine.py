"""The outer loop of tuning: pick a task, propose candidates, build, measure, record, learn, tell the observers."""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ansor_mlflow.lowering import TuningTask
from ansor_mlflow.measuring import is_disturbed
from ansor_mlflow.parameters import SearchOptions
from ansor_mlflow.processes import Outcome
from ansor_mlflow.records import FAILED_RUN_S, Journal, RecordLog, RecordText, Seed
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
from ansor_mlflow.tuning.candidates import candidate_of, make_trial, run_jobs
from ansor_mlflow.tuning.ledger import Announcer, Ledger
from ansor_mlflow.tuning.program_search import make_cost_model, release_memory
from ansor_mlflow.tuning.sketch_search import ProgramSearch, make_search
from ansor_mlflow.tuning.stopping import (
    GradientScheduler,
    Interrupts,
    StoppingRules,
    deferred_interrupts,
    dominated_tasks,
    seemingly_faster,
)
from ansor_mlflow.tuning.winners import MAX_FINALISTS, Winners
from ansor_mlflow.workers import Builder, BuildQueue, RunJob, Runner

if TYPE_CHECKING:
    from tvm.s_tir.meta_schedule.search_strategy import MeasureCandidate
    from tvm.target import Target


_LOOK_S = 0.5
_TRIALS_PER_RELEASE = 256
"""Trials between two releases of memory, each of which takes as long as a few of them."""
_log = logging.getLogger("ansor_mlflow")


@dataclass(kw_only=True, eq=False)
class _Batch:
    """Candidates of one task on their way through a round, and what became of them so far."""

    state: TaskState
    task: TuningTask
    candidates: Sequence[MeasureCandidate]
    built: Sequence[Outcome[Path]] = ()
    jobs: Sequence[RunJob] = ()
    """A job for each candidate that could be built."""
    outcomes: Sequence[Outcome[tuple[float, ...]]] = ()
    """What became of each of them."""
    build_s: float = 0.0
    log_s: float = 0.0
    run_s: float = 0.0
    measured: Future[None] = field(init=False)


class Tuner:
    """Tunes a list of tasks within one budget of trials, failed ones included. Not safe for use from several threads.

    `past` are trials of the same tuning that was interrupted, whose records are in the log, and `durations` is where
    their time went; they count. `similar` are records by the hash of their workload and the device.
    """

    def __init__(
        self,
        tasks: Sequence[TuningTask],
        *,
        target: Target,
        options: SearchOptions,
        num_trials: int,
        search_threads: int,
        log: RecordLog,
        builder: Builder,
        runner: Runner,
        observers: Sequence[TuningObserver] = (),
        journal: Journal | None = None,
        past: Sequence[Trial] = (),
        durations: Durations | None = None,
        seeds: Sequence[Seed] = (),
        similar: Mapping[str, Mapping[str, Sequence[RecordText]]] = {},
    ) -> None:
        self._tasks = tasks
        self._target = target
        self._options = options
        self._search_threads = search_threads
        self._log = log
        self._ledger = Ledger([task.info for task in tasks], log, journal, durations)
        self._states = self._ledger.states
        self._builder = builder
        self._builds = BuildQueue(builder)
        self._runner = runner
        self._may_run = threading.Semaphore(runner.num_batches)
        self._announcer = Announcer(observers)
        self._scheduler = GradientScheduler(len(tasks), options.seed)
        self._similar = similar
        self._rules = StoppingRules(options, num_trials, len(tasks) - sum(seed.is_enough for seed in seeds))
        self._winners = Winners(len(tasks))
        self._searches: dict[int, ProgramSearch] = {}
        self._cost_model = make_cost_model(options.cost_model, search_threads, options.seed)
        self._num_proposed = 0
        self._num_disturbed = 0
        self._plant(seeds)
        self._past_rounds = tuple(self._restore(past))

    def tune(self, plan: TuningPlan) -> TuningResult:
        """Spends the budget, then measures the winners again. A task may have no valid trial: `require_valid_trials`.

        A KeyboardInterrupt comes after the round in hand was finished and recorded.
        """
        self._ledger.start()
        plan = replace(plan, past=self._past_rounds, earlier_s=self._ledger.earlier_s)
        self._announcer.tell(lambda observer: observer.tuning_started(plan))
        try:
            try:
                with deferred_interrupts() as interrupts:
                    stop_reason = self._run_rounds(interrupts)
                    self._confirm_winners(interrupts)
            except KeyboardInterrupt:
                try:
                    self._finish(StopReason.INTERRUPTED)
                except Exception as err:  # noqa: BLE001 - the interrupt is what ends the tuning
                    _log.warning("the end of the tuning was not told: %s", err)
                raise
            return self._finish(stop_reason)
        finally:
            self._builds.close()
            self._announcer.close()
            for search in self._searches.values():
                search.close()

    def save_winners(self, directory: Path) -> None:
        """Writes a database with the winner of every task that has one."""
        self._winners.write(directory, self._tasks, self._target, self._log)

    def _run_rounds(self, interrupts: Interrupts) -> str:
        """Works until a budget is spent; returns the reason to stop.

        While a remote runner measures, the next batches are searched and built. A local one has the host for itself.
        """
        in_flight: list[_Batch] = []
        # one builds while the others measure
        executor = ThreadPoolExecutor(self._runner.num_batches + 1, thread_name_prefix="runner")
        try:
            while True:
                # what was proposed counts, measured or not: trials under way must not exceed the budget
                reason = self._rules.run_stop_reason(self._ledger.elapsed_s, self._num_proposed, self._states)
                may_start = not (reason or interrupts.received) and (self._runner.is_remote or not in_flight)
                batch = self._start_round(executor, in_flight, interrupts) if may_start else None
                in_flight += [batch] if batch is not None else []
                # without a new batch something must end before another one can begin
                if in_flight and (batch is None or self._has_enough(in_flight)):
                    in_flight.remove(finished := self._next_finished(in_flight))
                    self._finish_round(finished)
                if not in_flight:
                    interrupts.raise_if_received()
                    if reason:
                        return reason
        except Exception:
            for batch in in_flight:  # what was measured is not to be lost
                with suppress(Exception):
                    self._finish_round(batch)
            raise
        finally:
            executor.shutdown(wait=False, cancel_futures=True)  # an error or a second Ctrl-C waits for nobody

    def _has_enough(self, in_flight: Sequence[_Batch]) -> bool:
        """Whether the devices have so much to measure that a batch can be waited for.

        Beside the oldest batch, which may be nearly done, there are two programs for each of several devices.
        """
        if not self._runner.is_remote or len(in_flight) > self._runner.num_batches:
            return True
        num_devices, others = self._runner.num_devices, in_flight[1:]
        return bool(others) and (num_devices == 1 or sum(len(batch.candidates) for batch in others) >= 2 * num_devices)

    def _next_finished(self, batches: Sequence[_Batch]) -> _Batch:
        """The batch that is measured first, the oldest of several."""
        started_s = time.monotonic()
        measured = [batch.measured for batch in batches]
        # a signal that comes just before a thread goes to sleep does not wake it: it is seen at the next look
        while not wait(measured, timeout=_LOOK_S, return_when=FIRST_COMPLETED).done:
            pass
        if self._runner.is_remote:
            self._ledger.durations.run_s += time.monotonic() - started_s
        return next(batch for batch in batches if batch.measured.done())

    # -- one round -----------------------------------------------------------------------------------------------------

    def _start_round(
        self, executor: ThreadPoolExecutor, in_flight: Sequence[_Batch], interrupts: Interrupts
    ) -> _Batch | None:
        """Searches, and begins to build and measure; None when there is no task, or the one picked has nothing left."""
        # a task has one batch at a time: its next proposal learns from this one
        index = self._scheduler.next_task(self._states, {batch.state.info.index for batch in in_flight})
        if index is None:
            return None
        state = self._states[index]
        num_waiting = sum(not state.total_trials and not state.stop_reason for state in self._states)
        limit = self._rules.round_limit(state, num_waiting, self._num_proposed, self._ledger.elapsed_s)
        with self._ledger.timed("search_s"), interrupts.in_tvm():
            candidates = self._search(index).propose(limit)
        if not candidates:
            has_work = state.total_trials or state.info.flops  # a reshape has neither, and that is no failure
            state.stop_reason = StopReason.SPACE_EXHAUSTED if has_work else StopReason.NOTHING_TO_TUNE
            return None
        self._num_proposed += len(candidates)
        batch = _Batch(state=state, task=self._tasks[index], candidates=candidates)
        batch.measured = executor.submit(self._build_and_run, batch, state.best_s)
        return batch

    def _build_and_run(self, batch: _Batch, best_s: float | None) -> None:
        """Builds and measures a batch. Called in a thread of its own."""
        batch.built, batch.build_s = self._builds.build([candidate.sch.mod for candidate in batch.candidates])
        batch.jobs = run_jobs(batch.candidates, batch.built, batch.task, best_s)
        with self._may_run:  # only here: the next batch is built while this one waits for its turn
            waited_s = time.monotonic()
            self._announcer.wait()  # a local runner needs the host for itself
            started_s = time.monotonic()
            batch.outcomes = self._runner.run(batch.jobs)
        batch.log_s, batch.run_s = started_s - waited_s, time.monotonic() - started_s

    def _finish_round(self, batch: _Batch) -> None:
        """Waits for the measurements, records them, learns from them and tells the observers."""
        batch.measured.result()
        from tvm.s_tir.meta_schedule.runner import RunnerResult

        state, ledger, num_before = batch.state, self._ledger, self._ledger.total_trials
        ledger.durations.build_s += batch.build_s
        ledger.durations.log_s += batch.log_s
        # of a remote runner, which measures while this host searches, only the wait for it counts
        ledger.durations.run_s += 0.0 if self._runner.is_remote else batch.run_s
        self._num_disturbed += sum(outcome.is_disturbed for outcome in batch.outcomes)
        trials = ledger.record(state, self._make_trials(batch), batch.task.mod, self._target, batch.candidates)
        with ledger.timed("search_s"):
            results = [RunnerResult(list(trial.run_s) or None, trial.error or None) for trial in trials]
            self._search(state.info.index).learn(batch.candidates, results)
            if ledger.total_trials // _TRIALS_PER_RELEASE > num_before // _TRIALS_PER_RELEASE:
                release_memory()
        self._round_finished(state)
        round_ = self._round(state, trials)  # a copy: the next round may change the states before observers look
        self._announcer.tell(lambda observer: observer.round_finished(round_))

    def _make_trials(self, batch: _Batch) -> list[Trial]:
        """The trials of a round; the libraries of the fastest stay for a second measurement."""
        jobs, outcomes = iter(batch.jobs), iter(batch.outcomes)
        trials = []
        for step, (candidate, built) in enumerate(
            zip(batch.candidates, batch.built, strict=True), self._ledger.total_trials + 1
        ):
            trials.append(make_trial(step, batch.state.info.name, built, outcomes))
            if built.value is not None:
                self._winners.offer(batch.state.info.index, trials[-1], candidate, next(jobs))
        return trials

    def _round_finished(self, state: TaskState) -> None:
        """Lets the scheduler and the stopping rules know of a round."""
        self._scheduler.round_finished(state)
        state.stop_reason = self._rules.stop_reason_of(state)
        self._stop_dominated()

    def _plant(self, seeds: Sequence[Seed]) -> None:
        """Lets the tasks begin with what records say; those of which enough is known get no trials."""
        by_hash = {seed.workload_hash: seed for seed in seeds}
        for state in self._states:
            if seed := by_hash.get(state.info.workload_hash):
                self._ledger.begin_with(state, seed.best_s)
                state.stop_reason = StopReason.KNOWN if seed.is_enough else ""
        self._stop_dominated()

    def _restore(self, past: Sequence[Trial]) -> Iterator[TuningRound]:
        """The rounds of an earlier process; scheduler and stopping rules get to know what they knew then."""
        for state, trials in self._ledger.restore(past):
            self._round_finished(state)
            yield self._round(state, trials)
        self._num_proposed = self._ledger.total_trials

    def _stop_dominated(self) -> None:
        """Gives no more trials to algorithms that lost against another one of their layer."""
        for state in dominated_tasks(self._states):
            state.stop_reason = state.stop_reason or StopReason.DOMINATED

    def _round(self, state: TaskState, trials: Sequence[Trial]) -> TuningRound:
        return self._ledger.round(state, trials, self._runner.noise.spread, self._runner.servers)

    def _search(self, index: int) -> ProgramSearch:
        if index not in self._searches:
            self._searches[index] = make_search(
                self._tasks[index],
                target=self._target,
                options=self._options,
                num_threads=self._search_threads,
                # tasks draw differently, and so do those of two seeds that follow one another
                seed=self._options.seed * 1009 + index + 1,
                log=self._log,
                cost_model=self._cost_model,
            )
            workload_hash = self._tasks[index].info.workload_hash
            if earlier := self._log.earlier(workload_hash):
                self._searches[index].remember(earlier)
            for device, records in self._similar.get(workload_hash, {}).items():
                self._searches[index].transfer(records, device)
        return self._searches[index]

    # -- the run -------------------------------------------------------------------------------------------------------

    def _confirm_winners(self, interrupts: Interrupts) -> None:
        with self._ledger.timed("log_s"):
            self._announcer.wait()
        if self._past_rounds:
            with self._ledger.timed("build_s"):
                self._offer_earlier()
        with self._ledger.timed("confirm_s"):
            self._measure_again(interrupts, without=dominated_tasks(self._states, in_the_end=True))
            # a slower host makes what was measured once look faster than what was measured again
            if faster := seemingly_faster(self._states):
                self._measure_again(interrupts, without=[state for state in self._states if state not in faster])

    def _measure_again(self, interrupts: Interrupts, *, without: Sequence[TaskState]) -> None:
        indices = {state.info.index for state in without}
        self._winners.measure_again(self._runner, interrupts.raise_if_received, indices)
        for state in self._states:
            earlier = next(iter(self._log.best(state.info.workload_hash)), None)
            winner = self._winners.of_task(state.info.index, earlier)
            if winner is not None:
                state.confirmed_s, state.confirmed_error = winner.confirmed_s, self._winners.standard_error(winner)

    def _offer_earlier(self) -> None:
        """Builds the fastest programs of earlier processes of this tuning again, so that they are measured a second
        time like those of this one.
        """
        found = []
        for state in self._states:
            records = [r for r in self._log.earlier(state.info.workload_hash) if r.run_s < FAILED_RUN_S]
            for record in heapq.nsmallest(MAX_FINALISTS, records, key=lambda record: record.run_s):
                trial = Trial(step=0, task=state.info.name, status=TrialStatus.OK, run_s=(record.run_s,))
                candidate = candidate_of(record, self._tasks[state.info.index], self._target)
                if candidate is not None and self._winners.would_take(state.info.index, trial):
                    found.append((state, trial, candidate))
        built = self._builder.build([candidate.sch.mod for _, _, candidate in found])
        for (state, trial, candidate), outcome in zip(found, built, strict=True):
            for job in run_jobs([candidate], [outcome], self._tasks[state.info.index], state.best_s):
                self._winners.offer(state.info.index, trial, candidate, job)

    def _finish(self, stop_reason: str) -> TuningResult:
        """Tells the observers how it ended, and whether the times can be trusted."""
        num_trials = self._ledger.total_trials - sum(len(round_.trials) for round_ in self._past_rounds)
        num_disturbed, num_winners = self._winners.num_disturbed
        found = []
        if is_disturbed(self._num_disturbed, num_trials):
            found.append(f"{self._num_disturbed} of {num_trials} trials")
        if is_disturbed(num_disturbed, num_winners):
            found.append(f"the second measurements of {num_disturbed} of {num_winners} tasks")
        disturbed = f"other programs used the CPUs during {' and '.join(found)}; tune again on a quiet machine"
        result = self._ledger.result(stop_reason, self._runner.noise.spread, disturbed if found else "")
        self._announcer.tell(lambda observer: observer.tuning_finished(result))
        self._announcer.wait()
        return result
