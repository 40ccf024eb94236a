"""Sums along an axis, for which TVM has no kernel on CPUs."""

from __future__ import annotations

import numpy as np
import onnx

from ansor_mlflow.graphs.editor import GraphEditor, Rewritings, attributes_of

_MAX_LENGTH = 1024
"""Longer axes stay: the product with a triangular matrix takes the square of the length."""


def _cum_sum(node: onnx.NodeProto, graph: GraphEditor) -> bool:
    """The product with a triangular matrix of ones; integers in float64, which is exact below 2⁵³."""
    data, axis, shape = node.input[0], graph.value(node.input[1]), graph.shape(node.input[0])
    if not shape or axis is None or shape[(place := int(axis.item()))] > _MAX_LENGTH:
        return False
    length, dtype, attributes = shape[place], graph.dtype(data), attributes_of(node)
    is_float = onnx.helper.tensor_dtype_to_np_dtype(dtype).kind == "f"
    ones = np.triu(np.ones((length, length)), 1 if attributes.get("exclusive") else 0)
    if attributes.get("reverse"):
        ones = ones.T
    kind = dtype if is_float else onnx.TensorProto.DOUBLE
    triangle = graph.constant(ones, onnx.helper.tensor_dtype_to_np_dtype(kind))
    order = [index for index in range(len(shape)) if index != place % len(shape)] + [place % len(shape)]
    last = graph.emit("Transpose", data if is_float else graph.emit("Cast", data, to=kind), perm=order)
    summed = graph.emit("MatMul", graph.reshape(last, (-1, length)), triangle)
    restored = graph.reshape(summed, [shape[index] for index in order])
    result = graph.emit("Transpose", restored, perm=[order.index(index) for index in range(len(shape))])
    graph.emit("Cast", result, to=dtype, output=node.output[0])
    return True


REWRITINGS: Rewritings = {("", "CumSum"): _cum_sum}
