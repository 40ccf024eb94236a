"""Elementwise operators that TVM imports wrongly, in part, or not at all."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto

from ansor_mlflow.graphs.editor import GraphEditor, Rewritings
from ansor_mlflow.graphs.types import FLOATS
from ansor_mlflow.graphs.walk import attributes_of, input_of

_QUICK_GELU_ALPHA = 1.702
"""Default of ONNX Runtime's operator QuickGelu."""


def _dropout(node: onnx.NodeProto, graph: GraphEditor) -> bool:
    """Nothing is dropped at inference; TVM makes a tuple of it, on which its layout pass stops."""
    training = input_of(node, 2)
    if training and ((is_training := graph.value(training)) is None or is_training.any()):
        return False
    if graph.is_used(node, 1):
        if (shape := graph.shape(node.input[0])) is None:
            return False
        graph.emit("Identity", graph.constant(np.ones(shape, np.bool_)), output=node.output[1])
    graph.emit("Identity", node.input[0], output=node.output[0])
    return True


def _power(node: onnx.NodeProto, graph: GraphEditor) -> bool:
    """TVM knows powers of one type alone."""
    base, exponent = node.input
    dtype = graph.dtype(base)
    if dtype not in FLOATS or graph.dtype(exponent) in (dtype, TensorProto.UNDEFINED):
        return False
    graph.emit("Pow", base, graph.emit("Cast", exponent, to=dtype), output=node.output[0])
    return True


def _is_infinite(node: onnx.NodeProto, graph: GraphEditor) -> bool:
    """TVM overlooks which sign is asked for."""
    attributes, data = attributes_of(node), node.input[0]
    positive, negative = (attributes.get(f"detect_{sign}", 1) for sign in ("positive", "negative"))
    dtype = graph.dtype(data)
    if (positive and negative) or not dtype:
        return False
    infinity = np.inf if positive else -np.inf if negative else np.nan  # which equals nothing
    graph.emit("Equal", data, graph.constant(infinity, dtype), output=node.output[0])
    return True


def _celu(node: onnx.NodeProto, graph: GraphEditor) -> bool:
    """α Elu(x / α)."""
    data, dtype = node.input[0], graph.dtype(node.input[0])
    if not dtype:
        return False
    alpha = graph.constant(attributes_of(node).get("alpha", 1.0), dtype)
    graph.emit("Mul", graph.emit("Elu", graph.emit("Div", data, alpha)), alpha, output=node.output[0])
    return True


def _swish(node: onnx.NodeProto, graph: GraphEditor) -> bool:
    """Swish of x: x σ(α x)."""
    data, dtype = node.input[0], graph.dtype(node.input[0])
    if not dtype:
        return False
    default = _QUICK_GELU_ALPHA if node.op_type == "QuickGelu" else 1.0
    scaled = graph.emit("Mul", data, graph.constant(attributes_of(node).get("alpha", default), dtype))
    graph.emit("Mul", data, graph.emit("Sigmoid", scaled), output=node.output[0])
    return True


REWRITINGS: Rewritings = {
    ("", "Celu"): _celu,
    ("", "Dropout"): _dropout,
    ("", "IsInf"): _is_infinite,
    ("", "Pow"): _power,
    ("", "Swish"): _swish,
    ("com.microsoft", "QuickGelu"): _swish,
}
