"""The space of a search is MetaSchedule's own but for the limit of unrolling, and its tuner can use our builder."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ansor_mlflow.device.targets import import_tensor_intrin, resolve_target
from ansor_mlflow.lowering.network import LoweredNetwork
from ansor_mlflow.tuning.candidates import make_space_generator
from ansor_mlflow.workers.builder import LocalBuilder, as_metaschedule_builder

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


@pytest.mark.system
@pytest.mark.parametrize(
    ("arch", "has_tensor_cores"), [pytest.param("sm_60", False, marks=pytest.mark.nightly), ("sm_86", True)]
)
def test_gpu_space_is_metaschedules_without_tensor_cores_in_32_bits(
    small_lowered: LoweredNetwork, arch: str, has_tensor_cores: bool
) -> None:
    mod, target = small_lowered.tasks[0].mod, resolve_target(f"cuda -arch={arch}", 2)
    rules, postprocs, mutators = description(stock_space(mod, target))
    ours = [rule for rule in rules if "TensorCore" not in rule]
    assert (ours != rules) == has_tensor_cores
    without = [each for each in postprocs if "RewriteTensorize" not in each]
    assert description(make_space_generator(mod, target)) == (ours, without, mutators)


ONE_AFTER_THE_OTHER = """
from ansor_mlflow.device.targets import import_tensor_intrin
from tvm.s_tir import TensorIntrin
of_gpu, of_cpu = "wmma_sync_16x16x16_f16f16f32", "dot_16x4_vnni"
package = import_tensor_intrin("llvm")
assert TensorIntrin.get(of_cpu, allow_missing=True) is not None
assert TensorIntrin.get(of_gpu, allow_missing=True) is None
assert not hasattr(package, "cuda")
assert import_tensor_intrin("cuda") is package
assert TensorIntrin.get(of_gpu, allow_missing=True) is not None
from tvm.s_tir.tensor_intrin.cuda import get_wmma_load_intrin
"""


@pytest.mark.nightly
def test_a_process_that_worked_for_a_cpu_can_work_for_a_gpu() -> None:
    subprocess.run([sys.executable, "-c", ONE_AFTER_THE_OTHER], check=True)


def matmul() -> IRModule:
    from tvm import IRModule, te

    left, right = te.placeholder((64, 64), name="left"), te.placeholder((64, 64), name="right")
    k = te.reduce_axis((0, 64), name="k")
    product = te.compute((64, 64), lambda i, j: te.sum(left[i, k] * right[k, j], axis=k))
    return IRModule({"main": te.create_prim_func([left, right, product])})


@pytest.fixture
def builder(host_target: Target) -> Iterator[LocalBuilder]:
    with contextlib.closing(LocalBuilder(host_target, max_workers=2, timeout_s=60)) as builder:
        yield builder


@pytest.mark.nightly
def test_tvms_own_tuner_builds_with_it(builder: LocalBuilder, host_target: Target, tmp_path: Path) -> None:
    from tvm.s_tir import meta_schedule as ms

    import_tensor_intrin("llvm")
    database = ms.tune_tir(
        matmul(),
        host_target,
        str(tmp_path),
        max_trials_global=8,
        num_trials_per_iter=8,
        builder=as_metaschedule_builder(builder),
    )
    times = [float(seconds) for record in database.get_all_tuning_records() for seconds in record.run_secs]
    assert len(times) >= 8
    assert all(0 < seconds < 1 for seconds in times)
