"""Operators on 8 bits as those on floats between DequantizeLinear and QuantizeLinear, and on integers as exact floats.

The first are ONNX's and those that ONNX Runtime's quantiser writes with `QuantFormat.QOperator`
(https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md). The second are what dynamic quantisation
writes: sums of products of 8 bits. A float32 holds those of a few hundred products exactly. A float64 holds all; but
where the sum is made a float32 next, float32 has the precision that is wanted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from ansor_mlflow.graphs.editor import GraphEditor, Rewriting, Rewritings, Unchanged
from ansor_mlflow.graphs.walk import attributes_of, input_of

_MICROSOFT = "com.microsoft"
_EXACT = 2**24
"""Integers up to here are exact in float32."""
_MAX_FACTOR = 255
"""Largest difference of two numbers of 8 bits."""
_INTEGERS = (np.uint8, np.int8, np.uint16, np.int16)
PACK = 4
"""Products that the instruction adds to a sum."""
_CONV_RANKS = (3, 4, 5)
_ARITHMETIC = ("Add", "Clip", "Conv", "Gemm", "MatMul", "Mul", "Relu", "Sub")
_SCALED = ("Add", "Mul", "Relu")
"""What a factor goes through."""
_SIGN = 128
"""What makes an unsigned byte of a signed one."""
_POOL = ("auto_pad", "ceil_mode", "count_include_pad", "kernel_shape", "pads", "strides")
_Array = np.ndarray[Any, Any]
_Compute = Callable[[onnx.NodeProto, GraphEditor, list[str]], str]


def _quantized(compute: _Compute, starts: Sequence[int], result: int) -> Rewriting:
    """A rewriting of an operator whose inputs are tensors, each followed by its scale and zero point.

    The tensors are at the positions `starts`, and the scale of the output, which its zero point follows, at `result`.
    `compute` puts in the operator on floats, and returns its output.
    """

    def rewriting(node: onnx.NodeProto, graph: GraphEditor) -> None:
        tensors = [graph.emit("DequantizeLinear", *_present(node, start, 3)) for start in starts]
        output = compute(node, graph, tensors)
        graph.emit("QuantizeLinear", output, *_present(node, result, 2), output=node.output[0])

    return rewriting


def _same(op_type: str, *kept: str) -> _Compute:
    """The operator of that name, with those of the node's attributes that are named; channels are not the last axis."""

    def compute(node: onnx.NodeProto, graph: GraphEditor, tensors: list[str]) -> str:
        attributes = attributes_of(node)
        if attributes.get("channels_last"):
            raise Unchanged
        return graph.emit(op_type, *tensors, **{name: value for name, value in attributes.items() if name in kept})

    return compute


def _conv(node: onnx.NodeProto, graph: GraphEditor) -> None:
    """Weights are quantised by their first axis, and the bias with the product of both scales."""
    attributes = attributes_of(node)
    if attributes.pop("channels_last", 0):  # which ONNX Runtime's own operator has
        raise Unchanged
    data = graph.emit("DequantizeLinear", *_present(node, 0, 3))
    weight = graph.emit("DequantizeLinear", *_present(node, 3, 3), axis=0)
    inputs = [data, weight]
    if bias := input_of(node, 8):
        values, scale, weight_scale = (graph.value(name) for name in (bias, node.input[1], node.input[4]))
        inputs.append(graph.constant((values * np.float64(scale) * weight_scale).astype(np.float32)))
    output = graph.emit("Conv", *inputs, **attributes)
    graph.emit("QuantizeLinear", output, *_present(node, 6, 2), output=node.output[0])


def _gemm(node: onnx.NodeProto, graph: GraphEditor) -> None:
    """ONNX Runtime's Gemm: the bias is quantised with α and both scales; without an output's scale it gives floats."""
    attributes = attributes_of(node)
    alpha, transposed = attributes.get("alpha", 1.0), attributes.get("transB", 0)
    a_scale, b_scale = graph.value(node.input[1]), graph.value(node.input[4])
    a = graph.emit("DequantizeLinear", *_present(node, 0, 3))
    b = graph.emit("DequantizeLinear", *_present(node, 3, 3), axis=0 if transposed else 1)
    inputs = [a, b]
    if bias := input_of(node, 6):
        inputs.append(graph.constant((graph.value(bias) * (alpha * np.float64(a_scale) * b_scale)).astype(np.float32)))
    output = graph.emit("Gemm", *inputs, alpha=alpha, transA=attributes.get("transA", 0), transB=transposed)
    if input_of(node, 7):
        graph.emit("QuantizeLinear", output, *_present(node, 7, 2), output=node.output[0])
    else:
        graph.emit("Identity", output, output=node.output[0])


