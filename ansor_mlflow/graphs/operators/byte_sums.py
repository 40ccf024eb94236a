"""Sums of products of bytes that stay integers, for CPUs that add them, from the first quantised tensor to the last.

A product of what was quantised is one of unsigned and signed bytes, whose zero points are in constants. What is
quantised behind it has its scale in that of the sums, so that nothing is divided, and what two such sums are added to
stays a byte.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from ansor_mlflow.graphs.editor import GraphEditor, Rewritings, Unchanged
from ansor_mlflow.graphs.operators.quantized import (
    EXACT,
    MAX_FACTOR,
    cast,
    integer_product,
    is_integer_product,
    steps_of,
)
from ansor_mlflow.graphs.walk import attributes_of, input_of

PACK = 4
"""Products that the instruction adds to a sum."""
_CONV_RANKS = (3, 4, 5)
_SCALED = ("Add", "Mul", "Relu")
"""What a factor goes through."""
_SIGN = 128
"""What makes an unsigned byte of a signed one."""
_Array = np.ndarray[Any, Any]


def _byte_product(node: onnx.NodeProto, graph: GraphEditor) -> None:
    """A MatMulInteger as one of unsigned and signed bytes without zero points, where that can be.

    From it the products of the data's zero point are subtracted: it times the sum of the weights of a column.
    """
    weight = _byte_weight(node, graph)
    if weight is None:
        integer_product(node, graph)
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
    scale, zero_point = steps_of(data, graph)
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
    if steps_of(quantize, graph) != (scale, zero_point) or graph.dtype(quantize.input[0]) != TensorProto.FLOAT:
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
    """A Conv of what was quantised, and constant weights of 8 bits: a ConvInteger that is scaled.

    Of a single channel each, it is one of bytes as floats, which are exact.
    """
    data, weight = (_dequantized(name, graph) for name in node.input[:2])
    scale, zero_point = steps_of(data, graph)
    values, weight_scale = _signed_weight(weight, graph), graph.value(weight.input[1]).astype(np.float64)
    is_by_channel = weight_scale.size == 1 or (
        attributes_of(weight).get("axis", 1) == 0 and weight_scale.size == len(values)
    )
    is_plain, is_depthwise = _is_plain(node), _is_depthwise(node, values)
    if not is_by_channel or not (is_plain or is_depthwise):
        raise Unchanged
    of_zero = None
    if is_depthwise:
        total = graph.emit("Cast", data.input[0], to=TensorProto.FLOAT)
        if zero_point:
            total = graph.emit("Sub", total, graph.constant([zero_point], np.float32))
        total = graph.emit("Conv", total, graph.constant(values, np.float32), **attributes_of(node))
    else:
        sums, of_zero = _sums_of_bytes(node, data, values, graph)
        total = graph.emit("Cast", sums, to=TensorProto.FLOAT)
    bias, by_channel = input_of(node, 2), [-1, *[1] * (values.ndim - 2)]
    scales = (weight_scale * scale).reshape(by_channel)
    added = graph.reshape(bias, by_channel) if bias else ""
    if of_zero is not None:
        of_zero = of_zero.reshape(by_channel) * scales
        added = (
            graph.emit("Sub", added, graph.constant(of_zero, np.float32))
            if added
            else graph.constant(-of_zero, np.float32)
        )
    product = graph.emit("Mul", total, graph.constant(scales, np.float32), output=None if added else node.output[0])
    if added:
        graph.emit("Add", product, added, output=node.output[0])


def _sums_of_bytes(
    node: onnx.NodeProto, data: onnx.NodeProto, values: _Array, graph: GraphEditor
) -> tuple[str, _Array | None]:
    """Puts in the ConvInteger of the bytes that a DequantizeLinear takes, in packs of channels.

    Returns its name, and what their zero point adds to the sums of each channel; None where it is subtracted already,
    as it is what the data is padded with.
    """
    missing = [(0, 0), (0, -values.shape[1] % PACK), *[(0, 0)] * (values.ndim - 2)]
    kernel = np.pad(values, missing)
    is_padded = any(attributes_of(node).get("pads", ()))
    if not _has_packs(kernel):
        raise Unchanged
    scale, zero_point = steps_of(data, graph)
    levels = _unsigned(data, scale, zero_point, graph)
    zero_point += _SIGN if levels != data.input[0] else 0
    if kernel.shape != values.shape:  # an image has three channels
        widths = graph.constant([width for side in zip(*missing, strict=True) for width in side], np.int64)
        levels = graph.emit("Pad", levels, widths, graph.constant(zero_point, np.uint8))
    inputs = [levels, graph.constant(kernel)]
    if zero_point and is_padded:
        inputs.append(graph.constant(zero_point, np.uint8))
    sums = graph.emit("ConvInteger", *inputs, **attributes_of(node))
    of_zero = kernel.sum(axis=tuple(range(1, kernel.ndim)), dtype=np.int64) * zero_point
    return sums, None if is_padded or not zero_point else of_zero


def _requantize(node: onnx.NodeProto, graph: GraphEditor) -> None:
    """A QuantizeLinear behind sums of bytes, whose scale goes into theirs: round(sums · scales + biases), saturated.

    A maximum over a window of what has the same steps is one of bytes.
    """
    scale, zero_point = steps_of(node, graph)
    kind, name = helper.tensor_dtype_to_np_dtype(graph.dtype(node.output[0])), node.input[0]
    pool = graph.producer(name)
    if pool is not None and pool.op_type == "MaxPool" and len(pool.output) == 1 and len(graph.consumers(name)) == 1:
        data = _dequantized(pool.input[0], graph)
        if steps_of(data, graph) != (scale, zero_point) or graph.dtype(data.input[0]) != graph.dtype(node.output[0]):
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
        return is_integer_product(total)
    if node.op_type == "Conv":
        levels = graph.producer(node.input[0])
        levels = graph.producer(levels.input[0]) if levels is not None and levels.op_type == "Sub" else levels
        return levels is not None and levels.op_type == "Cast"
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
            step, zero_point = steps_of(node, graph)
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
    if steps_of(quantize, graph) != (step, zero_point) or not _has_sums_of_bytes(quantize.input[0], graph):
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
    """What `integer_product` does, but for a ConvInteger that stays one of bytes."""
    if _is_byte_convolution(node, graph):
        raise Unchanged
    integer_product(node, graph)


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


def _is_depthwise(node: onnx.NodeProto, values: _Array) -> bool:
    """Whether a convolution has one channel in each of its groups, and says how it pads."""
    attributes = attributes_of(node)
    is_single = attributes.get("group", 1) == len(values) > 1 == values.shape[1]
    num_products = math.prod(values.shape[2:])
    is_exact = num_products * MAX_FACTOR**2 < EXACT
    return bool(is_single and is_exact and attributes.get("auto_pad", "NOTSET") == "NOTSET")


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
    """What `cast` does, but for a product that stays one of bytes."""
    total = graph.producer(node.input[0])
    terms = [total] if total is None or total.op_type != "Add" else map(graph.producer, total.input)
    for product in filter(is_integer_product, terms):
        assert product is not None
        is_conv = product.op_type == "ConvInteger"
        if _is_byte_convolution(product, graph) if is_conv else _byte_weight(product, graph) is not None:
            raise Unchanged
    cast(node, graph)


def _unchanged(_node: onnx.NodeProto, _graph: GraphEditor) -> None:
    raise Unchanged


OF_BYTES: Rewritings = {
    ("", "Cast"): _cast_of_bytes,
    ("", "ConvInteger"): _byte_convolution,
    ("", "DynamicQuantizeLinear"): _unchanged,
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
