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
EXACT = 2**24
"""Integers up to here are exact in float32."""
MAX_FACTOR = 255
"""Largest difference of two numbers of 8 bits."""
_INTEGERS = (np.uint8, np.int8, np.uint16, np.int16)
_ARITHMETIC = ("Add", "Clip", "Conv", "Gemm", "MatMul", "Mul", "Relu", "Sub")
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


def integer_product(node: onnx.NodeProto, graph: GraphEditor) -> None:
    """MatMulInteger and ConvInteger: the products of what is left of the zero points, as int32."""
    shape = graph.shape(node.input[1])
    num_products = math.prod(shape[1:]) if node.op_type == "ConvInteger" else shape[max(0, len(shape) - 2)]
    is_exact = num_products * MAX_FACTOR**2 < EXACT
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


def cast(node: onnx.NodeProto, graph: GraphEditor) -> None:
    """An integer product, with a bias or not, of which nothing but a float32 is made: floats from the beginning."""
    name, bias = node.input[0], ""
    total = graph.producer(name)
    if total is not None and total.op_type == "Add" and len(graph.consumers(name)) == 1:
        places = [place for place, term in enumerate(total.input) if is_integer_product(graph.producer(term))]
        if len(places) == 1:
            name, bias = total.input[places[0]], total.input[1 - places[0]]
    product = graph.producer(name)
    is_alone = len(graph.consumers(name)) == 1
    if attributes_of(node)["to"] != TensorProto.FLOAT or not is_alone or not is_integer_product(product):
        raise Unchanged
    assert product is not None
    found = _product(product, graph, TensorProto.FLOAT)
    if bias:
        graph.emit("Add", found, graph.emit("Cast", bias, to=TensorProto.FLOAT), output=node.output[0])
    else:
        graph.emit("Identity", found, output=node.output[0])


def is_integer_product(node: onnx.NodeProto | None) -> bool:
    """Whether a node is a product of integers, or a convolution of them."""
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
    scale, zero_point = steps_of(quantize, graph)
    kind = helper.tensor_dtype_to_np_dtype(graph.dtype(node.input[0]))
    are_floats = {graph.dtype(quantize.input[0]), graph.dtype(node.output[0])} == {TensorProto.FLOAT}
    if (scale, zero_point) != steps_of(node, graph) or kind not in _INTEGERS or not are_floats:
        raise Unchanged
    if any(other.op_type == "Cast" or is_integer_product(other) for other in graph.consumers(node.input[0])):
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


def steps_of(node: onnx.NodeProto, graph: GraphEditor) -> tuple[float, int]:
    """The only scale and zero point of a quantisation; a scale whose reciprocal is none is divided by."""
    scale = graph.value(node.input[1])
    if scale.size != 1 or scale.dtype != np.float32 or not scale.item() >= np.finfo(np.float32).smallest_normal:
        raise Unchanged
    return float(scale.item()), int(graph.value(input_of(node, 2)).item()) if input_of(node, 2) else 0


REWRITINGS: Rewritings = {
    ("", "Cast"): cast,
    ("", "ConvInteger"): integer_product,
    ("", "DynamicQuantizeLinear"): _dynamic_quantize,
    ("", "MatMulInteger"): integer_product,
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


PRODUCTS: Rewritings = {
    key: REWRITINGS[key]
    for key in (("", "QLinearConv"), ("", "QLinearMatMul"), (_MICROSOFT, "QGemm"), (_MICROSOFT, "QLinearConv"))
}
"""What becomes one of steps that `byte_sums` knows."""
PAIRS: Rewritings = {("", "DequantizeLinear"): _dequantize}
"""For what the other rewritings put in, too."""


def _present(node: onnx.NodeProto, start: int, count: int) -> list[str]:
    """Names of a tensor, its scale and its zero point, which may be missing at the end."""
    names = [input_of(node, position) for position in range(start, start + count)]
    return names if names[-1] else names[:-1]