def _concat(node: onnx.NodeProto, graph: GraphEditor) -> None:
    parts = [graph.emit("DequantizeLinear", *node.input[at : at + 3]) for at in range(2, len(node.input), 3)]
    output = graph.emit("Concat", *parts, axis=attributes_of(node)["axis"])
    graph.emit("QuantizeLinear", output, *node.input[:2], output=node.output[0])


def _reduced(node: onnx.NodeProto, graph: GraphEditor, tensors: list[str]) -> str:
    axes, keepdims = attributes_of(node).get("axes"), attributes_of(node).get("keepdims", 1)
    if graph.opset >= 18:
        raise Unchanged
    return graph.emit("ReduceMean", *tensors, axes=axes, keepdims=keepdims)


def _softmax(node: onnx.NodeProto, graph: GraphEditor, tensors: list[str]) -> str:
    """Before version 13 of ONNX's operators, all axes from the given one on are one."""
    attributes, shape = attributes_of(node), graph.shape(node.input[0])
    axis = attributes.get("axis", -1)
    if attributes.get("opset", graph.opset) < 13 and axis % len(shape) != len(shape) - 1:
        raise Unchanged
    return graph.emit("Softmax", *tensors, axis=axis)


def _integer_product(node: onnx.NodeProto, graph: GraphEditor) -> None:
    """MatMulInteger and ConvInteger: the products of what is left of the zero points, as int32."""
    shape = graph.shape(node.input[1])
    num_products = math.prod(shape[1:]) if node.op_type == "ConvInteger" else shape[max(0, len(shape) - 2)]
    is_exact = num_products * _MAX_FACTOR**2 < _EXACT
    product = _product(node, graph, TensorProto.FLOAT if is_exact else TensorProto.DOUBLE)
    graph.emit("Cast", product, to=TensorProto.INT32, output=node.output[0])


def _product(node: onnx.NodeProto, graph: GraphEditor, dtype: int) -> str:
    """Puts in the product of MatMulInteger or ConvInteger on floats."""
    rank, weight_rank = (len(graph.shape(name)) for name in node.input[:2])
    if not rank:
        raise Unchanged
    is_conv = node.op_type == "ConvInteger"
    factors = []
    for position, axis in ((0, rank - 2), (1, 0 if is_conv else weight_rank - 1)):
        zero_point = input_of(node, position + 2)
        shape, factor_rank = graph.shape(zero_point) if zero_point else (), rank if position == 0 else weight_rank
        if len(shape) > 1:
            raise Unchanged
        is_vector = max(shape, default=1) > 1
        broadcast = [shape[0] if place == axis else 1 for place in range(factor_rank)] if is_vector else []
        names = [node.input[position], *filter(None, [zero_point])]
        if all(map(graph.is_constant, names)):  # a constant is known for what it is, as to `channel_padding`
            value, *zero = (graph.value(name).astype(helper.tensor_dtype_to_np_dtype(dtype)) for name in names)
            factors.append(graph.constant(value - zero[0].reshape(broadcast) if zero else value))
            continue
        factor = graph.emit("Cast", node.input[position], to=dtype)
        if zero_point:
            offset = graph.emit("Cast", graph.reshape(zero_point, broadcast), to=dtype)
            factor = graph.emit("Sub", factor, offset)
        factors.append(factor)
    return graph.emit("Conv", *factors, **attributes_of(node)) if is_conv else graph.emit("MatMul", *factors)


