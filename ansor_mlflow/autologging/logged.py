"""Where the records of a user's tuning come from: the device, and what is known of the rest."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ansor_mlflow import names
from ansor_mlflow.autologging.call import Times, TuneCall, as_callback, make_trials, profiled
from ansor_mlflow.autologging.tuning_run import TuningRun, only_warn, open_run
from ansor_mlflow.device import Device, DeviceFingerprint
from ansor_mlflow.errors import TuningError, one_line
from ansor_mlflow.files import write_text
from ansor_mlflow.records import PARTS_DIR, Database, Journal, Provenance, RecordLog, merge, warn_of_damage
from ansor_mlflow.tracking import (
    Message,
    MlflowObserver,
    RecordMirror,
    StepRun,
    describe_environment,
    memory_tags,
    whole_records,
)
from ansor_mlflow.trials import (
    StopReason,
    TuningObserver,
    TuningPlan,
    TuningResult,
)
from ansor_mlflow.tuning import Ledger

if TYPE_CHECKING:
    from tvm.s_tir.meta_schedule import TaskScheduler
    from tvm.s_tir.meta_schedule.builder import BuilderResult
    from tvm.s_tir.meta_schedule.measure_callback import MeasureCallback
    from tvm.s_tir.meta_schedule.runner import RunnerResult
    from tvm.s_tir.meta_schedule.search_strategy import MeasureCandidate

_FOREIGN_LOWERING = 0
"""Lowering version of records whose tasks another lowering than ours made."""
_log = logging.getLogger(__name__)


def is_remote(call: TuneCall) -> bool:
    """Whether another machine measures, of which this one knows nothing but the target."""
    from tvm.s_tir.meta_schedule.runner import RPCRunner

    return isinstance(call.runner, RPCRunner)


def device_of(call: TuneCall) -> DeviceFingerprint:
    """The device that is tuned for; wrong in its CPU and threads where another machine measures."""
    return Device.of(call.target, _num_threads(call)).fingerprint


def _num_threads(call: TuneCall) -> int:
    """Threads of a kernel: what TVM says in the process that measures, or else what it takes in one like this.

    A script may set the environment after that process has begun, or set the threads in there, by an initializer.
    """
    import tvm
    from tvm.s_tir.meta_schedule.runner import LocalRunner

    if isinstance(call.runner, LocalRunner):
        try:
            return int(call.runner.pool.submit(tvm.runtime.num_threads).result())
        except Exception as err:  # noqa: BLE001 - the process may end in any way, and the tuning will say so itself
            _log.debug("the runner does not say how many threads it has: %s", err)
    return runtime_num_threads()


def foreign_provenance(
    call: TuneCall,
    network: str,
    *,
    num_threads: int,
    estimated_latency_ms: float | None,
    trials_per_task: float | None,
) -> Provenance:
    """The provenance of records whose tasks the user has lowered, so that no tuning of ours goes on from them."""
    import tvm

    return Provenance(
        network=network,
        from_file=False,
        network_sha256="",
        batch_size=0,
        input_shapes={},
        seed=0,
        layout="",
        dtype="",
        pad_channels="off",
        target=str(call.target),
        num_threads=num_threads,
        lowering_version=_FOREIGN_LOWERING,
        tvm_version=tvm.__version__,
        host=platform.node(),
        measure=_measure_settings(call),
        estimated_latency_ms=estimated_latency_ms,
        trials_per_task=trials_per_task,
    )


def _measure_settings(call: TuneCall) -> dict[str, Any]:
    """Settings of the time evaluator, where the runner has them."""
    config = getattr(call.runner, "evaluator_config", None)
    if config is None:
        return {}
    return {
        "number": config.number,
        "repeat": config.repeat,
        "min_repeat_ms": config.min_repeat_ms,
        "cache_flush": config.enable_cpu_cache_flush,
    }


def runtime_num_threads() -> int:
    """Threads that kernels get in a process that leaves TVM alone.

    As `MaxConcurrency` in src/runtime/threading_backend.cc has it, and no more than the machine has CPUs; TVM itself
    would start the threads when asked.
    """
    given = os.environ.get("TVM_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS")
    if given and (number := re.match(r"\s*(\d+)", given)):  # as atoi reads it, also the list "4,2" of OpenMP
        return max(1, min(int(number[1]), os.cpu_count() or 1))
    cpus = len(os.sched_getaffinity(0))
    return max(1, cpus // 2 if os.uname().machine == "x86_64" else cpus)


@contextlib.contextmanager
def logged_tuning(call: TuneCall, extra_tags: Mapping[str, str]) -> Iterator[MeasureCallback]:
    """Logs a tuning that happens inside, of which it hears through the callback."""
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
    """One tuning."""

    def __init__(self, call: TuneCall, run: TuningRun, times: Times) -> None:
        self._call = call
        self._run = run
        self._times = times
        self._device = device_of(call)
        self._records = run.directory / names.RECORDS_DIR
        self._log = self._open_log()
        journal = Journal(self._records)
        journal.begin(self._log.num_earlier)
        self._ledger = Ledger(call.describe_tasks(), self._log, journal)
        self._states = self._ledger.states
        for state in self._states:
            if known := self._log.best(state.info.workload_hash):
                self._ledger.begin_with(state, known[0].run_s)
        self._observers: Sequence[TuningObserver] = ()

    def start(self) -> None:
        """Logs what is known before. An error here is one of the user's server."""
        device = self._device
        tags = {names.TAG_STEP: "tune", names.TAG_TARGET: device.description}
        if not is_remote(self._call):
            tags[names.TAG_NUM_THREADS] = str(device.num_threads)
            write_text(self._records / names.FINGERPRINT_FILE, device.to_json())
        step_run = StepRun(self._run.run.info.run_id, self._run.directory)
        provenance = self._write_provenance()
        if not is_remote(self._call):
            tags |= memory_tags(device, provenance, [state.info.workload_hash for state in self._states])
        step_run.log_tags(tags)
        environment = self._run.directory / names.ENVIRONMENT_FILE
        write_text(environment, json.dumps(describe_environment(device), indent=1))
        step_run.log_artifacts(environment)
        self._run.outbox.put(Message(params=self._call.params()))
        self._observers = (
            MlflowObserver(self._run.outbox, self._run.directory),
            RecordMirror(self._run.outbox, self._run.directory),
        )
        plan = TuningPlan(
            network=self._title,
            target=device.description,
            tasks=tuple(state.info for state in self._states),
            num_trials=int(self._call.max_trials_global),
            earlier_s=self._ledger.earlier_s,
        )
        for observer in self._observers:
            observer.tuning_started(plan)
        self._ledger.start()

    def batch_measured(
        self,
        scheduler: TaskScheduler,
        task_id: int,
        candidates: Sequence[MeasureCandidate],
        built: Sequence[BuilderResult],
        measured: Sequence[RunnerResult],
    ) -> None:
        """Records a batch of candidates of a task, and tells the observers."""
        self._take_durations()
        with self._ledger.timed("log_s"):
            context, state = self._call.tasks[task_id], self._states[task_id]
            trials = make_trials(self._ledger.total_trials + 1, state.info.name, built, measured)
            self._ledger.record(state, trials, context.mod, context.target, candidates)
            self._note_ended(scheduler)
            round_ = self._ledger.round(state, trials)
            for observer in self._observers:
                observer.round_finished(round_)

    def finish(self, stop_reason: str = "") -> None:
        """Tells the observers how it ended: so, or as the numbers say."""
        for state in self._states:
            state.stop_reason = state.stop_reason or stop_reason or self._stop_reason(state.total_trials)
        reasons = {state.stop_reason for state in self._states}
        if not stop_reason:
            is_spent = self._is_spent or reasons <= {StopReason.TRIALS, StopReason.NOTHING_TO_TUNE}
            stop_reason = StopReason.TRIALS if is_spent else StopReason.SPACE_EXHAUSTED
        self._take_durations()
        result = self._ledger.result(stop_reason)
        for observer in self._observers:
            observer.tuning_finished(result)
        provenance = self._write_provenance(result)
        self._run.outbox.put(Message(tags={names.TAG_TRIALS_PER_TASK: str(provenance.trials_per_task)}))

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
        return self._ledger.total_trials >= self._call.max_trials_global

    def _stop_reason(self, num_trials: int) -> str:
        """Why a task with so many trials got no more."""
        is_spent = self._is_spent or num_trials >= self._call.max_trials_per_task
        return StopReason.TRIALS if is_spent else StopReason.SPACE_EXHAUSTED

    def _note_ended(self, scheduler: TaskScheduler) -> None:
        """Marks the tasks that the search has no program for, so that the others make an estimate."""
        for state, record in zip(self._states, scheduler.tasks_, strict=True):
            if record.is_terminated and not state.total_trials:
                state.stop_reason = StopReason.NOTHING_TO_TUNE

    def _take_durations(self) -> None:
        """Reads MetaSchedule's profiler: what neither it nor the logging took was spent on the search."""
        times, spent = self._times(), self._ledger.durations
        spent.build_s = times["SendToBuilder"]
        spent.run_s = times["SendToRunner"] + times["JoinRunnerFutures"]
        spent.search_s = max(0.0, self._ledger.elapsed_s - spent.build_s - spent.run_s - spent.log_s)

    def _write_provenance(self, result: TuningResult | None = None) -> Provenance:
        """Writes and returns where the records come from: all but the lowering is known, which is the user's."""
        estimated_s = result.estimated_latency_s if result else None
        provenance = foreign_provenance(
            self._call,
            self._title,
            num_threads=self._device.num_threads,
            estimated_latency_ms=estimated_s * 1e3 if estimated_s else None,
            trials_per_task=result.total_trials / len(result.tasks) if result else None,
        )
        write_text(self._records / names.PROVENANCE_FILE, json.dumps(asdict(provenance), indent=1))
        return provenance
