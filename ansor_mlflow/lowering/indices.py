"""Indices from a network's inputs, kept from pointing outside of a tensor, and axes that count from the front.

ONNX makes such an index an error; TVM's kernels read, and for a scatter write, whatever memory it points to.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import relax, tirx
from tvm.ir import GenericConst
from tvm.ir.transform import Pass

from ansor_mlflow.lowering.relax_passes import rewrite_main

_ALONG_AXIS = {"relax.gather_elements", "relax.scatter_elements"}
_COORDINATES = {"relax.gather_nd", "relax.scatter_nd"}
_FROM_THE_END = {"relax.scatter_elements"}
"""Operators that take negative indices; for the others TVM's importer makes them positive."""


@relax.expr_functor.mutator
class _Bounder(relax.PyExprMutator):  # type: ignore[misc]
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        name = getattr(call.op, "name", "")
        if name == "relax.take" and call.attrs.mode == "fast":
            return self._bounded_take(call)
        if name in _ALONG_AXIS | _COORDINATES and (sizes := _sizes(call)) is not None:
            return self._clamped(call, sizes)
        return call

    def _bounded_take(self, call: relax.Call) -> relax.Expr:
        data, indices = call.args
        sizes = _sizes(call)
        if sizes is not None and self._are_within(indices, 0, sizes - 1):
            return call
        return relax.op.take(data, indices, call.attrs.axis, "nan" if "float" in str(data.ty.dtype) else "clip")

    def _clamped(self, call: relax.Call, sizes: np.ndarray[Any, Any]) -> relax.Expr:
        data, indices, *rest = call.args
        lowest, highest = -sizes if call.op.name in _FROM_THE_END else 0 * sizes, sizes - 1
        if self._are_within(indices, lowest, highest):
            return call
        dtype = str(indices.ty.dtype)
        nearest = relax.op.minimum(relax.op.maximum(indices, relax.const(lowest, dtype)), relax.const(highest, dtype))
        return relax.Call(call.op, [data, self.builder_.normalize(nearest), *rest], call.attrs)

    def _are_within(self, indices: relax.Expr, lowest: Any, highest: Any) -> bool:
        """Whether they are constants, and these are."""
        if isinstance(indices, relax.Var):
            indices = self.lookup_binding(indices)
        if not isinstance(indices, GenericConst):
            return False
        values = indices.value.numpy()
        return bool(((lowest <= values) & (values <= highest)).all())


def bound_indices() -> Pass:
    """The pass that makes an index outside of a tensor harmless, wherever indices are no constants inside of it.

    Gather gives NaN for it, everything else takes the nearest inside. A tensor that does not hold floats has no NaN, so
    Gather takes the nearest there, too.
    """
    return rewrite_main("BoundIndices", _Bounder)


def _sizes(call: relax.Call) -> np.ndarray[Any, Any] | None:
    """Sizes of the axes that indices point along: a number, or one for each coordinate; None where they are dynamic."""
    data, indices, *_ = call.args
    if data.ty.shape is None or not all(isinstance(size, tirx.IntImm) for size in data.ty.shape):
        return None
    sizes = np.array([int(size) for size in data.ty.shape])
    if call.op.name not in _COORDINATES:
        return sizes[call.attrs.axis]  # type: ignore[no-any-return]
    first = getattr(call.attrs, "batch_dims", 0)
    return sizes[first : first + int(indices.ty.shape[-1])]


@relax.expr_functor.mutator
class _Squeezes(relax.PyExprMutator):  # type: ignore[misc]
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        if getattr(call.op, "name", "") != "relax.squeeze" or call.attrs.axis is None:
            return call
        data = call.args[0]
        return relax.op.squeeze(data, [int(axis) % data.ty.ndim for axis in call.attrs.axis])


def positive_squeeze_axes() -> Pass:
    """The pass that gives every squeeze axes from the front: ConvertLayout crashes on those from the end."""
    return rewrite_main("PositiveSqueezeAxes", _Squeezes)