def _cast(node: onnx.NodeProto, graph: GraphEditor) -> None:
    """An integer product, with a bias or not, of which nothing but a float32 is made: floats from the beginning."""
    name, bias = node.input[0], ""
    total = graph.producer(name)
    if total is not None and total.op_type == "Add" and len(graph.consumers(name)) == 1:
        places = [place for place, term in enumerate(total.input) if _is_integer_product(graph.producer(term))]
        if len(places) == 1:
            name, bias = total.input[places[0]], total.input[1 - places[0]]
    product = graph.producer(name)
    is_alone = len(graph.consumers(name)) == 1
    if attributes_of(node)["to"] != TensorProto.FLOAT or not is_alone or not _is_integer_product(product):
        raise Unchanged
    assert product is not None
    found = _product(product, graph, TensorProto.FLOAT)
    if bias:
        graph.emit("Add", found, graph.emit("Cast", bias, to=TensorProto.FLOAT), output=node.output[0])
    else:
        graph.emit("Identity", found, output=node.output[0])


def _byte_product(node: onnx.NodeProto, graph: GraphEditor) -> None:
    """A MatMulInteger as one of unsigned and signed bytes without zero points, where that can be.

    From it the products of the data's zero point are subtracted: it times the sum of the weights of a column.
    """
    weight = _byte_weight(node, graph)
    if weight is None:
        _integer_product(node, graph)
        return
    weights, zero_point = graph.constant(weight, np.int8), input_of(node, 2)
    if not zero_point:
        graph.emit("MatMulInteger", node.input[0], weights, output=node.output[0])
        return
    factor = graph.emit("Cast", graph.reshape(zero_point, [1]), to=TensorProto.INT32)
    of_zero = graph.emit("Mul", factor, graph.constant(weight.sum(axis=0, dtype=np.int32)))
    graph.emit("Sub", graph.emit("MatMulInteger", node.input[0], weights), of_zero, output=node.output[0])


def _product_of_steps(node: onnx.NodeProto, graph: GraphEditor) -> None:
    """A MatMul or Gemm of what was quantised, and constant weights of 8 bits: a product of bytes that is scaled.

    That of the data's zero point is known then, and subtracted as integers.
    """
    data, weight = (_dequantized(name, graph) for name in node.input[:2])
    attributes = attributes_of(node)
    is_plain = not attributes.get("transA", 0) and attributes.get("alpha", 1.0) == attributes.get("beta", 1.0) == 1.0
    if not is_plain:
        raise Unchanged
    scale, zero_point = _steps(data, graph)
    values, weight_scale = _signed_weight(weight, graph), graph.value(weight.input[1]).astype(np.float64)
    axis = attributes_of(weight).get("axis", 1)
    if attributes.get("transB", 0):
        values, axis = values.T, 1 - axis % 2
    is_by_column = weight_scale.size == 1 or (axis % 2 == 1 and weight_scale.size == values.shape[-1])
    if not is_by_column or values.ndim != 2 or any(extent % PACK for extent in values.shape):
        raise Unchanged
    total = graph.emit("MatMulInteger", _unsigned(data, scale, zero_point, graph), graph.constant(values))
    zero_point += _SIGN if graph.dtype(data.input[0]) == TensorProto.INT8 else 0
    if zero_point:
        total = graph.emit("Sub", total, graph.constant(values.sum(axis=0, dtype=np.int32) * zero_point, np.int32))
    floats = graph.emit("Cast", total, to=TensorProto.FLOAT)
    bias = input_of(node, 2)
    scales = graph.constant((weight_scale * scale).ravel(), np.float32)
    product = graph.emit("Mul", floats, scales, output=None if bias else node.output[0])
    if bias:
        graph.emit("Add", product, bias, output=node.output[0])


def _unsigned(data: onnx.NodeProto, scale: float, zero_point: int, graph: GraphEditor) -> str:
    """The uint8 that a DequantizeLinear takes; another QuantizeLinear gives it in the place of one of int8."""
    dtype, quantize = graph.dtype(data.input[0]), graph.producer(data.input[0])
    if dtype == TensorProto.UINT8:
        return str(data.input[0])
    if dtype != TensorProto.INT8 or quantize is None or quantize.op_type != "QuantizeLinear":
        raise Unchanged
    if _steps(quantize, graph) != (scale, zero_point) or graph.dtype(quantize.input[0]) != TensorProto.FLOAT:
        raise Unchanged
    return graph.emit(
        "QuantizeLinear", quantize.input[0], quantize.input[1], graph.constant(zero_point + _SIGN, np.uint8)
    )


