"""Normalisations in the forms that TVM does not know, or computes wrongly."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper

from ansor_mlflow.graphs.editor import GraphEditor, Rewritings, attributes_of, input_of

_EPSILON = 1e-5


def _layer_norm(node: onnx.NodeProto, graph: GraphEditor) -> bool:
    """Over several axes TVM's layout pass mistakes them, other outputs are empty, and scales do not broadcast."""
    data, scale, bias = node.input[0], node.input[1], input_of(node, 2)
    shape, attributes = graph.shape(data), attributes_of(node)
    if shape is None or graph.dtype(data) != TensorProto.FLOAT:
        return False
    axes = list(range(attributes.get("axis", -1) % len(shape), len(shape)))
    extra = any(graph.is_used(node, output) for output in (1, 2))
    if len(axes) == 1 and graph.shape(scale) == shape[-1:] and not extra:
        return False
    mean_output, inverse_output = (node.output[output] if graph.is_used(node, output) else None for output in (1, 2))
    mean = graph.reduce("ReduceMean", data, axes, output=mean_output)
    centred = graph.emit("Sub", data, mean)
    variance = graph.reduce("ReduceMean", graph.emit("Mul", centred, centred), axes)
    inverse = _inverse_root(variance, attributes.get("epsilon", _EPSILON), graph, output=inverse_output)
    scaled = graph.emit("Mul", graph.emit("Mul", centred, inverse), scale, output=None if bias else node.output[0])
    if bias:
        graph.emit("Add", scaled, bias, output=node.output[0])
    return True


def _rms_norm(node: onnx.NodeProto, graph: GraphEditor) -> bool:
    """Over one axis TVM knows ONNX's own, but not ONNX Runtime's."""
    data, scale = node.input[0], node.input[1]
    shape, attributes = graph.shape(data), attributes_of(node)
    if shape is None or graph.dtype(data) != TensorProto.FLOAT or graph.is_used(node, 1):
        return False
    axes = list(range(attributes.get("axis", -1) % len(shape), len(shape)))
    if node.op_type == "RMSNormalization" and len(axes) == 1:
        return False
    squares = graph.reduce("ReduceMean", graph.emit("Mul", data, data), axes)
    inverse = _inverse_root(squares, attributes.get("epsilon", _EPSILON), graph)
    graph.emit("Mul", graph.emit("Mul", data, inverse), scale, output=node.output[0])
    return True


def _lp_norm(node: onnx.NodeProto, graph: GraphEditor) -> bool:
    """A vector over its length; zeros stay zeros."""
    data, attributes = node.input[0], attributes_of(node)
    shape, dtype = graph.shape(data), graph.dtype(data)
    if shape is None or not dtype:
        return False
    zero, one = (graph.constant(value, helper.tensor_dtype_to_np_dtype(dtype)) for value in (0, 1))
    length = graph.reduce(f"ReduceL{attributes.get('p', 2)}", data, [attributes.get("axis", -1) % len(shape)])
    divisor = graph.emit("Where", graph.emit("Equal", length, zero), one, length)
    graph.emit("Div", data, divisor, output=node.output[0])
    return True


REWRITINGS: Rewritings = {
    ("", "LayerNormalization"): _layer_norm,
    ("", "LpNormalization"): _lp_norm,
    ("", "RMSNormalization"): _rms_norm,
    ("", "SimplifiedLayerNormalization"): _rms_norm,
    ("com.microsoft", "SimplifiedLayerNormalization"): _rms_norm,
}


def _inverse_root(variance: str, epsilon: float, graph: GraphEditor, output: str | None = None) -> str:
    shifted = graph.emit("Add", variance, graph.constant(epsilon, np.float32))
    return graph.emit("Reciprocal", graph.emit("Sqrt", shifted), output=output)
