"""Tells the observers of our tuner what MetaSchedule's own tuner does."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ansor_mlflow import names
from ansor_mlflow.autologging.call import TuneCall, make_trials
from ansor_mlflow.autologging.description import device_of, foreign_provenance, is_remote
from ansor_mlflow.autologging.listening import Times, as_callback, profiled
from ansor_mlflow.autologging.run import TuningRun, only_warn, open_run
from ansor_mlflow.errors import TuningError, one_line
from ansor_mlflow.files import write_text
from ansor_mlflow.records import PARTS_DIR, Database, Journal, JournalEntry, RecordLog, merge, warn_of_damage
from ansor_mlflow.tracking import (
    Message,
    MlflowObserver,
    RecordMirror,
    StepRun,
    describe_environment,
    whole_records,
)
from ansor_mlflow.trials import (
    Durations,
    StopReason,
    TaskState,
    Trial,
    TuningObserver,
    TuningPlan,
    TuningResult,
    TuningRound,
)
from ansor_mlflow.tuning import log_lines

if TYPE_CHECKING:
    from tvm.s_tir.meta_schedule import TaskScheduler
    from tvm.s_tir.meta_schedule.builder import BuilderResult
    from tvm.s_tir.meta_schedule.measure_callback import MeasureCallback
    from tvm.s_tir.meta_schedule.runner import RunnerResult
    from tvm.s_tir.meta_schedule.search_strategy import MeasureCandidate

_log = logging.getLogger("ansor_mlflow")


@contextlib.contextmanager
def logged_tuning(call: TuneCall, extra_tags: Mapping[str, str]) -> Iterator[MeasureCallback]:
    """Logs a tuning that happens inside, of which it hears through the callback.

    Args:
        call: What is about to be called.
        extra_tags: Tags of a new run.
    """
    with open_run(extra_tags) as run, profiled() as times:
        session = TuningSession(call, run, times)
        session.start()

        def batch_measured(*args: Any) -> None:
            with only_warn():
                session.batch_measured(*args)

        try:
            yield as_callback(batch_measured)
        except BaseException:  # TVM makes a RuntimeError of most errors, and of Ctrl-C in a callback
            with only_warn():
                session.finish(StopReason.INTERRUPTED)
                session.put_records()
            raise
        session.finish()
        session.warn_of_missing_trials()
        session.put_records()


class TuningSession:
    """One tuning.

    Args:
        call: What is called.
        run: Where it is logged.
        times: Where the time goes.
    """

    def __init__(self, call: TuneCall, run: TuningRun, times: Times) -> None:
        self._call = call
        self._run = run
        self._times = times
        self._device = device_of(call)
        self._records = run.directory / names.RECORDS_DIR
        self._log = self._open_log()
        self._trials_file = Journal(self._records)
        self._trials_file.begin(self._log.num_earlier)
        self._states = [TaskState(info=info) for info in call.describe_tasks()]
        for state in self._states:
            if known := self._log.best(state.info.workload_hash):
                state.best_s = known[0].run_s
        self._num_trials = self._num_rounds = 0
        self._log_s = 0.0
        self._started_s = time.monotonic()
        self._observers: Sequence[TuningObserver] = ()

    def start(self) -> None:
        """Logs what is known before. An error here is one of the user's server."""
        device = self._device
        tags = {names.TAG_STEP: "tune", names.TAG_TARGET: device.description}
        if not is_remote(self._call):
            tags[names.TAG_NUM_THREADS] = str(device.num_threads)
            write_text(self._records / names.FINGERPRINT_FILE, device.to_json())
        step_run = StepRun(self._run.run.info.run_id, self._run.directory)
        step_run.log_tags(tags)
        environment = self._run.directory / names.ENVIRONMENT_FILE
        write_text(environment, json.dumps(describe_environment(device), indent=1))
        step_run.log_artifacts(environment)
        self._write_provenance()
        self._run.outbox.put(Message(params=self._call.params()))
        self._observers = (
            MlflowObserver(self._run.outbox, self._run.directory),
            RecordMirror(self._run.outbox, self._run.directory),
        )
        infos = tuple(state.info for state in self._states)
        plan = TuningPlan(
            network=self._title,
            target=device.description,
            tasks=infos,
            num_trials=int(self._call.max_trials_global),
            earlier_s={state.info.index: state.best_s for state in self._states if state.best_s is not None},
        )
        for observer in self._observers:
            observer.tuning_started(plan)
        self._started_s = time.monotonic()

    def batch_measured(
        self,
        scheduler: TaskScheduler,
        task_id: int,
        candidates: Sequence[MeasureCandidate],
        built: Sequence[BuilderResult],
        measured: Sequence[RunnerResult],
    ) -> None:
        """Records a batch of candidates of a task, and tells the observers."""
        began_s = time.monotonic()
        context, state = self._call.tasks[task_id], self._states[task_id]
        trials = make_trials(self._num_trials + 1, state.info.name, built, measured)
        self._log.append(*log_lines(context.mod, context.target, candidates, [trial.run_s for trial in trials]))
        self._journal(trials, state, began_s - self._started_s)
        self._num_trials += len(trials)
        for trial in trials:
            state.add(trial)
        self._note_ended(scheduler)
        round_ = TuningRound(
            trials=trials,
            task=state.snapshot(),
            tasks=self._snapshots(),
            total_trials=self._num_trials,
            elapsed_s=began_s - self._started_s,
            durations=self._durations(began_s),
        )
        for observer in self._observers:
            observer.round_finished(round_)
        self._log_s += time.monotonic() - began_s

    def finish(self, stop_reason: str = "") -> None:
        """Tells the observers how it ended: so, or as the numbers say."""
        for state in self._states:
            state.stop_reason = state.stop_reason or stop_reason or self._stop_reason(state.total_trials)
        reasons = {state.stop_reason for state in self._states}
        if not stop_reason:
            is_spent = self._is_spent or reasons <= {StopReason.TRIALS, StopReason.NOTHING_TO_TUNE}
            stop_reason = StopReason.TRIALS if is_spent else StopReason.SPACE_EXHAUSTED
        now_s = time.monotonic()
        result = TuningResult(
            tasks=self._snapshots(),
            total_trials=self._num_trials,
            elapsed_s=now_s - self._started_s,
            durations=self._durations(now_s),
            stop_reason=stop_reason,
        )
        for observer in self._observers:
            observer.tuning_finished(result)
        self._write_provenance(result)

    def warn_of_missing_trials(self) -> None:
        """Says which tasks ended without a valid trial, so that the network has no latency; the script goes on."""
        failed = [s for s in self._states if s.best_s is None and s.stop_reason != StopReason.NOTHING_TO_TUNE]
        if not failed:
            return
        task = next((state for state in failed if state.first_error), failed[0])
        message = one_line(
            TuningError(
                f"{len(failed)} of {len(self._states)} tasks have no valid trial, such as {task.info.name} after "
                f"{task.total_trials} trials ({task.first_error or 'no candidate was measured'})"
            )
        )
        _log.warning("run %s has no latency: %s", self._run.run.info.run_id, message)
        self._run.outbox.put(Message(tags={names.TAG_ERROR: message}))

    def put_records(self) -> None:
        """Sends all records."""
        parts = f"{names.RECORDS_DIR}/{PARTS_DIR}"
        self._run.outbox.put(Message(artifacts=whole_records(self._run.directory), remove=parts))

    def _open_log(self) -> RecordLog:
        """The log of the run, which begins with what the user's database has for this target."""
        target = self._call.target.export()
        earlier = self._call.database_files()
        if earlier is not None:
            warn_of_damage([earlier], earlier.records)
            merge([Database(earlier)], self._records, target=target)
        return RecordLog(self._records, target)

    @property
    def _title(self) -> str:
        network = self._run.run.data.tags.get(names.TAG_NETWORK)
        if network:
            return network
        return self._states[0].info.name if len(self._states) == 1 else f"{len(self._states)} tasks"

    @property
    def _is_spent(self) -> bool:
        return self._num_trials >= self._call.max_trials_global

    def _stop_reason(self, num_trials: int) -> str:
        """Why a task with so many trials got no more."""
        is_spent = self._is_spent or num_trials >= self._call.max_trials_per_task
        return StopReason.TRIALS if is_spent else StopReason.SPACE_EXHAUSTED

    def _note_ended(self, scheduler: TaskScheduler) -> None:
        """Marks the tasks that the search has no program for, so that the others make an estimate."""
        for state, record in zip(self._states, scheduler.tasks_, strict=True):
            if record.is_terminated and not state.total_trials:
                state.stop_reason = StopReason.NOTHING_TO_TUNE

    def _snapshots(self) -> tuple[TaskState, ...]:
        return tuple(state.snapshot() for state in self._states)

    def _durations(self, now_s: float) -> Durations:
        times = self._times()
        build_s = times["SendToBuilder"]
        run_s = times["SendToRunner"] + times["JoinRunnerFutures"]
        search_s = max(0.0, now_s - self._started_s - build_s - run_s - self._log_s)
        return Durations(search_s=search_s, build_s=build_s, run_s=run_s, log_s=self._log_s)

    def _journal(self, trials: Sequence[Trial], state: TaskState, elapsed_s: float) -> None:
        self._num_rounds += 1
        self._trials_file.append(
            [
                JournalEntry(
                    step=trial.step,
                    workload_hash=state.info.workload_hash,
                    status=trial.status,
                    run_s=trial.run_s,
                    error=trial.error,
                    round_=self._num_rounds,
                    elapsed_s=elapsed_s,
                )
                for trial in trials
            ]
        )

    def _write_provenance(self, result: TuningResult | None = None) -> None:
        """Writes where the records come from: all but the lowering is known, which is the user's."""
        estimated_s = result.estimated_latency_s if result else None
        provenance = foreign_provenance(
            self._call,
            self._title,
            num_threads=self._device.num_threads,
            estimated_latency_ms=estimated_s * 1e3 if estimated_s else None,
            trials_per_task=result.total_trials / len(result.tasks) if result else None,
        )
        write_text(self._records / names.PROVENANCE_FILE, json.dumps(asdict(provenance), indent=1))
