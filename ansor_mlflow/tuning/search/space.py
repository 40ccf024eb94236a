"""The space that a search explores: MetaSchedule's own, without what costs more than it finds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ansor_mlflow.device import import_tensor_intrin, is_cpu, is_gpu
from ansor_mlflow.sketches import has_sums

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.s_tir.meta_schedule.space_generator import PostOrderApply
    from tvm.target import Target

_MAX_UNROLL_STEPS = 64
"""Most iterations that a CPU program unrolls. MetaSchedule also tries 512 on x86, and 256 on Arm: such a program takes
several times as long to compile, and a search finds one as fast without (docs/adr/0009-cost-of-a-candidate.md)."""


def make_space_generator(mod: IRModule, target: Target) -> PostOrderApply:
    """MetaSchedule's generator of design spaces, with its own rules for `target` but a lower limit of unrolling.

    Constants of functions without sums are not packed. Tensor cores of a GPU are only for functions without
    float32: of programs that sum in that on them, TVM 0.27 makes no code of most.

    Args:
        mod: Module of the task, with one function "main".
        target: Device that is tuned for; the limit is for CPUs.
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
