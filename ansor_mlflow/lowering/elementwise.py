"""Elementwise operators in terms of those that every pass over Relax knows.

ConvertLayout transposes data before and after an operator that it does not know, which is then not fused with the layer
before. It knows maxima and rounding, but neither quantisation nor what TVM makes of ONNX's Clip. What it does know gets
the layout of its first operand, and is transposed where the second has another rank.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from tvm import relax, tirx
from tvm.ir import GenericConst
from tvm.ir.transform import Sequential

from ansor_mlflow.lowering.relax_passes import bound, call_pass, op_name

_BOUNDS: dict[str, Callable[..., relax.Expr]] = {"maximum": relax.op.maximum, "minimum": relax.op.minimum}
"""What takes the place of the functions as which TVM imports the bounds of Clip, by their names."""
_VARIADIC: dict[str, Callable[..., relax.Expr]] = {
    "relax.max": relax.op.maximum,
    "relax.mean": relax.op.add,
    "relax.min": relax.op.minimum,
    "relax.sum": relax.op.add,
}
"""What takes the place of the reductions as which TVM imports Max, Mean, Min and Sum of several tensors."""
_SYMMETRIC = {"relax.add", "relax.maximum", "relax.minimum", "relax.multiply"}
_ORDERED = {"relax.divide", "relax.power", "relax.subtract"}
_MIN_RANK = 4
"""Rank of the data of a convolution over two axes, for which there are layouts."""
_ARITHMETIC = {"relax.add", "relax.multiply", "relax.subtract", "relax.maximum", "relax.minimum", "relax.nn.relu"}
_QUANTIZED = {"int8", "int16", "int32", "uint8", "uint16"}


@call_pass("ExpandElementwise")
def _expand(mutator: Any, call: relax.Call) -> relax.Expr:  # noqa: PLR0911
    match op_name(call):
        case "relax.call_tir":
            return _bounded(mutator, call)
        case "relax.clip":
            data, low, high = call.args
            return _clipped(data, float(low.value), float(high.value), _dtype(data))
        case "relax.nn.leakyrelu":
            data, dtype = call.args[0], _dtype(call.args[0])
            zero, slope = relax.const(0, dtype), relax.const(call.attrs.alpha, dtype)
            negative = relax.op.multiply(slope, relax.op.minimum(data, zero))
            return relax.op.add(relax.op.maximum(data, zero), negative)
        case "relax.dequantize" if _dtype(call.args[0]) in _QUANTIZED:
            return _dequantized(call)
        case "relax.quantize" if call.attrs.out_dtype in _QUANTIZED:
            return _quantized(call, is_computed=op_name(bound(mutator, call.args[0])) in _ARITHMETIC)
        case name if name in _VARIADIC:
            return _pairwise(mutator, call)
    return call


EXPAND_ELEMENTWISE = Sequential([_expand, relax.transform.DeadCodeElimination(["main"])])
"""Replaces bounds, leaky rectifiers and quantisations by arithmetic, and drops functions that nothing calls then."""


def _pairwise(mutator: Any, call: relax.Call) -> relax.Expr:
    """Operations on two of the tensors that the importer gave one shape and stacked; no other operator stacks."""
    stack = bound(mutator, call.args[0])
    if op_name(stack) != "relax.stack":
        return call
    tensors = [
        operand.args[0] if op_name(operand := bound(mutator, field)) == "relax.broadcast_to" else field
        for field in bound(mutator, stack.args[0])
    ]
    combine = _VARIADIC[call.op.name]
    result = functools.reduce(lambda first, second: mutator.builder_.normalize(combine(first, second)), tensors)
    if [int(size) for size in result.ty.shape] != [int(size) for size in call.ty.shape]:
        return call
    if call.op.name != "relax.mean":
        return result
    return relax.op.divide(result, relax.const(len(tensors), _dtype(call)))


def _bounded(mutator: Any, call: relax.Call) -> relax.Expr:
    """A bound of Clip: an argument, or before version 11 of ONNX's operators a number in the function."""
    callee, arguments = call.args[:2]
    limit = _BOUNDS.get(callee.name_hint.rstrip("0123456789"))
    if limit is None:
        return call
    data, *bounds = arguments
    return limit(data, *bounds or [relax.const(_number(mutator.mod[callee]), _dtype(data))])


