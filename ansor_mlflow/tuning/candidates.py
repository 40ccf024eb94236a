"""The candidates of a task: the space that they come from, those of records, and what becomes of a measured one."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ansor_mlflow.device import import_tensor_intrin, platform_of
from ansor_mlflow.errors import first_line
from ansor_mlflow.lowering import TuningTask
from ansor_mlflow.processes import Outcome
from ansor_mlflow.records import FAILED_RUN_S, RecordText, fields_of
from ansor_mlflow.sketches import gpu_program, has_sums
from ansor_mlflow.trials import Trial, TrialStatus
from ansor_mlflow.workers import RunJob, arg_info

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.s_tir import Schedule
    from tvm.s_tir.meta_schedule import TuneContext
    from tvm.s_tir.meta_schedule.database import Database, TuningRecord, Workload
    from tvm.s_tir.meta_schedule.runner import RunnerResult
    from tvm.s_tir.meta_schedule.search_strategy import MeasureCandidate
    from tvm.s_tir.meta_schedule.space_generator import PostOrderApply
    from tvm.target import Target

_MAX_UNROLL_STEPS = 64
"""Most iterations that a CPU program unrolls. MetaSchedule also tries 512 on x86, and 256 on Arm: such a program takes
several times as long to compile, and a search finds one as fast without (docs/adr/0009-cost-of-a-candidate.md)."""
_TVM_FAILED_RUN_S = 1e10
"""Run time by which MetaSchedule's databases mark a failed trial."""
_STATUS = {"timed_out": TrialStatus.TIMED_OUT, "crashed": TrialStatus.CRASHED}
"""Failures that mean the same in building and in running."""
_log = logging.getLogger("ansor_mlflow")
# MetaSchedule logs every step of a search; what matters of it reaches our observers
_silent_log = logging.getLogger("ansor_mlflow.metaschedule")
_silent_log.setLevel(logging.ERROR)


def make_space_generator(mod: IRModule, target: Target) -> PostOrderApply:
    """MetaSchedule's generator of design spaces, with its own rules for `target` but for what costs more than it finds.

    Constants of functions without sums are not packed. Tensor cores of a GPU are only for functions without
    float32: of programs that sum in that on them, TVM 0.27 makes no code of most.
    """
    from tvm.s_tir.meta_schedule import TuneContext
    from tvm.s_tir.meta_schedule.postproc import RewriteLayout, RewriteTensorize
    from tvm.s_tir.meta_schedule.schedule_rule import (
        MultiLevelTilingTensorCore,
        ParallelizeVectorizeUnroll,
        ScheduleRule,
    )
    from tvm.s_tir.meta_schedule.space_generator import PostOrderApply

    def limited(rule: ScheduleRule) -> ScheduleRule:
        if not isinstance(rule, ParallelizeVectorizeUnroll):
            return rule
        return ParallelizeVectorizeUnroll(
            rule.max_jobs_per_core,
            rule.max_vectorize_extent,
            [steps for steps in rule.unroll_max_steps if steps <= _MAX_UNROLL_STEPS],
            bool(rule.unroll_explicit),
        )

    import_tensor_intrin(target.kind.name)
    # only a generator that belongs to a context knows the rules for its target
    default = TuneContext(mod=mod, target=target, space_generator="post-order-apply").space_generator
    rules, postprocs = list(default.sch_rules), list(default.postprocs)
    if platform_of(target).binds_threads and "float32" in mod.script():
        rules = [rule for rule in rules if not isinstance(rule, MultiLevelTilingTensorCore)]
        postprocs = [each for each in postprocs if not isinstance(each, RewriteTensorize)]
    return PostOrderApply(
        sch_rules=[limited(rule) for rule in rules] if platform_of(target).has_sketches else rules,
        postprocs=[each for each in postprocs if has_sums(mod) or not isinstance(each, RewriteLayout)],
        mutator_probs=dict(default.mutator_probs),
    )


def context_of(task: TuningTask, target: Target, *, mod: IRModule | None = None, **search: Any) -> TuneContext:
    """What MetaSchedule's parts know of a task; `mod` in place of its module, and whatever else a search needs."""
    from tvm.s_tir.meta_schedule import TuneContext

    return TuneContext(
        mod=mod or task.mod,
        target=target,
        space_generator=make_space_generator(task.mod, target),
        task_name=task.info.name,
        logger=_silent_log,
        **search,
    )


def design_spaces(context: TuneContext, task: TuningTask) -> list[Schedule]:
    """The spaces of a task; where TVM has no rules for it, the function alone, or, for a GPU, the program of DLight."""
    from tvm.s_tir import Schedule

    try:
        return list(context.generate_design_space())
    except RuntimeError as err:
        program = gpu_program(task.mod["main"], context.target) if platform_of(context.target).binds_threads else None
        instead = "it is measured as it is" if program is None else "DLight's is measured"
        _log.warning("%s: TVM's rules make no program of it (%s); %s", task.info.name, first_line(err), instead)
        return [program or Schedule(task.mod)]


def candidate_of(record: RecordText, task: TuningTask, target: Target) -> MeasureCandidate | None:
    """The candidate that a record was made of; None where its schedule is none of the task on the target."""
    return _replayed(record, task.mod, context_of(task, target))


def _replayed(record: RecordText, mod: IRModule, context: TuneContext) -> MeasureCandidate | None:
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
    from tvm.s_tir.meta_schedule.runner import RunnerResult

    applying, candidates, results = [], [], []
    for record in records:
        if (candidate := _replayed(record, mod, context)) is not None:
            applying.append(record)
            candidates.append(candidate)
            is_failed = record.run_s >= FAILED_RUN_S
            results.append(RunnerResult(None, "failed") if is_failed else RunnerResult([record.run_s], None))
    return applying, candidates, results


def memory_database(mod: IRModule, records: Sequence[RecordText]) -> Database:
    """A database with these records of a task, where MetaSchedule's search finds programs to start from."""
    from tvm.s_tir.meta_schedule.database import MemoryDatabase

    database = MemoryDatabase()
    workload = database.commit_workload(mod)
    for record in records:
        database.commit_tuning_record(_tuning_record(record, workload))
    return database


def _tuning_record(record: RecordText, workload: Workload) -> TuningRecord:
    import tvm_ffi
    from tvm.s_tir.meta_schedule.database import TuningRecord

    return TuningRecord.from_json(tvm_ffi.get_global_func("ffi.json.Parse")(record.text), workload)


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
    outcome: Outcome[Any] = built if built.value is None else next(measured)
    if outcome.value is None:
        failed = TrialStatus.BUILD_FAILED if outcome is built else TrialStatus.RUN_FAILED
        return Trial(step=step, task=task, status=_STATUS.get(outcome.failure, failed), error=outcome.error)
    return Trial(step=step, task=task, status=TrialStatus.OK, run_s=outcome.value)


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


@contextlib.contextmanager
def _memory_file() -> Iterator[str]:
    descriptor = os.memfd_create("records")  # TVM wants a path, and nothing is to reach a disk
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
