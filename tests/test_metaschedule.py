"""Scripts that call MetaSchedule's own tuner can use our builder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ansor_mlflow.device.tvm_import import import_tensor_intrin
from ansor_mlflow.workers.builder import LocalBuilder, as_metaschedule_builder

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.target import Target


def matmul() -> IRModule:
    from tvm import IRModule, te

    left, right = te.placeholder((64, 64), name="left"), te.placeholder((64, 64), name="right")
    k = te.reduce_axis((0, 64), name="k")
    product = te.compute((64, 64), lambda i, j: te.sum(left[i, k] * right[k, j], axis=k))
    return IRModule({"main": te.create_prim_func([left, right, product])})


def unbuildable() -> IRModule:
    """A module with a variable that nothing defines."""
    from tvm import IRModule, te
    from tvm.tirx import Var

    data = te.placeholder((64,), name="data")
    result = te.compute((64,), lambda i: data[i] + Var("undefined", "float32"), name="result")
    return IRModule({"main": te.create_prim_func([data, result])})


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


def test_results_have_an_artifact_or_an_error(builder: LocalBuilder, host_target: Target) -> None:
    from tvm.s_tir.meta_schedule.builder import BuilderInput

    adapter = as_metaschedule_builder(builder)
    mods = [matmul(), unbuildable(), matmul()]
    first, second, third = adapter.build([BuilderInput(mod, host_target) for mod in mods])
    assert second.artifact_path is None
    assert str(second.error_msg).startswith("failed: ")
    assert "undefined" in str(second.error_msg)
    paths = [Path(str(result.artifact_path)) for result in (first, third)]
    assert first.error_msg is third.error_msg is None
    assert all(path.is_file() for path in paths)
    assert paths[0].parent != paths[1].parent, "TVM removes the whole directory of an artifact that it has measured"
