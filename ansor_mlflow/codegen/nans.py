"""Maxima and minima that keep NaN, as IEEE 754's `maximum` and ONNX Runtime do.

TVM's code generator for LLVM chooses `a > b ? a : b`, which is b where either is NaN: max(x, 0), which is what a
rectifier is in TVM, would make an ordinary number of it. With the operands in the other order, 0 > x ? 0 : x, a
comparison with a constant keeps NaN in as many instructions. So does one with a single element that is an argument, as
which bounds of a Clip arrive. Where both operands may be NaN the first one is looked at, too. Arm has instructions that
keep NaN, which only LLVM's intrinsics ask for.

A running maximum is left as it is, so that the loops of a pooling layer cost what they did: as in ONNX Runtime's
kernels, it is that of what comes after a NaN, and NaN where that is the last; on a GPU, NaN is passed over.
`graphs.operators.extrema` does what ReduceMax and its like need beyond that, and a softmax has a sum that keeps NaN.
"""

from __future__ import annotations

import math
from typing import Any

_ARM = "aarch64"


def with_nans_kept(func: Any, _mod: Any, _context: Any) -> Any:
    """A lowered function whose maxima and minima of floats keep NaN."""
    from tvm.tirx import BufferStore, Max, Min
    from tvm_ffi import structural_mutate

    keep = _intrinsic if _is_for_arm(func) else _Choices(func)
    running: list[Any] = []

    def store(node: Any, mutator: Any) -> Any:
        if _is_running(node):
            running.append(node.value)
        return mutator.default_mutate(node)

    def visit(node: Any, mutator: Any) -> Any:
        is_running = any(node.same_as(value) for value in running)
        node = mutator.default_mutate(node)
        if is_running or "float" not in str(node.ty.dtype):
            return node
        return keep(node, is_max=isinstance(node, Max))

    return func.with_body(structural_mutate(func.body, [(BufferStore, store), (Max, visit), (Min, visit)]))


def _is_for_arm(func: Any) -> bool:
    from ansor_mlflow.device import machine_of, platform_of

    target = func.attrs["target"]
    return platform_of(target).by_llvm and machine_of(target) == _ARM


def _intrinsic(node: Any, *, is_max: bool) -> Any:
    """The instruction that gives a NaN of either operand."""
    from tvm.tirx import call_llvm_pure_intrin

    return call_llvm_pure_intrin(str(node.ty.dtype), "llvm.maximum" if is_max else "llvm.minimum", node.a, node.b)


class _Choices:
    """Makes choices that give a NaN of either operand."""

    def __init__(self, func: Any) -> None:
        from tvm.tirx import AllocBuffer
        from tvm_ffi import structural_walk

        from ansor_mlflow.device import platform_of

        self._own: list[Any] = []
        """Buffers of the function itself."""
        self._by_llvm = platform_of(func.attrs["target"]).by_llvm
        structural_walk(
            func.body, lambda node: self._own.append(node.buffer) if isinstance(node, AllocBuffer) else None
        )

    def __call__(self, node: Any, *, is_max: bool) -> Any:
        from tvm.tirx import Let, Max, Min, Select, Var

        first, second = (node.b, node.a) if self._rank(node.b) > self._rank(node.a) else (node.a, node.b)
        a, b = Var("a", first.ty), Var("b", second.ty)
        if self._rank(first) > self._rank(second):
            if self._by_llvm:
                # LLVM's code generator gives the second operand where either is NaN. A choice with a `Let` would do the
                # same, but TVM's simplifier puts values of `Let` into the conditions above them, again and again: a
                # chain of a few rectifiers took minutes.
                return Max(first, second) if is_max else Min(first, second)
            return Let(b, second, Select(first > b if is_max else first < b, first, b))
        chosen = Select(a.equal(a), Select(a > b if is_max else a < b, a, b), a)
        return Let(a, first, Let(b, second, chosen))

    def _rank(self, value: Any) -> int:
        """Two for a constant other than NaN, one for a bound that is an argument of one element, none for others.

        `graphs.operators.extrema` puts NaN behind the maximum where such an argument is one.
        """
        from tvm.ir import TensorLoad
        from tvm.tirx import Broadcast, FloatImm

        is_vector = isinstance(value, Broadcast)
        value = value.value if is_vector else value
        if isinstance(value, FloatImm):
            return 0 if math.isnan(value.value) else 2
        is_bound = isinstance(value, TensorLoad) and all(int(size) == 1 for size in _sizes(value.source))
        return int(is_bound and not any(value.source.same_as(buffer) for buffer in self._own))


def _sizes(buffer: Any) -> list[int]:
    """The extents of a buffer; 0 for those that depend on values."""
    return [getattr(size, "value", 0) for size in buffer.shape]


def _is_running(store: Any) -> bool:
    """Whether a statement replaces an element by the maximum of it and another value."""
    from tvm.ir import TensorLoad
    from tvm.tirx import Max, Min
    from tvm_ffi import structural_equal

    return isinstance(store.value, (Max, Min)) and any(
        isinstance(operand, TensorLoad)
        and operand.source.same_as(store.buffer)
        and structural_equal(operand.indices, store.indices)
        for operand in (store.value.a, store.value.b)
    )
