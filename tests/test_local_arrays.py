"""Buffers of scope "local" as arrays of the function, which LLVM keeps in registers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ansor_mlflow.codegen import tir_pipeline
from ansor_mlflow.device.targets import resolve_target

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.runtime import Module
    from tvm.target import Target

FROM_POOL = "TVMBackendAllocWorkspace"
"""What takes memory from TVM's pool."""


def sums_in_tiles(columns: int, channels: int = 32) -> IRModule:
    """Products of matrices of 50 × 64 and 64 × channels, in tiles of so many columns, the last of which is narrower."""
    import tvm
    from tvm import te

    data, weight = te.placeholder((7, 50, 64), name="data"), te.placeholder((64, channels), name="weight")
    k = te.reduce_axis((0, 64), "k")
    result = te.compute((7, 50, channels), lambda i, j, c: te.sum(data[i, j, k] * weight[k, c], axis=k), name="product")
    sch = tvm.s_tir.Schedule(te.create_prim_func([data, weight, result]))
    block = sch.get_sblock("product")
    row, column, channel, over = sch.get_loops(block)
    tile, inner = sch.split(column, [None, columns])
    sch.reorder(row, tile, over, inner, channel)
    sch.reverse_compute_at(sch.cache_write(block, 0, "local"), tile)
    sch.unroll(tile)
    sch.unroll(inner)
    sch.vectorize(sch.split(channel, [None, 16])[1])
    sch.parallel(row)
    sch.decompose_reduction(block, over)
    return sch.mod


def built(mod: IRModule, target: Target, passes: str) -> Module:
    from tvm.driver import build

    return build(mod, target=target, pipeline=passes)


def takes_memory(library: Module) -> bool:
    """Whether the function asks for memory while it runs."""
    return FROM_POOL in library.inspect_source("ll")


def call(library: Module, channels: int = 32) -> Any:
    """The result, which is compared with NumPy's."""
    import tvm

    rng = np.random.default_rng(0)
    shapes = ((7, 50, 64), (64, channels), (7, 50, channels))
    arrays = [rng.normal(size=shape).astype("float32") for shape in shapes]
    tensors = [tvm.runtime.tensor(array) for array in arrays]
    library["main"](*tensors)
    expected = arrays[0] @ arrays[1]
    np.testing.assert_allclose(tensors[-1].numpy(), expected, rtol=0, atol=1e-5 * abs(expected).max())
    return tensors[-1].numpy()


def test_the_sums_of_a_tile_are_no_memory(host_target: Target) -> None:
    mod = sums_in_tiles(12)
    plain, ours = (built(mod, host_target, passes) for passes in ("default", tir_pipeline(host_target)))
    assert [takes_memory(library) for library in (plain, ours)] == [True, False]
    np.testing.assert_array_equal(call(ours), call(plain))


def test_large_buffers_come_from_the_pool(host_target: Target) -> None:
    """The stack of a thread is small."""
    library = built(sums_in_tiles(50, channels=48), host_target, tir_pipeline(host_target))
    assert takes_memory(library)
    call(library, channels=48)


@pytest.mark.parametrize("target", ["llvm -mtriple=aarch64-linux-gnu -mcpu=neoverse-n1", "llvm -mcpu=x86-64"])
def test_other_cpus(target: str) -> None:
    resolved = resolve_target(target, 1)
    assert not takes_memory(built(sums_in_tiles(12), resolved, tir_pipeline(resolved)))


def test_graphics_processors_have_the_passes_of_tvm() -> None:
    assert tir_pipeline(resolve_target("cuda -arch=sm_90", 1)) == "default"