def _dequantized(name: str, graph: GraphEditor) -> onnx.NodeProto:
    """The DequantizeLinear that a tensor comes from."""
    node = graph.producer(name)
    if node is None or node.domain not in ("", "ai.onnx") or node.op_type != "DequantizeLinear":
        raise Unchanged
    return node


def _convolution_of_steps(node: onnx.NodeProto, graph: GraphEditor) -> None:
    """A Conv of what was quantised, and constant weights of 8 bits: a ConvInteger that is scaled."""
    data, weight = (_dequantized(name, graph) for name in node.input[:2])
    if not _is_plain(node):
        raise Unchanged
    scale, zero_point = _steps(data, graph)
    values, weight_scale = _signed_weight(weight, graph), graph.value(weight.input[1]).astype(np.float64)
    is_by_channel = weight_scale.size == 1 or (
        attributes_of(weight).get("axis", 1) == 0 and weight_scale.size == len(values)
    )
    missing = [(0, 0), (0, -values.shape[1] % PACK), *[(0, 0)] * (values.ndim - 2)]
    kernel = np.pad(values, missing)
    if not is_by_channel or not _has_packs(kernel):
        raise Unchanged
    levels = _unsigned(data, scale, zero_point, graph)
    zero_point += _SIGN if levels != data.input[0] else 0
    if kernel.shape != values.shape:  # an image has three channels
        widths = graph.constant([width for side in zip(*missing, strict=True) for width in side], np.int64)
        levels = graph.emit("Pad", levels, widths, graph.constant(zero_point, np.uint8))
    inputs = [levels, graph.constant(kernel)]
    if zero_point:
        inputs.append(graph.constant(zero_point, np.uint8))
    total = graph.emit("Cast", graph.emit("ConvInteger", *inputs, **attributes_of(node)), to=TensorProto.FLOAT)
    bias, by_channel = input_of(node, 2), [-1, *[1] * (values.ndim - 2)]
    scales = graph.constant((weight_scale * scale).reshape(by_channel), np.float32)
    product = graph.emit("Mul", total, scales, output=None if bias else node.output[0])
    if bias:
        graph.emit("Add", product, graph.reshape(bias, by_channel), output=node.output[0])


def _requantize(node: onnx.NodeProto, graph: GraphEditor) -> None:
    """A QuantizeLinear behind sums of bytes, whose scale goes into theirs: round(sums · scales + biases), saturated.

    A maximum over a window of what has the same steps is one of bytes.
    """
    scale, zero_point = _steps(node, graph)
    kind, name = helper.tensor_dtype_to_np_dtype(graph.dtype(node.output[0])), node.input[0]
    pool = graph.producer(name)
    if pool is not None and pool.op_type == "MaxPool" and len(pool.output) == 1 and len(graph.consumers(name)) == 1:
        data = _dequantized(pool.input[0], graph)
        if _steps(data, graph) != (scale, zero_point) or graph.dtype(data.input[0]) != graph.dtype(node.output[0]):
            raise Unchanged
        graph.emit("MaxPool", data.input[0], output=node.output[0], **attributes_of(pool))
        return
    if kind not in (np.uint8, np.int8) or not graph.shape(name) or not _has_sums_of_bytes(name, graph):
        raise Unchanged
    one, zero = graph.constant(1, np.float32), graph.constant(0, kind)
    graph.emit("QuantizeLinear", _scaled(name, 1 / scale, zero_point, graph), one, zero, output=node.output[0])


def _has_sums_of_bytes(name: str, graph: GraphEditor) -> bool:
    """Whether a tensor is computed of products of bytes by what a scale goes through."""
    node = graph.producer(name)
    if node is None or len(graph.consumers(name)) != 1:
        return False
    if node.op_type == "Cast":
        total = graph.producer(node.input[0])
        total = graph.producer(total.input[0]) if total is not None and total.op_type == "Sub" else total
        return _is_integer_product(total)
    are_bytes = node.op_type == "Add" and all(_is_dequantized(term, graph) for term in node.input)
    return are_bytes or (node.op_type in _SCALED and any(_has_sums_of_bytes(term, graph) for term in node.input))


def _is_dequantized(name: str, graph: GraphEditor) -> bool:
    node = graph.producer(name)
    return node is not None and node.op_type == "DequantizeLinear" and graph.is_constant(node.input[1])


