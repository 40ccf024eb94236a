"""Folds batch normalisation into the convolution, or transposed convolution, before it.

With fixed statistics, normalising the output of a convolution is scaling its weights and shifting its bias:
γ (W∗x + b − μ) / √(σ² + ε) + β = (γ/√(σ²+ε) W)∗x + (b − μ) γ/√(σ²+ε) + β. TVM then makes simpler functions, and
need not evaluate the constants operation by operation, which takes longer than all other lowering.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
from onnx import numpy_helper

from ansor_mlflow.graphs.walk import attributes_of, uses
from ansor_mlflow.graphs.weights import remove_unused_initializers

_DEFAULT_EPSILON = 1e-5
"""Epsilon of ONNX's operator BatchNormalization where a node has none."""


def fold_batch_norms(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of the model without those batch normalisations that follow a convolution with constant weights."""
    folded = onnx.ModelProto()
    folded.CopyFrom(model)
    graph = folded.graph
    constants = {initializer.name: initializer for initializer in graph.initializer}
    producers = {output: node for node in graph.node for output in node.output}
    num_uses = Counter(uses(graph))
    for norm in [node for node in graph.node if node.op_type == "BatchNormalization"]:
        conv = producers.get(norm.input[0])
        if conv is None or conv.op_type not in ("Conv", "ConvTranspose") or num_uses[conv.output[0]] != 1:
            continue
        if _is_training(norm) or not {*conv.input[1:], *norm.input[1:]} <= constants.keys():
            continue
        weight, bias = _folded(conv, norm, constants)
        names = [f"{norm.output[0]}.folded_weight", f"{norm.output[0]}.folded_bias"]
        graph.initializer.extend(numpy_helper.from_array(*item) for item in zip((weight, bias), names, strict=True))
        conv.input[1:] = names
        conv.output[0] = norm.output[0]
        graph.node.remove(norm)
    remove_unused_initializers(graph)
    return folded


def _folded(
    conv: onnx.NodeProto, norm: onnx.NodeProto, constants: dict[str, onnx.TensorProto]
) -> tuple[np.ndarray, np.ndarray]:
    """Weights and bias [O] of the convolution that does both, in the type of the weights."""
    weight, *biases = (numpy_helper.to_array(constants[name]) for name in conv.input[1:])
    gamma, beta, mean, variance = (
        numpy_helper.to_array(constants[name]).astype(np.float64) for name in norm.input[1:5]
    )
    scale = gamma / np.sqrt(variance + attributes_of(norm).get("epsilon", _DEFAULT_EPSILON))
    bias = (sum(biases, np.zeros(1)) - mean) * scale + beta
    if conv.op_type == "Conv":  # [O, I, …]
        scaled = weight * scale.reshape(-1, *[1] * (weight.ndim - 1))
    else:  # [I, O / groups, …], of which each group has its part of I
        groups = int(attributes_of(conv).get("group", 1))
        per_group = scale.reshape(groups, 1, -1, *[1] * (weight.ndim - 2))
        scaled = (weight.reshape(groups, -1, *weight.shape[1:]) * per_group).reshape(weight.shape)
    return scaled.astype(weight.dtype), bias.astype(weight.dtype)


def _is_training(norm: onnx.NodeProto) -> bool:
    return bool(attributes_of(norm).get("training_mode", 0)) or len([name for name in norm.output if name]) > 1
