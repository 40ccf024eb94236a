"""Sums along an axis, for which TVM has no kernel on CPUs, and means of integers."""

from __future__ import annotations

import math

import numpy as np
import onnx

from ansor_mlflow.graphs.editor import GraphEditor, Rewritings
from ansor_mlflow.graphs.types import FLOATS
from ansor_mlflow.graphs.walk import attributes_of

_MAX_LENGTH = 1024
"""Longer axes stay: the product with a triangular matrix takes the square of the length."""


def _cum_sum(node: onnx.NodeProto, graph: GraphEditor) -> bool:
    """The product with a triangular matrix of ones, in the dtype itself, so that integers wrap as they should."""
    data, axis, shape = node.input[0], graph.value(node.input[1]), graph.shape(node.input[0])
    if not shape or axis is None or shape[(place := int(axis.item()))] > _MAX_LENGTH:
        return False
    length, dtype, attributes = shape[place], graph.dtype(data), attributes_of(node)
    ones = np.triu(np.ones((length, length)), 1 if attributes.get("exclusive") else 0)
    if attributes.get("reverse"):
        ones = ones.T
    triangle = graph.constant(ones, dtype)
    order = [index for index in range(len(shape)) if index != place % len(shape)] + [place % len(shape)]
    last = graph.emit("Transpose", data, perm=order)
    summed = graph.emit("MatMul", graph.reshape(last, (-1, length)), triangle)
    restored = graph.reshape(summed, [shape[index] for index in order])
    graph.emit("Transpose", restored, perm=[order.index(index) for index in range(len(shape))], output=node.output[0])
    return True


def _mean(node: onnx.NodeProto, graph: GraphEditor) -> bool:
    """The sum over the number of elements; TVM's mean of integers is of int64."""
    data = node.input[0]
    shape, dtype, axes = graph.shape(data), graph.dtype(data), graph.reduced_axes(node)
    if shape is None or not dtype or dtype in FLOATS or axes is None:
        return False
    total = graph.reduce("ReduceSum", data, axes)
    count = graph.constant(math.prod(shape[axis] for axis in axes), dtype)
    mean = graph.emit("Div", total, count)
    kept = [1 if place in axes else size for place, size in enumerate(shape)]
    if not attributes_of(node).get("keepdims", 1):
        kept = [size for place, size in enumerate(shape) if place not in axes]
    graph.reshape(mean, kept, output=node.output[0])
    return True


REWRITINGS: Rewritings = {("", "CumSum"): _cum_sum, ("", "ReduceMean"): _mean}
