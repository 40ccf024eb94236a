"""The space of a search: MetaSchedule's own, but for the limit of unrolling."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ansor_mlflow.device.targets import resolve_target
from ansor_mlflow.device.tvm_import import import_tensor_intrin
from ansor_mlflow.lowering.network import LoweredNetwork
from ansor_mlflow.tuning.candidates import make_space_generator

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.s_tir.meta_schedule.space_generator import PostOrderApply
    from tvm.target import Target


def description(space: PostOrderApply) -> tuple[list[str], list[str], dict[str, float]]:
    return (
        [str(rule) for rule in space.sch_rules],
        [str(postproc) for postproc in space.postprocs],
        {str(mutator): float(probability) for mutator, probability in space.mutator_probs.items()},
    )


def stock_space(mod: IRModule, target: Target) -> PostOrderApply:
    from tvm.s_tir.meta_schedule import TuneContext

    import_tensor_intrin(target.kind.name)  # TVM would import it, too, but slowly
    return TuneContext(mod=mod, target=target, space_generator="post-order-apply").space_generator


@pytest.mark.parametrize(
    ("spec", "stock_steps", "steps"),
    [
        ("llvm -mcpu=haswell", "(0, 16, 64, 512)", "(0, 16, 64)"),
        ("llvm -mcpu=sapphirerapids", "(0, 16, 64, 512)", "(0, 16, 64)"),
        ("llvm -mtriple=aarch64-linux-gnu", "(0, 8, 32, 256)", "(0, 8, 32)"),
    ],
)
def test_cpu_space_is_metaschedules_with_less_unrolling(
    small_lowered: LoweredNetwork, spec: str, stock_steps: str, steps: str
) -> None:
    mod, target = small_lowered.tasks[0].mod, resolve_target(spec, 2)
    rules, postprocs, mutators = description(stock_space(mod, target))
    limited = [rule.replace(f"unroll_max_steps={stock_steps}", f"unroll_max_steps={steps}") for rule in rules]
    assert limited != rules
    assert description(make_space_generator(mod, target)) == (limited, postprocs, mutators)


@pytest.mark.parametrize(("arch", "has_tensor_cores"), [("sm_60", False), ("sm_86", True)])
def test_gpu_space_is_metaschedules_without_tensor_cores_in_32_bits(
    small_lowered: LoweredNetwork, arch: str, has_tensor_cores: bool
) -> None:
    mod, target = small_lowered.tasks[0].mod, resolve_target(f"cuda -arch={arch}", 2)
    rules, postprocs, mutators = description(stock_space(mod, target))
    ours = [rule for rule in rules if "TensorCore" not in rule]
    assert (ours != rules) == has_tensor_cores
    without = [each for each in postprocs if "RewriteTensorize" not in each]
    assert description(make_space_generator(mod, target)) == (ours, without, mutators)
