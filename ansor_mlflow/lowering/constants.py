"""Constants folded in NumPy.

TVM's FoldConstant compiles a kernel with LLVM for each call that it evaluates, and nearly all of them only move the
elements of a weight. That is nine tenths of the time of lowering a deep network. It also makes a function of every call
that it only looks at, so that it is left out where nothing is left to fold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import ml_dtypes  # noqa: F401  NumPy knows bfloat16 by it
import numpy as np
from tvm import relax, tirx
from tvm.ir import GenericConst, IRModule, Op
from tvm.ir.transform import PassContext, Sequential, module_pass

from ansor_mlflow.lowering.relax_passes import bound, call_pass, op_name

_TAKE_MODES: dict[str, Literal["raise", "wrap", "clip"]] = {"fast": "clip", "clip": "clip", "wrap": "wrap"}
"""NumPy's name of what becomes of an index beyond the end; what "fast" reads there is not defined."""
_BY_CALL = {
    *("relax.astype", "relax.expand_dims", "relax.permute_dims", "relax.reshape", "relax.shape_to_tensor"),
    "relax.take",
}
_ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "relax.add": np.add,
    "relax.divide": np.divide,
    "relax.isnan": np.isnan,
    "relax.less": np.less,
    "relax.multiply": np.multiply,
    "relax.sqrt": np.sqrt,
    "relax.subtract": np.subtract,
    "relax.where": np.where,
}
"""Operators that NumPy computes to the same bits as a compiled kernel."""


def _is_static(shape: relax.ShapeType) -> bool:
    return shape.values is not None and all(isinstance(extent, tirx.IntImm) for extent in shape.values)


def _computed(name: str, call: relax.Call, args: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any] | None:
    """The result of a call; None where NumPy does not compute it with these attributes."""
    match name:
        case "relax.astype":
            return args[0].astype(str(call.attrs.dtype))
        case "relax.expand_dims" | "relax.reshape":
            return args[0].reshape([int(size) for size in call.ty.shape])
        case "relax.permute_dims":
            axes = call.attrs.axes
            return np.transpose(args[0], None if axes is None else [int(axis) for axis in axes])
        case "relax.shape_to_tensor":
            shape = call.args[0].ty
            return np.asarray([int(extent) for extent in shape.values], "int64") if _is_static(shape) else None
        case "relax.take":
            axis, mode = call.attrs.axis, _TAKE_MODES.get(call.attrs.mode)
            return np.take(args[0], args[1], None if axis is None else int(axis), mode=mode) if mode else None
    result: np.ndarray[Any, Any] = _ELEMENTWISE[name](*args)
    return result


@call_pass("FoldConstantInNumPy")
def fold_constants_in_numpy(mutator: Any, call: relax.Call) -> relax.Expr:
    """Evaluates the simplest calls with constant arguments."""
    name = op_name(call)
    if name == "relax.shape_of" and _is_static(call.ty):
        return relax.ShapeExpr(call.ty.values)
    if name not in _BY_CALL and name not in _ELEMENTWISE:
        return call
    args = [bound(mutator, arg) for arg in call.args if not isinstance(arg.ty, relax.ShapeType)]
    if not all(isinstance(arg, GenericConst) for arg in args):
        return call
    with np.errstate(all="ignore"):
        result = _computed(name, call, [arg.value.numpy() for arg in args])
    if result is None or str(result.dtype) != str(call.ty.dtype):
        return call
    return relax.const(np.asarray(result, order="C"), str(result.dtype))  # else float64 becomes float32


@module_pass(opt_level=0, name="FoldConstantsThatAreLeft")  # type: ignore[untyped-decorator]
def _fold_others(mod: IRModule, _context: PassContext) -> IRModule:
    return relax.transform.FoldConstant()(mod) if _has_constant_call(mod["main"]) else mod


FOLD_CONSTANTS = Sequential([fold_constants_in_numpy, _fold_others])
"""Evaluates calls with constant arguments: the simplest in NumPy, the others with FoldConstant."""


def _has_constant_call(function: relax.Function) -> bool:
    """Whether an operator is called with constants alone, or with nothing."""
    constants, found = set(), []

    def is_constant(arg: relax.Expr) -> bool:
        if isinstance(arg, relax.Tuple):
            return all(is_constant(field) for field in arg)
        return not isinstance(arg, relax.Expr) or arg in constants or not isinstance(arg, relax.Var | relax.Call)

    def visit(expr: relax.Expr) -> None:
        if isinstance(expr, relax.SeqExpr):
            for block in expr.blocks:
                for binding in block.bindings:
                    if isinstance(binding, relax.VarBinding) and isinstance(binding.value, GenericConst):
                        constants.add(binding.var)
        elif isinstance(expr, relax.Call) and isinstance(expr.op, Op) and expr.op.name != "relax.call_tir":
            found.append(expr)

    relax.analysis.post_order_visit(function, visit)
    return any(all(is_constant(arg) for arg in call.args) for call in found)
