"""Normalisations in the forms that TVM does not know, or computes wrongly."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto

from ansor_mlflow.graphs.editor import GraphEditor, Rewritings, Unchanged
from ansor_mlflow.graphs.types import FLOATS
from ansor_mlflow.graphs.walk import attributes_of, input_of

_EPSILON = 1e-5


def _layer_norm(node: onnx.NodeProto, graph: GraphEditor) -> None:
    """Over several axes TVM's layout pass mistakes them, other outputs are empty, and scales do not broadcast."""
    data, scale, bias = node.input[0], node.input[1], input_of(node, 2)
    shape, attributes = graph.shape(data), attributes_of(node)
    if graph.dtype(data) != TensorProto.FLOAT or is_plain_layer_norm(node, graph):
        raise Unchanged
    axes = list(range(attributes.get("axis", -1) % len(shape), len(shape)))
    mean_output, inverse_output = (node.output[output] if graph.is_used(node, output) else None for output in (1, 2))
    mean = graph.reduce("ReduceMean", data, axes, output=mean_output)
    centred = graph.emit("Sub", data, mean)
    variance = graph.reduce("ReduceMean", graph.emit("Mul", centred, centred), axes)
    inverse = _inverse_root(variance, attributes.get("epsilon", _EPSILON), graph, output=inverse_output)
    scaled = graph.emit("Mul", graph.emit("Mul", centred, inverse), scale, output=None if bias else node.output[0])
    if bias:
        graph.emit("Add", scaled, bias, output=node.output[0])


def is_plain_layer_norm(node: onnx.NodeProto, graph: GraphEditor) -> bool:
    """Whether it is over the last axis, with a scale for each element, and nothing asks for its statistics."""
    shape = graph.shape(node.input[0])
    is_last = attributes_of(node).get("axis", -1) in (-1, len(shape) - 1)
    extra = any(graph.is_used(node, output) for output in (1, 2))
    return is_last and graph.shape(node.input[1]) == shape[-1:] and not extra


def _rms_norm(node: onnx.NodeProto, graph: GraphEditor) -> None:
    """Over one axis TVM knows ONNX's own, but not ONNX Runtime's."""
    data, scale = node.input[0], node.input[1]
    shape, attributes = graph.shape(data), attributes_of(node)
    if graph.dtype(data) != TensorProto.FLOAT or graph.is_used(node, 1):
        raise Unchanged
    axes = list(range(attributes.get("axis", -1) % len(shape), len(shape)))
    if node.op_type == "RMSNormalization" and len(axes) == 1:
        raise Unchanged
    squares = graph.reduce("ReduceMean", graph.emit("Mul", data, data), axes)
    inverse = _inverse_root(squares, attributes.get("epsilon", _EPSILON), graph)
    graph.emit("Mul", graph.emit("Mul", data, inverse), scale, output=node.output[0])


def _lp_norm(node: onnx.NodeProto, graph: GraphEditor) -> None:
    """A vector over its length; zeros stay zeros."""
    data, attributes = node.input[0], attributes_of(node)
    shape, dtype = graph.shape(data), graph.dtype(data)
    zero, one = (graph.constant(value, dtype) for value in (0, 1))
    length = graph.reduce(f"ReduceL{attributes.get('p', 2)}", data, [attributes.get("axis", -1) % len(shape)])
    divisor = graph.emit("Where", graph.emit("Equal", length, zero), one, length)
    graph.emit("Div", data, divisor, output=node.output[0])


def _mean_variance_norm(node: onnx.NodeProto, graph: GraphEditor) -> None:
    """The deviation from the mean over its root mean square; TVM takes the difference of squares.

    Without the 1e-9 of ONNX's definition, as in ONNX Runtime: a constant channel is NaN.
    """
    data, axes = node.input[0], list(attributes_of(node).get("axes", (0, 2, 3)))
    if graph.dtype(data) != TensorProto.FLOAT:
        raise Unchanged
    centred = graph.emit("Sub", data, graph.reduce("ReduceMean", data, axes))
    root = graph.emit("Sqrt", graph.reduce("ReduceMean", graph.emit("Mul", centred, centred), axes))
    graph.emit("Div", centred, root, output=node.output[0])


def _difference(node: onnx.NodeProto, graph: GraphEditor) -> None:
    """A variance that is E[x²] − E[x]² becomes E[(x − E[x])²]: squares of a large mean leave no digits for it.

    ONNX's own definition of GroupNormalization, which ONNX Runtime puts in the place of one, is such a form.
    """
    mean_name = _square_of(node.input[1], graph)
    of_squares, mean = graph.producer(node.input[0]), graph.producer(mean_name)
    if of_squares is None or mean is None or {of_squares.op_type, mean.op_type} != {"ReduceMean"}:
        raise Unchanged
    data, form = mean.input[0], _reduction(mean, graph)
    if graph.dtype(data) not in FLOATS:  # a mean of integers is rounded, and the variance another
        raise Unchanged
    if form != _reduction(of_squares, graph) or data != _square_of(of_squares.input[0], graph):
        raise Unchanged
    attributes = attributes_of(mean)
    kept = mean_name if form[1] else graph.emit("ReduceMean", *mean.input, **attributes | {"keepdims": 1})
    centred = graph.emit("Sub", data, kept)
    squared = graph.emit("Mul", centred, centred)
    graph.emit("ReduceMean", squared, *mean.input[1:], output=node.output[0], **attributes)


def _reduction(node: onnx.NodeProto, graph: GraphEditor) -> tuple[list[int], bool]:
    """Axes of a reduction, and whether it keeps them."""
    return graph.reduced_axes(node), bool(attributes_of(node).get("keepdims", 1))


def _square_of(name: str, graph: GraphEditor) -> str:
    """The tensor that another is the square of; empty where it is none."""
    node = graph.producer(name)
    if node is None or len(node.input) != 2:
        return ""
    first, second = node.input
    is_square = node.op_type == "Mul" and first == second
    if node.op_type == "Pow" and graph.is_constant(second):
        is_square = bool((graph.value(second) == 2).all())
    return str(first) if is_square else ""


def _inverse_root(variance: str, epsilon: float, graph: GraphEditor, output: str | None = None) -> str:
    shifted = graph.emit("Add", variance, graph.constant(epsilon, np.float32))
    return graph.emit("Reciprocal", graph.emit("Sqrt", shifted), output=output)


REWRITINGS: Rewritings = {
    ("", "LayerNormalization"): _layer_norm,
    ("", "LpNormalization"): _lp_norm,
    ("", "MeanVarianceNormalization"): _mean_variance_norm,
    ("", "Sub"): _difference,
    ("", "RMSNormalization"): _rms_norm,
    ("", "SimplifiedLayerNormalization"): _rms_norm,
    ("com.microsoft", "SimplifiedLayerNormalization"): _rms_norm,
}