def _scaled(name: str, factor: float, shift: float, graph: GraphEditor) -> str:
    """Puts in a tensor times a factor, with something added; both go into the constants that it is made of."""
    node = graph.producer(name)
    if node is not None and len(graph.consumers(name)) == 1:
        terms = list(node.input)
        constants = [place for place, term in enumerate(terms) if graph.is_constant(term)]
        if node.op_type == "DequantizeLinear":
            step, zero_point = _steps(node, graph)
            levels = _levels(node, step, zero_point, graph)
            return _plus(_times(levels, step * factor, graph), shift - zero_point * step * factor, graph)
        if node.op_type == "Relu":
            return _plus(graph.emit("Relu", _scaled(terms[0], factor, 0.0, graph)), shift, graph)
        if node.op_type == "Mul" and len(constants) == 1:
            values = graph.value(terms[constants[0]]).astype(np.float64) * factor
            product = graph.emit("Mul", terms[1 - constants[0]], graph.constant(values, np.float32))
            return _plus(product, shift, graph)
        if node.op_type == "Add" and len(constants) == 1:
            values = graph.value(terms[constants[0]]).astype(np.float64) * factor + shift
            return graph.emit(
                "Add", _scaled(terms[1 - constants[0]], factor, 0.0, graph), graph.constant(values, np.float32)
            )
        if node.op_type == "Add" and not constants:
            return graph.emit("Add", _scaled(terms[0], factor, 0.0, graph), _scaled(terms[1], factor, shift, graph))
    return _plus(_times(name, factor, graph), shift, graph)


def _levels(dequantize: onnx.NodeProto, step: float, zero_point: int, graph: GraphEditor) -> str:
    """Puts in what a DequantizeLinear takes as floats: of sums of bytes that nothing else takes, without the bytes."""
    name = dequantize.input[0]
    quantize = graph.producer(name)
    if quantize is None or quantize.op_type != "QuantizeLinear" or len(graph.consumers(name)) != 1:
        return graph.emit("Cast", name, to=TensorProto.FLOAT)
    if _steps(quantize, graph) != (step, zero_point) or not _has_sums_of_bytes(quantize.input[0], graph):
        return graph.emit("Cast", name, to=TensorProto.FLOAT)
    limits = np.iinfo(helper.tensor_dtype_to_np_dtype(graph.dtype(name)))
    least, most = (graph.constant(limit, np.float32) for limit in (limits.min, limits.max))
    return graph.emit("Clip", graph.emit("Round", _scaled(quantize.input[0], 1 / step, zero_point, graph)), least, most)


def _times(name: str, factor: float, graph: GraphEditor) -> str:
    # A scalar would be part of the function, of which there would be one for each layer.
    return graph.emit("Mul", name, graph.constant([factor], np.float32))


def _plus(name: str, shift: float, graph: GraphEditor) -> str:
    return graph.emit("Add", name, graph.constant([shift], np.float32)) if shift else name


def _signed_weight(weight: onnx.NodeProto, graph: GraphEditor) -> _Array:
    """The signed bytes without a zero point that a DequantizeLinear takes."""
    values = graph.value(weight.input[0])
    if values.dtype != np.int8 or (input_of(weight, 2) and graph.value(input_of(weight, 2)).any()):
        raise Unchanged
    return values


def _has_packs(kernel: _Array) -> bool:
    """Whether the channels of a convolution's weights are packs and vectors."""
    return kernel.ndim in _CONV_RANKS and not any(extent % PACK for extent in kernel.shape[:2])


def _byte_convolution(node: onnx.NodeProto, graph: GraphEditor) -> None:
    """What `_integer_product` does, but for a ConvInteger that stays one of bytes."""
    if _is_byte_convolution(node, graph):
        raise Unchanged
    _integer_product(node, graph)


def _is_byte_convolution(node: onnx.NodeProto, graph: GraphEditor) -> bool:
    data, weight, zero_point, weight_zero_point = (input_of(node, place) for place in range(4))
    are_known = graph.is_constant(weight) and (not zero_point or graph.is_constant(zero_point))
    is_signed = are_known and graph.dtype(weight) == TensorProto.INT8 and not weight_zero_point
    is_unsigned = graph.dtype(data) == TensorProto.UINT8
    return is_signed and is_unsigned and _is_plain(node) and _has_packs(graph.value(weight))


