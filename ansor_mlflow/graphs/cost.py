"""How much each node of a graph computes."""

from __future__ import annotations

import math

import onnx

from ansor_mlflow.graphs.nodes import ValueInfos, attribute
from ansor_mlflow.networks import static_shape

_FREE = {"Cast", "Constant", "Flatten", "Identity", "Reshape", "Shape", "Squeeze", "Transpose", "Unsqueeze"}
_GATES = {"GRU": 3, "LSTM": 4, "RNN": 1}


def num_flops(node: onnx.NodeProto, values: ValueInfos) -> float:
    """Floating point operations of a node; a multiplication and an addition are two.

    Args:
        node: Of any operator. Those that do not multiply matrices count one operation for each element of their first
            output, and those that only move elements none.
        values: Types of the graph's tensors. A node whose shapes are not known counts nothing.
    """
    shapes = [static_shape(values.get(name)) for name in (*node.input[:3], *node.output[:1])]
    output = shapes.pop()
    weight = shapes[1] if len(shapes) > 1 else None
    if node.op_type in _GATES and shapes and shapes[0] and weight:
        length, batch, num_inputs = shapes[0]
        directions, gates = weight[0], weight[1]
        return 2.0 * length * batch * directions * gates * (num_inputs + gates // _GATES[node.op_type])
    if output is None or node.op_type in _FREE:
        return 0.0
    if shapes and shapes[0] and weight:
        if node.op_type in ("Conv", "ConvInteger"):
            return 2.0 * math.prod(output) * math.prod(weight[1:])
        if node.op_type == "ConvTranspose":
            return 2.0 * math.prod(shapes[0]) * math.prod(weight[1:])
        if node.op_type in ("Gemm", "MatMul", "MatMulInteger"):
            inner = shapes[0][0 if attribute(node, "transA", 0) else -1]
            return 2.0 * math.prod(output) * inner
    return float(math.prod(output))