def _quantized(call: relax.Call, *, is_computed: bool) -> relax.Expr:
    """saturate(round(x / scale) + zero point), ties to even, as ONNX's QuantizeLinear.

    What was computed is multiplied by 1 / scale, as runtimes do with sums of products of 8 bits: a division takes 16
    times as long, and what is half-way between two steps then is so by chance. An image may be by design.
    """
    known_scale, known_zero = (_value_of(parameter) for parameter in call.args[1:3])
    is_computed &= known_scale is not None and bool((known_scale >= np.finfo(np.float32).smallest_normal).all())
    if is_computed:
        assert known_scale is not None
        call = relax.Call(call.op, [call.args[0], relax.const(1 / known_scale), call.args[2]], call.attrs)
    data, scale, zero_point = _operands(call)
    dtype, quantized = _dtype(call.args[1]), str(call.attrs.out_dtype)
    if _dtype(data) != dtype:
        data = relax.op.astype(data, dtype)
    if known_scale is None or (known_scale != 1).any():
        divide = relax.op.multiply if is_computed else relax.op.divide
        data = divide(data, scale)
    shifted = relax.op.round(data)
    if known_zero is None or known_zero.any():
        shifted = relax.op.add(shifted, relax.op.astype(zero_point, dtype))
    limits = np.iinfo(quantized)
    return relax.op.astype(_clipped(shifted, limits.min, limits.max, dtype), quantized)


def _value_of(parameter: relax.Expr) -> np.ndarray[Any, Any] | None:
    """What a constant is; None of others."""
    return parameter.value.numpy() if isinstance(parameter, GenericConst) else None


def _dequantized(call: relax.Call) -> relax.Expr:
    """(x − zero point) · scale, as ONNX's DequantizeLinear."""
    data, scale, zero_point = _operands(call)
    dtype, dequantized = _dtype(call.args[1]), str(call.attrs.out_dtype)
    steps = relax.op.subtract(relax.op.astype(data, "int32"), relax.op.astype(zero_point, "int32"))
    product = relax.op.multiply(relax.op.astype(steps, dtype), scale)
    return product if dequantized == dtype else relax.op.astype(product, dequantized)


def _operands(call: relax.Call) -> tuple[relax.Expr, relax.Expr, relax.Expr]:
    """The data, and scale and zero point in a shape that broadcasts to it."""
    data, *parameters = call.args
    rank, axis = data.ty.ndim, call.attrs.axis

    def broadcast(parameter: relax.Expr) -> relax.Expr:
        if math.prod(map(int, parameter.ty.shape)) == 1:
            return relax.op.reshape(parameter, ())
        return relax.op.reshape(parameter, [-1 if index == axis % rank else 1 for index in range(rank)])

    scale, zero_point = map(broadcast, parameters)
    return data, scale, zero_point


@call_pass("ConstantsSecond")
def constants_second(mutator: Any, call: relax.Call) -> relax.Expr:
    """Makes constants the second operands, of the rank of the result: a layout is that of data then."""
    name = op_name(call)
    if name not in _SYMMETRIC | _ORDERED or call.ty.ndim < _MIN_RANK:
        return call
    first, second = call.args
    before, after = (_of_rank(mutator, operand, call.ty.ndim) for operand in (first, second))
    if (before is None) == (after is None):
        return call
    if after is not None:
        return relax.Call(call.op, [first, after], call.attrs)
    if name in _SYMMETRIC:
        return relax.Call(call.op, [second, before], call.attrs)
    if name == "relax.subtract" and "float" in _dtype(call):
        return relax.op.add(mutator.builder_.normalize(relax.op.negative(second)), before)
    return call


def _of_rank(mutator: Any, operand: relax.Expr, rank: int) -> relax.Expr | None:
    """A constant with ones before its shape, or as it is where it is a number; None for what is no constant."""
    constant = bound(mutator, operand)
    if not isinstance(constant, GenericConst):
        return None
    values = constant.value.numpy()
    if values.ndim in (0, rank):
        return operand
    return relax.const(values.reshape(*[1] * (rank - values.ndim), *values.shape), str(values.dtype))


def _clipped(data: relax.Expr, low: float, high: float, dtype: str) -> relax.Expr:
    return relax.op.minimum(relax.op.maximum(data, relax.const(low, dtype)), relax.const(high, dtype))


def _dtype(tensor: relax.Expr) -> str:
    return str(tensor.ty.dtype)


def _number(function: tirx.PrimFunc) -> float:
    """The number that a function which holds a bound compares every element with."""
    statement = function.body
    while not isinstance(statement, tirx.BufferStore):
        statement = statement.block if hasattr(statement, "block") else statement.body
    return float(statement.value.b.value)
