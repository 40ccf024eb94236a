"""The run that a user's tuning is logged to, and what is logged: as for a tuning of ours, as far as it is known."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlflow
from mlflow.entities import Run
from mlflow.utils.mlflow_tags import MLFLOW_AUTOLOGGING, MLFLOW_LOGGED_ARTIFACTS

from ansor_mlflow import names, tracking
from ansor_mlflow.autologging.call import Times, TuneCall, as_callback, make_trials, profiled
from ansor_mlflow.device import Device
from ansor_mlflow.errors import TuningError, one_line, only_warn
from ansor_mlflow.files import write_text
from ansor_mlflow.foreign import read_json
from ansor_mlflow.records import PARTS_DIR, Database, Journal, Provenance, RecordLog, merge, warn_of_damage
from ansor_mlflow.trials import StopReason, TuningObserver, TuningPlan, TuningResult
from ansor_mlflow.tuning import Ledger

if TYPE_CHECKING:
    from tvm.s_tir.meta_schedule import TaskScheduler
    from tvm.s_tir.meta_schedule.builder import BuilderResult
    from tvm.s_tir.meta_schedule.measure_callback import MeasureCallback
    from tvm.s_tir.meta_schedule.runner import RunnerResult
    from tvm.s_tir.meta_schedule.search_strategy import MeasureCandidate

INTEGRATION = "ansor_mlflow"  # the name of our autologging in MLflow
_NOT_LOGGED = "the tuning could not be logged"
_FOREIGN_LOWERING = 0
"""Lowering version of records whose tasks the user has lowered, so that no tuning of ours goes on from them."""
_log = logging.getLogger("ansor_mlflow")


@contextlib.contextmanager
def logged_tuning(call: TuneCall, extra_tags: Mapping[str, str]) -> Iterator[MeasureCallback]:
    """Logs a tuning that happens inside, of which it hears through the callback."""
    with open_run(extra_tags) as (run, directory, outbox), profiled() as times:
        session = TuningSession(call, run, directory, outbox, times)
        session.start()

        def batch_measured(*args: Any) -> None:
            with only_warn(_NOT_LOGGED):
                session.batch_measured(*args)

        try:
            yield as_callback(batch_measured)
        except BaseException:  # TVM makes a RuntimeError of most errors, and of Ctrl-C in a callback
            with only_warn(_NOT_LOGGED):
                session.finish(StopReason.INTERRUPTED)
            raise
        session.finish()
        session.warn_of_missing_trials()


@contextlib.contextmanager
def open_run(extra_tags: Mapping[str, str]) -> Iterator[tuple[Run, Path, tracking.Outbox]]:
    """The active run if nothing was tuned in it yet, else a new one, below the active one if there is one.

    A new run ends with the truth about how the tuning ended; the active run stays open. The scratch directory is
    removed at the end, unless messages are left in it.
    """
    active = mlflow.active_run()
    run = mlflow.get_run(active.info.run_id) if active else None
    with contextlib.ExitStack() as stack:
        is_guest = run is not None and names.TAG_STEP not in run.data.tags
        if run is None or not is_guest:
            run = stack.enter_context(_new_run(extra_tags, nested=run is not None))
        directory = tracking.work_directory(run.info.run_id).absolute()  # the user may change the current directory
        if not is_guest:
            # if this process is killed, the next step ends the run
            stack.enter_context(tracking.held(run.info.run_id, directory))
        outbox = GuestOutbox(run, directory) if is_guest else tracking.Outbox(run.info.run_id, directory)
        try:
            yield run, directory, outbox
        except BaseException as err:
            with only_warn(_NOT_LOGGED):  # while another error is on its way to the user, that is the one to report
                outbox.put(tracking.Message(tags={names.TAG_ERROR: f"{type(err).__name__}: {one_line(err)}"}))
                outbox.close(tracking.GRACE_AFTER_ERROR_S)
                tracking.remove_directory(directory)
            raise
        if not is_guest:
            outbox.put(tracking.Message(status="FINISHED"))
        outbox.close(tracking.GRACE_S)
        tracking.remove_directory(directory)


class GuestOutbox(tracking.Outbox):
    """The outbox of a user's own run: its name, and the tables that it has, stay."""

    def __init__(self, run: Run, directory: Path) -> None:
        super().__init__(run.info.run_id, directory, keeps_name=True)
        self._tables = read_json(run.data.tags.get(MLFLOW_LOGGED_ARTIFACTS, "[]"))

    def put(self, message: tracking.Message) -> None:
        if new := message.tags.get(MLFLOW_LOGGED_ARTIFACTS):
            tables = json.dumps([*self._tables, *json.loads(new)])
            message = replace(message, tags={**message.tags, MLFLOW_LOGGED_ARTIFACTS: tables})
        super().put(message)


@contextlib.contextmanager
def _new_run(extra_tags: Mapping[str, str], *, nested: bool) -> Iterator[Run]:
    run = mlflow.start_run(nested=nested, tags={**extra_tags, MLFLOW_AUTOLOGGING: INTEGRATION})
    try:
        yield run
    except BaseException as err:
        status = "KILLED" if isinstance(err, KeyboardInterrupt) else "FAILED"
        with only_warn(_NOT_LOGGED):  # where only messages are left, the tuning itself went well
            mlflow.end_run("FINISHED" if isinstance(err, tracking.UndeliveredError) else status)
        raise
    mlflow.end_run()


