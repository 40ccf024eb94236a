"""Constants folded in NumPy.

TVM's FoldConstant compiles a kernel with LLVM for each call that it evaluates, and nearly all of them only move the
elements of a weight. That is nine tenths of the time of lowering a deep network.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import ml_dtypes  # noqa: F401  NumPy knows bfloat16 by it
import numpy as np
from tvm import relax
from tvm.ir import GenericConst
from tvm.ir.transform import Pass

from ansor_mlflow.lowering.rewriting import rewrite_main


def _permute_dims(call: relax.Call, data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    axes = call.attrs.axes
    return np.transpose(data, None if axes is None else [int(axis) for axis in axes])


def _reshape(call: relax.Call, data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return data.reshape([int(size) for size in call.ty.shape])


def _astype(call: relax.Call, data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return data.astype(str(call.attrs.dtype))


_BY_CALL: dict[str, Callable[..., Any]] = {
    "relax.astype": _astype,
    "relax.expand_dims": _reshape,
    "relax.permute_dims": _permute_dims,
    "relax.reshape": _reshape,
}
_ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "relax.add": np.add,
    "relax.divide": np.divide,
    "relax.isnan": np.isnan,
    "relax.multiply": np.multiply,
    "relax.sqrt": np.sqrt,
    "relax.subtract": np.subtract,
    "relax.where": np.where,
}
"""Operators that NumPy computes to the same bits as a compiled kernel."""


@relax.expr_functor.mutator
class _Folder(relax.PyExprMutator):  # type: ignore[misc]
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        name = getattr(call.op, "name", "")
        if name not in _BY_CALL and name not in _ELEMENTWISE:
            return call
        args = [self._value(arg) for arg in call.args if not isinstance(arg, relax.ShapeExpr)]
        if any(arg is None for arg in args):
            return call
        function = _ELEMENTWISE.get(name) or functools.partial(_BY_CALL[name], call)
        with np.errstate(all="ignore"):
            result = function(*args)
        if str(result.dtype) != str(call.ty.dtype):
            return call
        return relax.const(np.asarray(result, order="C"))

    def _value(self, arg: relax.Expr) -> np.ndarray[Any, Any] | None:
        """A constant's elements; None for what only a run of the network knows."""
        if isinstance(arg, relax.Var):
            arg = self.lookup_binding(arg)
        return arg.value.numpy() if isinstance(arg, GenericConst) else None


def fold_constants_in_numpy() -> Pass:
    """The pass that evaluates the simplest calls with constant arguments; FoldConstant takes the rest."""
    return rewrite_main("FoldConstantInNumPy", _Folder)
