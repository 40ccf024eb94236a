"""The space that a search explores: MetaSchedule's own, without what costs more than it finds."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from ansor_mlflow.device import import_tensor_intrin, is_cpu, is_gpu
from ansor_mlflow.errors import first_line
from ansor_mlflow.lowering import TuningTask
from ansor_mlflow.records import RecordText
from ansor_mlflow.sketches import gpu_program, has_sums
from ansor_mlflow.tuning.search.candidates import replay

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.s_tir import Schedule
    from tvm.s_tir.meta_schedule import TuneContext
    from tvm.s_tir.meta_schedule.search_strategy import MeasureCandidate
    from tvm.s_tir.meta_schedule.space_generator import PostOrderApply
    from tvm.target import Target

_MAX_UNROLL_STEPS = 64
"""Most iterations that a CPU program unrolls. MetaSchedule also tries 512 on x86, and 256 on Arm: such a program takes
several times as long to compile, and a search finds one as fast without (docs/adr/0009-cost-of-a-candidate.md)."""
_log = logging.getLogger("ansor_mlflow")


def make_space_generator(mod: IRModule, target: Target) -> PostOrderApply:
    """MetaSchedule's generator of design spaces, with its own rules for `target` but a lower limit of unrolling.

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
    if is_gpu(target) and "float32" in mod.script():
        rules = [rule for rule in rules if not isinstance(rule, MultiLevelTilingTensorCore)]
        postprocs = [each for each in postprocs if not isinstance(each, RewriteTensorize)]
    return PostOrderApply(
        sch_rules=[limited(rule) for rule in rules] if is_cpu(target) else rules,
        postprocs=[each for each in postprocs if has_sums(mod) or not isinstance(each, RewriteLayout)],
        mutator_probs=dict(default.mutator_probs),
    )


def applies(record: RecordText, task: TuningTask, target: Target) -> bool:
    """Whether a record's schedule is one of the task on the target."""
    return candidate_of(record, task, target) is not None


def candidate_of(record: RecordText, task: TuningTask, target: Target) -> MeasureCandidate | None:
    """The program that a record was made of; None where its schedule is none of the task on the target."""
    return replay(record, task.mod, context_of(task, target))


def context_of(task: TuningTask, target: Target, *, mod: IRModule | None = None, **search: Any) -> TuneContext:
    """What MetaSchedule's parts know of a task; `mod` in place of its module, and whatever else a search needs."""
    from tvm.s_tir.meta_schedule import TuneContext

    return TuneContext(
        mod=mod or task.mod,
        target=target,
        space_generator=make_space_generator(task.mod, target),
        task_name=task.info.name,
        logger=_silent_logger(),
        **search,
    )


def design_spaces(context: TuneContext, task: TuningTask) -> list[Schedule]:
    """The spaces of a task; where TVM has no rules for it, the function alone, or, for a GPU, the program of DLight."""
    from tvm.s_tir import Schedule

    try:
        return list(context.generate_design_space())
    except RuntimeError as err:
        program = gpu_program(task.mod["main"], context.target) if is_gpu(context.target) else None
        instead = "it is measured as it is" if program is None else "DLight's is measured"
        _log.warning("%s: TVM's rules make no program of it (%s); %s", task.info.name, first_line(err), instead)
        return [program or Schedule(task.mod)]


def _silent_logger() -> Any:
    """MetaSchedule logs every step of a search; what matters of it reaches our observers."""
    logger = logging.getLogger("ansor_mlflow.metaschedule")
    logger.setLevel(logging.ERROR)
    return logger