class TuningSession:
    """One tuning of the user's."""

    def __init__(self, call: TuneCall, run: Run, directory: Path, outbox: tracking.Outbox, times: Times) -> None:
        from tvm.s_tir.meta_schedule.runner import RPCRunner

        self._call = call
        self._run = run
        self._directory = directory
        self._outbox = outbox
        self._times = times
        self._is_remote = isinstance(call.runner, RPCRunner)
        """Whether another machine measures, of which this one knows nothing but the target."""
        self._device = Device.of(call.target, _num_threads(call)).fingerprint
        self._records = directory / names.RECORDS_DIR
        log = self._open_log()
        journal = Journal(self._records)
        journal.begin(log.num_earlier)
        self._ledger = Ledger(call.describe_tasks(), log, journal)
        self._states = self._ledger.states
        for state in self._states:
            if known := log.best(state.info.workload_hash):
                self._ledger.begin_with(state, known[0].run_s)
        title = self._states[0].info.name if len(self._states) == 1 else f"{len(self._states)} tasks"
        self._title = run.data.tags.get(names.TAG_NETWORK) or title
        self._observers: Sequence[TuningObserver] = ()

    def start(self) -> None:
        """Logs what is known before. An error here is one of the user's server."""
        device, call = self._device, self._call
        tags = {names.TAG_STEP: "tune", names.TAG_TARGET: device.description}
        provenance = self._write_provenance()
        if not self._is_remote:
            write_text(self._records / names.FINGERPRINT_FILE, device.to_json())
            tags[names.TAG_NUM_THREADS] = str(device.num_threads)
            tags |= tracking.memory_tags(device, provenance, [state.info.workload_hash for state in self._states])
        step_run = tracking.StepRun(self._run.info.run_id, self._directory)
        step_run.log_tags(tags)
        environment = self._directory / names.ENVIRONMENT_FILE
        write_text(environment, json.dumps(tracking.describe_environment(device), indent=1))
        step_run.log_artifacts(environment)
        self._outbox.put(tracking.Message(params=call.params()))
        self._observers = (
            tracking.MlflowObserver(self._outbox, self._directory),
            tracking.RecordMirror(self._outbox, self._directory),
        )
        plan = TuningPlan(
            network=self._title,
            target=device.description,
            tasks=tuple(state.info for state in self._states),
            num_trials=int(call.max_trials_global),
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
            made = make_trials(self._ledger.total_trials + 1, state.info.name, built, measured)
            trials = self._ledger.record(state, made, context.mod, context.target, candidates)
            for other, record in zip(self._states, scheduler.tasks_, strict=True):
                if record.is_terminated and not other.total_trials:
                    other.stop_reason = StopReason.NOTHING_TO_TUNE  # so that the others make an estimate
            round_ = self._ledger.round(state, trials)
            for observer in self._observers:
                observer.round_finished(round_)

    def finish(self, stop_reason: str = "") -> None:
        """Tells the observers how it ended, so or as the numbers say, and sends all records."""
        call, is_spent = self._call, self._ledger.total_trials >= self._call.max_trials_global
        for state in self._states:
            is_done = is_spent or state.total_trials >= call.max_trials_per_task
            by_itself = StopReason.TRIALS if is_done else StopReason.SPACE_EXHAUSTED
            state.stop_reason = state.stop_reason or stop_reason or by_itself
        reasons = {state.stop_reason for state in self._states}
        if not stop_reason:
            is_spent = is_spent or reasons <= {StopReason.TRIALS, StopReason.NOTHING_TO_TUNE}
            stop_reason = StopReason.TRIALS if is_spent else StopReason.SPACE_EXHAUSTED
        self._take_durations()
        result = self._ledger.result(stop_reason)
        for observer in self._observers:
            observer.tuning_finished(result)
        provenance = self._write_provenance(result)
        self._outbox.put(
            tracking.Message(
                tags={names.TAG_TRIALS_PER_TASK: str(provenance.trials_per_task)},
                artifacts=tracking.whole_records(self._directory),
                remove=f"{names.RECORDS_DIR}/{PARTS_DIR}",
            )
        )

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
        _log.warning("run %s has no latency: %s", self._run.info.run_id, message)
        self._outbox.put(tracking.Message(tags={names.TAG_ERROR: message}))

    def _open_log(self) -> RecordLog:
        """The log of the run, which begins with what the user's database has for this target."""
        target = self._call.target.export()
        earlier = self._call.database_files()
        if earlier is not None:
            warn_of_damage([earlier], earlier.records)
            merge([Database(earlier)], self._records, target=target)
        return RecordLog(self._records, target)

    def _take_durations(self) -> None:
        """Reads MetaSchedule's profiler: what neither it nor the logging took was spent on the search."""
        times, spent = self._times(), self._ledger.durations
        spent.build_s = times["SendToBuilder"]
        spent.run_s = times["SendToRunner"] + times["JoinRunnerFutures"]
        spent.search_s = max(0.0, self._ledger.elapsed_s - spent.build_s - spent.run_s - spent.log_s)

    def _write_provenance(self, result: TuningResult | None = None) -> Provenance:
        """Writes and returns where the records come from: all but the lowering is known, which is the user's."""
        import tvm

        estimated_s = result.estimated_latency_s if result else None
        provenance = Provenance(
            network=self._title,
            from_file=False,
            network_sha256="",
            batch_size=0,
            input_shapes={},
            seed=0,
            layout="",
            dtype="",
            pad_channels="off",
            target=str(self._call.target),
            num_threads=self._device.num_threads,
            lowering_version=_FOREIGN_LOWERING,
            tvm_version=tvm.__version__,
            host=platform.node(),
            measure=self._call.measure_settings(),
            estimated_latency_ms=estimated_s * 1e3 if estimated_s else None,
            trials_per_task=result.total_trials / len(result.tasks) if result else None,
        )
        write_text(self._records / names.PROVENANCE_FILE, json.dumps(asdict(provenance), indent=1))
        return provenance


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