def _is_plain(node: onnx.NodeProto) -> bool:
    """Whether a convolution is none of groups, and says how it pads."""
    attributes = attributes_of(node)
    return bool(attributes.get("group", 1) == 1 and attributes.get("auto_pad", "NOTSET") == "NOTSET")


def _byte_weight(node: onnx.NodeProto, graph: GraphEditor) -> _Array | None:
    """The weights of a product without their zero point; None where data and weights are no unsigned and signed bytes,
    or not as many as an instruction takes.
    """
    data, weight, zero_point, weight_zero_point = (input_of(node, place) for place in range(4))
    is_constant = graph.is_constant(weight) and (not weight_zero_point or graph.is_constant(weight_zero_point))
    if node.op_type != "MatMulInteger" or not is_constant or graph.dtype(data) != TensorProto.UINT8:
        return None
    values = graph.value(weight).astype(np.int16)
    if weight_zero_point:
        values -= graph.value(weight_zero_point)
    limits = np.iinfo(np.int8)
    are_bytes = limits.min <= values.min() and values.max() <= limits.max
    is_one = not zero_point or math.prod(graph.shape(zero_point)) == 1
    is_even = values.ndim == 2 and not any(extent % PACK for extent in values.shape)
    return values if are_bytes and is_one and is_even else None


def _cast_of_bytes(node: onnx.NodeProto, graph: GraphEditor) -> None:
    """What `_cast` does, but for a product that stays one of bytes."""
    total = graph.producer(node.input[0])
    terms = [total] if total is None or total.op_type != "Add" else map(graph.producer, total.input)
    for product in filter(_is_integer_product, terms):
        assert product is not None
        is_conv = product.op_type == "ConvInteger"
        if _is_byte_convolution(product, graph) if is_conv else _byte_weight(product, graph) is not None:
            raise Unchanged
    _cast(node, graph)


def _is_integer_product(node: onnx.NodeProto | None) -> bool:
    return node is not None and node.domain in ("", "ai.onnx") and node.op_type in ("ConvInteger", "MatMulInteger")


def _dynamic_quantize(node: onnx.NodeProto, graph: GraphEditor) -> None:
    """Saturate(round(x / scale) + zero point), both of the range of x and 0; the scale of zeros alone is 1."""
    emit, data = graph.emit, node.input[0]
    y, scale_output, zero_point_output = node.output
    zero, one, levels = (graph.constant(value, np.float32) for value in (0, 1, 255))
    lowest = emit("Min", emit("ReduceMin", data, keepdims=0), zero)
    highest = emit("Max", emit("ReduceMax", data, keepdims=0), zero)
    span = emit("Sub", highest, lowest)
    is_flat = emit("Equal", span, zero)
    scale = emit("Where", is_flat, one, emit("Div", span, levels), output=scale_output)
    zero_point = emit("Round", emit("Div", emit("Neg", lowest), scale))
    zero_point = emit("Cast", zero_point, to=TensorProto.UINT8, output=zero_point_output)
    emit("QuantizeLinear", data, scale, zero_point, output=y)


