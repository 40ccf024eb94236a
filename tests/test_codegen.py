"""Our passes: sums are those of vectors, small buffers are arrays in registers, and weights are fetched ahead."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from helpers.lanes import every_second

from ansor_mlflow.codegen import PREFETCH, pass_config, tir_pipeline
from ansor_mlflow.codegen import passes as codegen_passes
from ansor_mlflow.device import resolve_target

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.runtime import Module
    from tvm.target import Target


def sums_in_tiles(
    columns: int, channels: int = 32, *, unroll: bool = True, passes: int = 0, is_panel: bool = True
) -> IRModule:
    """Products of matrices of 50 × 64 and 64 × channels, in tiles of so many columns, the last of which is narrower.

    With `passes` the loop over sums fetches what comes after the second matrix, as if it were used so often. Unless
    `is_panel`, it is around another loop, over vectors.
    """
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
    if unroll:
        sch.unroll(tile)
    sch.unroll(inner)
    vector, lane = sch.split(channel, [None, 16])
    sch.vectorize(lane)
    if passes:
        sch.annotate(over, PREFETCH, passes)
        if is_panel:
            sch.unroll(vector)
    sch.parallel(row)
    sch.decompose_reduction(block, over)
    return sch.mod


def built(mod: IRModule, target: Target, passes: str) -> Module:
    from tvm.driver import build

    return build(mod, target=target, pipeline=passes)


def takes_memory(library: Module) -> bool:
    return "TVMBackendAllocWorkspace" in library.inspect_source("ll")  # which takes it from TVM's pool


def call(library: Module, channels: int = 32) -> Any:
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


@pytest.mark.parametrize("name", ["erf", "nearbyint"])
def test_functions_that_tvm_does_not_vectorise_are(
    name: str, host_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LLVM may not find the vectors again in a loop over single elements."""
    import tvm
    from tvm import te

    data = te.placeholder((64,), name="data")
    sch = tvm.s_tir.Schedule(te.create_prim_func([data, te.compute((64,), lambda i: getattr(te, name)(data[i]), "of")]))
    sch.vectorize(sch.split(sch.get_loops(sch.get_sblock("of"))[0], [None, 16])[1])
    lowered = []
    monkeypatch.setattr(codegen_passes, "_with_arrays", lambda func, *_: lowered.append(func.script()) or func)
    with tvm.transform.PassContext(config=pass_config(host_target)):
        built(sch.mod, host_target, tir_pipeline(host_target))
    (text,) = lowered
    assert [line.split()[-1] for line in text.splitlines() if "for " in line] == ["range(4):"]


SUMS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda x: x,
    "max": lambda x: x,
    "min": lambda x: x * 3.0,
    "squares": lambda x: (x - 0.5) * (x - 0.5),
    "exponentials": lambda x: 1 / exp(x * 2.0),
}


def exp(value: Any) -> Any:
    from tvm import te

    return np.exp(value) if isinstance(value, np.ndarray) else te.exp(value)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("length", every_second([16, 197, 31, 15, 64]))
@pytest.mark.parametrize("kind", SUMS)
def test_a_sum_is_one_of_vectors_whatever_its_length(
    kind: str, length: int, stride: int, host_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LLVM keeps the order of a sum's terms, each of which waits for the one before."""
    import tvm
    from tvm import te

    data, k = te.placeholder((5, stride * length), name="data"), te.reduce_axis((0, length), "k")
    reduce = {"max": te.max, "min": te.min}.get(kind, te.sum)
    result = te.compute((5,), lambda i: reduce(SUMS[kind](data[i, stride * k]), axis=k), "result")
    sch = tvm.s_tir.Schedule(te.create_prim_func([data, result]))
    sch.decompose_reduction("result", sch.get_loops("result")[-1])
    vector_sum, changed = codegen_passes._vector_sum, []

    def noted(loop: Any) -> Any:
        changed.append(vector_sum(loop))
        return changed[-1]

    monkeypatch.setattr(codegen_passes, "_vector_sum", noted)
    library = built(sch.mod, host_target, tir_pipeline(host_target))
    assert any(changed) == (stride == 1 and length >= 16)
    array = np.random.default_rng(0).normal(size=(5, stride * length)).astype("float32")
    tensors = tvm.runtime.tensor(array), tvm.runtime.tensor(np.zeros(5, "float32"))
    library["main"](*tensors)
    expected = getattr(np, kind if kind in ("max", "min") else "sum")(SUMS[kind](array[:, ::stride]), axis=1)
    np.testing.assert_allclose(tensors[1].numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize("target", ["llvm -mtriple=aarch64-linux-gnu -mcpu=neoverse-n1", "llvm -mcpu=x86-64"])
def test_other_cpus(target: str) -> None:
    resolved = resolve_target(target, 1)
    assert not takes_memory(built(sums_in_tiles(12), resolved, tir_pipeline(resolved)))


@pytest.mark.parametrize(("columns", "unroll"), [(12, True), (10, False), (50, True)])
@pytest.mark.parametrize("channels", every_second([16, 32, 96]))
def test_the_next_panel_is_fetched_by_all_passes_together(
    columns: int, channels: int, *, unroll: bool, host_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tvm.tirx.analysis import undefined_vars

    places: list[Any] = []
    fetch = codegen_passes.fetch

    def note(buffer: Any, place: Any, caches: int) -> Any:
        places.append(place)
        return fetch(buffer, place, caches)

    monkeypatch.setattr(codegen_passes, "fetch", note)
    passes = -(-50 // columns)
    library = built(
        sums_in_tiles(columns, channels, unroll=unroll, passes=passes), host_target, tir_pipeline(host_target)
    )
    assert "prefetch" in library.inspect_source("asm")
    call(library, channels)
    panel, fetched = 64 * channels, set()
    for place in places:
        extents = {str(var.name): 64 if str(var.name) == "k" else passes for var in undefined_vars(place)}
        assert len(extents) == (1 if unroll else 2)
        for numbers in itertools.product(*map(range, extents.values())):
            first = eval(str(place), dict(zip(extents, numbers, strict=True)))
            fetched |= set(range(first, first + 16))
    assert set(range(panel, 2 * panel)) <= fetched
    assert max(fetched) < 3 * panel


def test_a_loop_around_another_fetches_nothing(host_target: Target) -> None:
    """Its vectors are no panel that it goes through."""
    library = built(sums_in_tiles(12, 64, passes=5, is_panel=False), host_target, tir_pipeline(host_target))
    assert "prefetch" not in library.inspect_source("asm")
    call(library, 64)
