"""Simplifies graphs: raises old operators, computes what is constant, and folds batch normalisations."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper, version_converter

from ansor_mlflow.errors import UserInputError, one_line
from ansor_mlflow.files import scratch_directory
from ansor_mlflow.graphs.operators import write_out_loops
from ansor_mlflow.graphs.types import types_as_before
from ansor_mlflow.graphs.walk import (
    attributes_of,
    opset_version,
    remove_unused_initializers,
    uses,
    without_numbers,
    without_weights,
)

_MAX_ROUNDS = 5
"""A constant may show a shape that the next round needs; real exports need two."""
_MAX_CONSTANT_BYTES = str(2**26)
"""ONNX Runtime's own limit leaves the tables of relative positions of a transformer to be computed at each call."""
_OLDEST_OPSET = 11
"""Version from which slices, pads and bounds of Clip are inputs, and Upsample is Resize."""
_COUNTING = {"coordinate_transformation_mode": "asymmetric"}
"""How Upsample, and Resize before version 11, count positions. ONNX Runtime rounds them up where a tensor shrinks."""


def fold_batch_norms(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of the model without batch normalisations that follow a (transposed) convolution with constant weights.

    With fixed statistics, normalising the output of a convolution is scaling its weights and shifting its bias:
    γ (W∗x + b − μ) / √(σ² + ε) + β = (γ/√(σ²+ε) W)∗x + (b − μ) γ/√(σ²+ε) + β. TVM then makes simpler functions, and
    need not evaluate the constants operation by operation, which takes longer than all other lowering.
    """
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
        is_training = attributes_of(norm).get("training_mode", 0) or len(list(filter(None, norm.output))) > 1
        if is_training or not {*conv.input[1:], *norm.input[1:]} <= constants.keys():
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
    scale = gamma / np.sqrt(variance + attributes_of(norm).get("epsilon", 1e-5))
    bias = (sum(biases, np.zeros(1)) - mean) * scale + beta
    if conv.op_type == "Conv":  # [O, I, …]
        scaled = weight * scale.reshape(-1, *[1] * (weight.ndim - 1))
    else:  # [I, O / groups, …], of which each group has its part of I
        groups = int(attributes_of(conv).get("group", 1))
        per_group = scale.reshape(groups, 1, -1, *[1] * (weight.ndim - 2))
        scaled = (weight.reshape(groups, -1, *weight.shape[1:]) * per_group).reshape(weight.shape)
    return scaled.astype(weight.dtype), bias.astype(weight.dtype)


def raise_opset(model: onnx.ModelProto) -> onnx.ModelProto:
    """A model with operators of version 11 at least; the model itself where it is new enough, or cannot be converted.

    TVM reads most older operators, but neither Slice nor Upsample by their attributes.
    """
    if opset_version(model) >= _OLDEST_OPSET:
        return model
    try:
        raised = without_numbers(model, lambda light: version_converter.convert_version(light, _OLDEST_OPSET))
    except Exception:  # noqa: BLE001  it raises errors of many kinds for what it does not know
        return model
    del raised.graph.value_info[:]  # a mask of Dropout was of floats
    constants = {tensor.name: tensor for tensor in raised.graph.initializer}
    constants |= {n.output[0]: a.t for n in raised.graph.node if n.op_type == "Constant" for a in n.attribute}
    for node in raised.graph.node:
        if node.op_type == "Resize":  # the converter forgets how positions were counted
            scales = constants.get(node.input[2])
            shrinks = scales is not None and numpy_helper.to_array(scales).min() < 1
            kept = [attribute for attribute in node.attribute if attribute.name == "mode"]
            counting = _COUNTING | {"nearest_mode": "ceil" if shrinks else "floor"}
            del node.attribute[:]
            node.attribute.extend([*kept, *(helper.make_attribute(*item) for item in counting.items())])
    return raised


def simplify(model: onnx.ModelProto, called: str) -> onnx.ModelProto:
    """A copy of a model with static inputs, without what follows from their shapes; known steps are written out."""
    simple, weights = without_weights(model)  # they need not pass through a file
    for _ in range(_MAX_ROUNDS):
        num_nodes = len(simple.graph.node)
        simple = write_out_loops(_optimized(simple, called))
        if len(simple.graph.node) == num_nodes:
            break
    graph = simple.graph
    graph.value_info.extend(types_as_before(simple, model))
    used, domains = set(uses(graph)), {node.domain for node in graph.node} | {""}
    for value in [value for value in graph.input if value.name in weights]:
        graph.input.remove(value)
    graph.initializer.extend(weight for name, weight in weights.items() if name in used)
    for opset in [opset for opset in simple.opset_import if opset.domain not in domains]:
        simple.opset_import.remove(opset)
    return simple


def give_outputs_nodes(model: onnx.ModelProto) -> None:
    """Puts a node before each output that is a constant, for a part gives what its nodes make. Changes `model`."""
    graph = model.graph
    outputs = {output.name for output in graph.output}
    for weight in graph.initializer:
        if weight.name in outputs:
            name, weight.name = weight.name, f"{weight.name}.constant"
            for node in graph.node:
                node.input[:] = [weight.name if taken == name else taken for taken in node.input]
            graph.node.insert(0, helper.make_node("Identity", [weight.name], [name]))


def _optimized(model: onnx.ModelProto, called: str) -> onnx.ModelProto:
    with scratch_directory() as scratch:
        optimized = Path(scratch, "optimized.onnx")
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.optimized_model_filepath = str(optimized)
        options.add_session_config_entry("optimization.constant_folding_max_output_size_in_bytes", _MAX_CONSTANT_BYTES)
        options.add_session_config_entry("session.disable_quant_qdq", "1")  # it would keep them apart for its kernels
        options.log_severity_level = 3  # errors
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        try:
            onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        except Exception as err:  # ONNX Runtime has an error class for each of its status codes, without a common base
            raise UserInputError(
                f"network={called}: ONNX Runtime cannot load it ({one_line(err)}); export it again"
            ) from err
        return onnx.load(optimized, format="protobuf")
