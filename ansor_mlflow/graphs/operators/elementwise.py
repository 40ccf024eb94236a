"""Elementwise operators that TVM imports wrongly, in part, or not at all."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from ansor_mlflow.graphs.editor import GraphEditor, Rewritings, Unchanged
from ansor_mlflow.graphs.types import FLOATS
from ansor_mlflow.graphs.walk import attributes_of, input_of


def _dropout(node: onnx.NodeProto, graph: GraphEditor) -> None:
    """Nothing is dropped at inference; TVM makes a tuple of it, on which its layout pass stops."""
    if (training := input_of(node, 2)) and graph.value(training).any():
        raise Unchanged
    if graph.is_used(node, 1):
        graph.emit("Identity", graph.constant(np.ones(graph.shape(node.input[0]), np.bool_)), output=node.output[1])
    graph.emit("Identity", node.input[0], output=node.output[0])


def _power(node: onnx.NodeProto, graph: GraphEditor) -> None:
    """TVM knows powers of one type alone."""
    base, exponent = node.input
    dtype = graph.dtype(base)
    if dtype not in FLOATS or graph.dtype(exponent) == dtype:
        raise Unchanged
    graph.emit("Pow", base, graph.emit("Cast", exponent, to=dtype), output=node.output[0])


def _is_infinite(node: onnx.NodeProto, graph: GraphEditor) -> None:
    """TVM overlooks which sign is asked for."""
    attributes, data = attributes_of(node), node.input[0]
    positive, negative = (attributes.get(f"detect_{sign}", 1) for sign in ("positive", "negative"))
    if positive and negative:
        raise Unchanged
    infinity = np.inf if positive else -np.inf if negative else np.nan  # which equals nothing
    graph.emit("Equal", data, graph.constant(infinity, graph.dtype(data)), output=node.output[0])


def _celu(node: onnx.NodeProto, graph: GraphEditor) -> None:
    """α Elu(x / α)."""
    data = node.input[0]
    alpha = graph.constant(attributes_of(node).get("alpha", 1.0), graph.dtype(data))
    graph.emit("Mul", graph.emit("Elu", graph.emit("Div", data, alpha)), alpha, output=node.output[0])


def _swish(node: onnx.NodeProto, graph: GraphEditor) -> None:
    """Swish of x: x σ(α x)."""
    data, default = node.input[0], 1.702 if node.op_type == "QuickGelu" else 1.0  # as ONNX Runtime's operator has it
    alpha = graph.constant(attributes_of(node).get("alpha", default), graph.dtype(data))
    scaled = graph.emit("Mul", data, alpha)
    graph.emit("Mul", data, graph.emit("Sigmoid", scaled), output=node.output[0])


REWRITINGS: Rewritings = {
    ("", "Celu"): _celu,
    ("", "Dropout"): _dropout,
    ("", "IsInf"): _is_infinite,
    ("", "Pow"): _power,
    ("", "Swish"): _swish,
    ("com.microsoft", "QuickGelu"): _swish,
}


def _reduce(node: onnx.NodeProto, graph: GraphEditor) -> None:
    """The first value where it is NaN, else the largest of those that are none."""
    data, shape, worst, places = *_filled(node, graph), graph.reduced_axes(node)
    first = graph.slice(data, [0] * len(places), [1] * len(places), places)
    numbers = graph.emit("Where", graph.emit("IsNaN", data), graph.constant(worst), data)
    largest = graph.reduce(node.op_type, numbers, places)
    is_beyond = graph.emit("Greater" if node.op_type == "ReduceMax" else "Less", largest, graph.constant(_least(worst)))
    stays = graph.emit("Or", graph.emit("IsNaN", first), graph.emit("Not", is_beyond))  # TVM begins with that number
    keeps = attributes_of(node).get("keepdims", 1)
    result = graph.emit("Where", stays, first, largest, output=node.output[0] if keeps else None)
    if not keeps:
        graph.reshape(result, [size for axis, size in enumerate(shape) if axis not in places], output=node.output[0])


def _extremum(node: onnx.NodeProto, graph: GraphEditor) -> None:
    """NaN where a single number is, which the machine code takes for a bound that is none."""
    if graph.dtype(node.input[0]) not in FLOATS:
        raise Unchanged
    single = [
        name
        for name in node.input
        if (shape := graph.find_shape(name)) is not None
        and math.prod(shape) == 1
        and (not graph.is_constant(name) or np.isnan(graph.value(name)).any())
    ]
    if not single:
        raise Unchanged
    result = graph.emit(node.op_type, *node.input)
    for name in single[:-1]:
        result = graph.emit("Where", graph.emit("IsNaN", name), name, result)
    graph.emit("Where", graph.emit("IsNaN", single[-1]), single[-1], result, output=node.output[0])


def _last_place(node: onnx.NodeProto, graph: GraphEditor) -> None:
    """The last place in finite numbers, but for an infinity where the first value is NaN; TVM turns data around."""
    data, shape, worst = _filled(node, graph)
    attributes = attributes_of(node)
    if not attributes.get("select_last_index"):
        raise Unchanged
    axis, least = attributes.get("axis", 0) % len(shape), _least(worst)
    instead = np.full([size if place == axis else 1 for place, size in enumerate(shape)], least)
    instead[(0,) * len(shape)] = -worst
    limits = sorted([least, -least])
    finite = graph.emit("Clip", data, *map(graph.constant, limits))
    numbers = graph.emit("Where", graph.emit("IsNaN", data), graph.constant(instead), finite)
    graph.emit(node.op_type, numbers, output=node.output[0], **attributes)


def _sign(node: onnx.NodeProto, graph: GraphEditor) -> None:
    """TVM's sign of NaN is 0, as is ONNX Runtime's of 16 bits."""
    data = node.input[0]
    if graph.dtype(data) not in (TensorProto.FLOAT, TensorProto.DOUBLE):
        raise Unchanged
    graph.emit("Where", graph.emit("IsNaN", data), data, graph.emit("Sign", data), output=node.output[0])


def _thresholded_relu(node: onnx.NodeProto, graph: GraphEditor) -> None:
    """TVM multiplies by 0, which makes a NaN of NaN and of minus infinity."""
    data, dtype = node.input[0], graph.dtype(node.input[0])
    alpha, zero = (graph.constant(value, dtype) for value in (attributes_of(node).get("alpha", 1.0), 0))
    graph.emit("Where", graph.emit("Greater", data, alpha), data, zero, output=node.output[0])


def _filled(node: onnx.NodeProto, graph: GraphEditor) -> tuple[str, tuple[int, ...], np.ndarray[Any, Any]]:
    """Data that are floats, with their shape, which has elements, and the infinity that is chosen last."""
    data, shape, dtype = node.input[0], graph.shape(node.input[0]), graph.dtype(node.input[0])
    if dtype not in FLOATS or not math.prod(shape) or not shape:
        raise Unchanged
    worst = np.asarray(-np.inf if node.op_type.endswith("Max") else np.inf, helper.tensor_dtype_to_np_dtype(dtype))
    return data, shape, worst


def _least(worst: np.ndarray[Any, Any]) -> Any:
    """The finite number that is next to an infinity."""
    info = np.finfo(worst.dtype)
    return np.asarray(info.min if worst < 0 else info.max, worst.dtype)


EXTREMA: Rewritings = {
    ("", "ArgMax"): _last_place,
    ("", "ArgMin"): _last_place,
    ("", "Max"): _extremum,
    ("", "Min"): _extremum,
    ("", "ReduceMax"): _reduce,
    ("", "ReduceMin"): _reduce,
    ("", "Sign"): _sign,
    ("", "ThresholdedRelu"): _thresholded_relu,
}