def _dequantize(node: onnx.NodeProto, graph: GraphEditor) -> None:
    """What is quantised and dequantised with the same numbers stays a float32: clip(round(x / scale)) · scale.

    As integers on the way it takes twice as many operations, too many for the end of a convolution.
    """
    quantize = graph.producer(node.input[0])
    if quantize is None or quantize.domain not in ("", "ai.onnx") or quantize.op_type != "QuantizeLinear":
        raise Unchanged
    scale, zero_point = _steps(quantize, graph)
    kind = helper.tensor_dtype_to_np_dtype(graph.dtype(node.input[0]))
    are_floats = {graph.dtype(quantize.input[0]), graph.dtype(node.output[0])} == {TensorProto.FLOAT}
    if (scale, zero_point) != _steps(node, graph) or kind not in _INTEGERS or not are_floats:
        raise Unchanged
    if any(map(_is_integer_product, graph.consumers(node.input[0]))):
        raise Unchanged  # its bytes are there, and read sooner than floats
    first = next(other for other in graph.consumers(node.input[0]) if other.op_type == "DequantizeLinear")
    if first is not node and list(first.input[1:]) == list(node.input[1:]):
        graph.emit("Identity", first.output[0], output=node.output[0])
        return
    # As a scalar it would be part of the function, of which there would be one for each layer.
    one_element = [1] if graph.shape(quantize.input[0]) else []
    limits, step = np.iinfo(kind), graph.constant(np.full(one_element, scale), np.float32)
    least, most = (graph.constant(limit - zero_point, np.float32) for limit in (limits.min, limits.max))
    source = graph.producer(quantize.input[0])
    if source is not None and source.op_type in _ARITHMETIC:  # see `lowering.elementwise`
        steps = graph.emit("Mul", quantize.input[0], graph.constant(np.full(one_element, 1 / scale), np.float32))
    else:
        steps = graph.emit("Div", quantize.input[0], step)
    steps = graph.emit("Round", steps)
    graph.emit("Mul", graph.emit("Clip", steps, least, most), step, output=node.output[0])


def _steps(node: onnx.NodeProto, graph: GraphEditor) -> tuple[float, int]:
    """The only scale and zero point of a quantisation."""
    scale = graph.value(node.input[1])
    if scale.size != 1 or scale.dtype != np.float32:
        raise Unchanged
    return float(scale.item()), int(graph.value(input_of(node, 2)).item()) if input_of(node, 2) else 0


REWRITINGS: Rewritings = {
    ("", "Cast"): _cast,
    ("", "ConvInteger"): _integer_product,
    ("", "DynamicQuantizeLinear"): _dynamic_quantize,
    ("", "MatMulInteger"): _integer_product,
    ("", "QLinearConv"): _conv,
    ("", "QLinearMatMul"): _quantized(_same("MatMul"), (0, 3), 6),
    (_MICROSOFT, "QGemm"): _gemm,
    (_MICROSOFT, "QLinearAdd"): _quantized(_same("Add"), (0, 3), 6),
    (_MICROSOFT, "QLinearAveragePool"): _quantized(_same("AveragePool", *_POOL), (0,), 3),
    (_MICROSOFT, "QLinearConcat"): _concat,
    (_MICROSOFT, "QLinearConv"): _conv,
    (_MICROSOFT, "QLinearGlobalAveragePool"): _quantized(_same("GlobalAveragePool"), (0,), 3),
    (_MICROSOFT, "QLinearLeakyRelu"): _quantized(_same("LeakyRelu", "alpha"), (0,), 3),
    (_MICROSOFT, "QLinearMul"): _quantized(_same("Mul"), (0, 3), 6),
    (_MICROSOFT, "QLinearReduceMean"): _quantized(_reduced, (0,), 3),
    (_MICROSOFT, "QLinearSigmoid"): _quantized(_same("Sigmoid"), (0,), 3),
    (_MICROSOFT, "QLinearSoftmax"): _quantized(_softmax, (0,), 3),
}


OF_BYTES: Rewritings = {
    ("", "Cast"): _cast_of_bytes,
    ("", "ConvInteger"): _byte_convolution,
    ("", "MatMulInteger"): _byte_product,
}
"""For CPUs that add products of bytes, in the place of the others."""
STEPS: Rewritings = {
    ("", "Conv"): _convolution_of_steps,
    **dict.fromkeys((("", "Gemm"), ("", "MatMul")), _product_of_steps),
}
"""For such CPUs, too."""
REQUANTIZED: Rewritings = {("", "QuantizeLinear"): _requantize}
"""For what these put in."""
PRODUCTS: Rewritings = {
    key: REWRITINGS[key]
    for key in (("", "QLinearConv"), ("", "QLinearMatMul"), (_MICROSOFT, "QGemm"), (_MICROSOFT, "QLinearConv"))
}
"""What becomes one of them."""
PAIRS: Rewritings = {("", "DequantizeLinear"): _dequantize}
"""For what the other rewritings put in, too."""


def _present(node: onnx.NodeProto, start: int, count: int) -> list[str]:
    """Names of a tensor, its scale and its zero point, which may be missing at the end."""
    names = [input_of(node, position) for position in range(start, start + count)]
    return names if names[-1] else names[:-1]
