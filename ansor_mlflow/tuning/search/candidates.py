"""What becomes of a measured candidate: a trial for observers, a result for the search, a record for the log."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from ansor_mlflow.lowering import TuningTask
from ansor_mlflow.processes import Outcome
from ansor_mlflow.records import FAILED_RUN_S, RecordText, fields_of
from ansor_mlflow.trials import Trial, TrialStatus
from ansor_mlflow.workers import RunJob, arg_info

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.s_tir.meta_schedule import TuneContext
    from tvm.s_tir.meta_schedule.database import Database, TuningRecord, Workload
    from tvm.s_tir.meta_schedule.runner import RunnerResult
    from tvm.s_tir.meta_schedule.search_strategy import MeasureCandidate
    from tvm.target import Target

_TVM_FAILED_RUN_S = 1e10
"""Run time by which MetaSchedule's databases mark a failed trial."""
_STATUS = {"timed_out": TrialStatus.TIMED_OUT, "crashed": TrialStatus.CRASHED}
"""Failures that mean the same in building and in running."""


def run_jobs(
    candidates: Sequence[MeasureCandidate], built: Sequence[Outcome[Path]], task: TuningTask, best_s: float | None
) -> list[RunJob]:
    """What is to be measured of a task's candidates: those that could be built."""
    return [
        RunJob(
            outcome.value,
            tuple(arg_info(info) for info in candidate.args_info),
            task=task.info.name,
            constants=task.constants,
            best_s=best_s,
        )
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


def log_lines(
    mod: IRModule, target: Target, candidates: Sequence[MeasureCandidate], run_secs: Sequence[Sequence[float]]
) -> tuple[str, list[RecordText]]:
    """Measured candidates of a task as they stand in a log: the workload's line, and a record for each.

    TVM's own database writes the text, into memory. A trial without seconds per call is a failed one.
    """
    from tvm.s_tir.meta_schedule.database import JSONDatabase, TuningRecord

    times = [list(seconds) or [_TVM_FAILED_RUN_S] for seconds in run_secs]
    with _memory_file() as workload_file, _memory_file() as record_file:
        database = JSONDatabase(workload_file, record_file)
        workload = database.commit_workload(mod)
        for candidate, seconds in zip(candidates, times, strict=True):
            database.commit_tuning_record(
                TuningRecord(candidate.sch.trace, workload, seconds, target, list(candidate.args_info))
            )
        lines = Path(record_file).read_text().splitlines()
        texts = [RecordText(fmean(seconds), fields_of(line)) for seconds, line in zip(times, lines, strict=True)]
        return Path(workload_file).read_text().strip(), texts


def memory_database(mod: IRModule, records: Sequence[RecordText]) -> Database:
    """A database with these records of a task, where MetaSchedule's search finds programs to start from."""
    from tvm.s_tir.meta_schedule.database import MemoryDatabase

    database = MemoryDatabase()
    workload = database.commit_workload(mod)
    for record in records:
        database.commit_tuning_record(_tuning_record(record, workload))
    return database


def replay(record: RecordText, mod: IRModule, context: TuneContext) -> MeasureCandidate | None:
    """The candidate that a record was made of; None where its schedule does not apply."""
    from tvm.s_tir import Schedule
    from tvm.s_tir.meta_schedule.database import Workload
    from tvm.s_tir.meta_schedule.search_strategy import MeasureCandidate

    try:
        tuning_record = _tuning_record(record, Workload(mod))
        schedule = Schedule(mod)
        tuning_record.trace.apply_to_schedule(schedule, remove_postproc=True)
        schedule.enter_postproc()
        if not all(postproc.apply(schedule) for postproc in context.space_generator.postprocs):
            return None
        return MeasureCandidate(schedule, list(tuning_record.args_info))
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError):
        return None


def replay_all(
    records: Sequence[RecordText], mod: IRModule, context: TuneContext
) -> tuple[list[RecordText], list[MeasureCandidate], list[RunnerResult]]:
    """The records of a task that apply, the candidates that they were made of, and their results, one for each."""
    replayed = [(record, replay(record, mod, context)) for record in records]
    applying = [(record, candidate) for record, candidate in replayed if candidate is not None]
    return (
        [record for record, _ in applying],
        [candidate for _, candidate in applying],
        [_result_of(record) for record, _ in applying],
    )


def _result_of(record: RecordText) -> RunnerResult:
    from tvm.s_tir.meta_schedule.runner import RunnerResult

    return RunnerResult(None, "failed") if record.run_s >= FAILED_RUN_S else RunnerResult([record.run_s], None)


def _tuning_record(record: RecordText, workload: Workload) -> TuningRecord:
    import tvm_ffi
    from tvm.s_tir.meta_schedule.database import TuningRecord

    return TuningRecord.from_json(tvm_ffi.get_global_func("ffi.json.Parse")(record.text), workload)


@contextlib.contextmanager
def _memory_file() -> Iterator[str]:
    """The path of an empty file that is nowhere on a disk."""
    descriptor = os.memfd_create("records")
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
