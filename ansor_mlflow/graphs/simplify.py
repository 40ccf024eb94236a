"""Simplifies graphs: raises old operators, computes what is constant, and folds scales into weights."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper, version_converter

from ansor_mlflow.errors import UserInputError, one_line
from ansor_mlflow.files import scratch_directory
from ansor_mlflow.graphs.operators import write_out_loops
from ansor_mlflow.graphs.types import FLOATS, types_as_before
from ansor_mlflow.graphs.walk import (
    attributes_of,
    nodes_of,
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
_CONVOLUTIONS = {"Conv", "ConvTranspose"}
_LAYERS = {*_CONVOLUTIONS, "GRU", "Gemm", "LSTM", "MatMul", "RNN"}
_TINY, _UNSEEN = 2.0**-102, 2.0**-40
"""A weight whose product with an activation may be subnormal, and what of the largest weight a sum does not show."""
_COUNTING = {"coordinate_transformation_mode": "asymmetric"}
"""How Upsample, and Resize before version 11, count positions. ONNX Runtime rounds them up where a tensor shrinks."""


def fold_scales(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of the model without what only scales and shifts the channels of a convolution with constant weights.

    That is a batch normalisation with fixed statistics, or an addition or product with a constant for each channel, or
    for all: γ (W∗x + b − μ) / √(σ² + ε) + β = (γ/√(σ²+ε) W)∗x + (b − μ) γ/√(σ²+ε) + β. TVM then makes simpler
    functions, and need not evaluate the constants operation by operation, which takes longer than all other lowering.
    Two factors that follow each other become one, too.
    """
    folded = onnx.ModelProto()
    folded.CopyFrom(model)
    graph = folded.graph
    constants = {initializer.name: initializer for initializer in graph.initializer}
    producers = {output: node for node in graph.node for output in node.output}
    num_uses = Counter(uses(graph))
    for node in list(graph.node):
        scaling = _scaling(node, constants)
        before = None if scaling is None else producers.get(scaling.data)
        if scaling is None or before is None or num_uses[scaling.data] != 1:
            continue
        values = _folded(before, scaling, constants)
        if not values or not all(np.isfinite(value).all() for value in values):
            continue
        names = [f"{node.output[0]}.folded_{place}" for place in range(len(values))]
        tensors = [numpy_helper.from_array(*item) for item in zip(values, names, strict=True)]
        constants |= dict(zip(names, tensors, strict=True))
        graph.initializer.extend(tensors)
        if before.op_type in _CONVOLUTIONS:
            before.input[1:] = names
        else:
            data = before.input[1 if before.input[0] in constants else 0]
            before.op_type = "Mul"
            before.input[:] = [data, *names]
        before.output[0] = node.output[0]
        producers[node.output[0]] = before
        graph.node.remove(node)
    remove_unused_initializers(graph)
    return folded


@dataclass(frozen=True)
class _Scaling:
    """What a node makes of a tensor: `scale` times it, plus `shift`; constants of float64 that are broadcast."""

    data: str
    scale: np.ndarray
    shift: np.ndarray
    is_of_channels: bool
    """Whether both have an element for each channel, and no other axis."""


def _scaling(node: onnx.NodeProto, constants: dict[str, onnx.TensorProto]) -> _Scaling | None:
    if node.op_type == "BatchNormalization":
        is_training = attributes_of(node).get("training_mode", 0) or len(list(filter(None, node.output))) > 1
        if is_training or not {*node.input[1:]} <= constants.keys():
            return None
        gamma, beta, mean, variance = (_float64(constants[name]) for name in node.input[1:5])
        scale = gamma / np.sqrt(variance + attributes_of(node).get("epsilon", 1e-5))
        return _Scaling(node.input[0], scale, beta - mean * scale, is_of_channels=True)
    known = [place for place, name in enumerate(node.input) if name in constants]
    if node.op_type not in ("Add", "Div", "Mul", "Sub") or len(known) != 1:
        return None
    (place,) = known
    tensor, one, zero = constants[node.input[place]], np.ones(()), np.zeros(())
    if tensor.data_type not in FLOATS:
        return None
    value = _float64(tensor)
    if node.op_type == "Div" and (place == 0 or not value.all()):
        return None
    scale, shift = one, zero
    if node.op_type == "Mul":
        scale = value
    elif node.op_type == "Div":
        scale = 1 / value
    elif node.op_type == "Add":
        shift = value
    else:
        scale, shift = (-one, value) if place == 0 else (one, -value)
    return _Scaling(node.input[1 - place], scale, shift, is_of_channels=False)


def _folded(node: onnx.NodeProto, scaling: _Scaling, constants: dict[str, onnx.TensorProto]) -> list[np.ndarray]:
    """The constants of a node that does what follows it, too: weights and bias [O], or a factor; none if it cannot."""
    if node.op_type in _CONVOLUTIONS:
        if not {*node.input[1:]} <= constants.keys():
            return []
        weight, *biases = (numpy_helper.to_array(constants[name]) for name in node.input[1:])
        is_transposed, groups = node.op_type == "ConvTranspose", int(attributes_of(node).get("group", 1))
        channels = weight.shape[1] * groups if is_transposed else weight.shape[0]
        pair = [_of_channels(value, weight.ndim, channels, scaling) for value in (scaling.scale, scaling.shift)]
        if any(value is None for value in pair):
            return []
        scale, shift = (np.broadcast_to(value, channels) for value in pair if value is not None)
        bias = sum(biases, np.zeros(1)) * scale + shift
        if not is_transposed:  # [O, I, …]
            scaled = weight * scale.reshape(-1, *[1] * (weight.ndim - 1))
        else:  # [I, O / groups, …], of which each group has its part of I
            per_group = scale.reshape(groups, 1, -1, *[1] * (weight.ndim - 2))
            scaled = (weight.reshape(groups, -1, *weight.shape[1:]) * per_group).reshape(weight.shape)
        needs_bias = bool(biases) or shift.any()
        return [values.astype(weight.dtype) for values in (scaled, *([bias] if needs_bias else []))]
    before = _scaling(node, constants) if node.op_type in ("Div", "Mul") else None
    if before is None or scaling.shift.any() or before.scale.size * scaling.scale.size != 1:
        return []
    dtype = numpy_helper.to_array(constants[node.input[1 if node.input[1] in constants else 0]]).dtype
    return [(before.scale * scaling.scale).astype(dtype)]


def _of_channels(value: np.ndarray, rank: int, channels: int, scaling: _Scaling) -> np.ndarray | None:
    """A constant as one for each channel, or for all; None where it differs along another axis of a tensor."""
    if scaling.is_of_channels or (value.size == 1 and value.ndim <= rank):
        return value.reshape(-1)
    is_of_channels = value.size == channels and rank - 1 <= value.ndim <= rank and value.shape[1 - rank] == channels
    return value.reshape(-1) if is_of_channels else None


def _float64(tensor: onnx.TensorProto) -> np.ndarray:
    return numpy_helper.to_array(tensor).astype(np.float64)


def without_tiny_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """A model whose layers have zeros for weights that nothing sees in a sum; the model itself where there are none.

    Training lets weights decay to subnormal numbers, for each of which an Intel CPU takes some 150 cycles: a layer of
    a text detector took 34 ms instead of 0.6. What is below 2⁻¹⁰² becomes zero, so that products with activations stay
    normal, too, if the largest weight of the tensor is 2⁴⁰ times larger; subnormal numbers do in any case.
    """
    graph, weights = model.graph, set[str]()
    others = {output.name for output in graph.output}
    for node in nodes_of(graph.node):
        (weights if node.op_type in _LAYERS else others).update(node.input)
    cleaned = [
        numpy_helper.from_array(np.where(is_tiny, np.float32(0), values), tensor.name)
        for tensor in graph.initializer
        if tensor.data_type == onnx.TensorProto.FLOAT and tensor.name in weights - others
        if (is_tiny := _are_tiny(values := numpy_helper.to_array(tensor))).any()
    ]
    if not cleaned:
        return model
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    of_name = {tensor.name: tensor for tensor in cleaned}
    for tensor in copy.graph.initializer:
        if tensor.name in of_name:
            tensor.CopyFrom(of_name[tensor.name])
    return copy


def _are_tiny(values: np.ndarray) -> np.ndarray:
    sizes, smallest = np.abs(values), float(np.finfo(np.float32).tiny)
    limit = max(smallest, min(_TINY, float(sizes.max(initial=0)) * _UNSEEN))
    is_tiny: np.ndarray = np.logical_and(sizes > 0, sizes < limit)
    return is_tiny


def raise_opset(model: onnx.ModelProto, least: int = _OLDEST_OPSET) -> onnx.ModelProto:
    """A model with operators of a version at least; the model itself where it is new enough, or cannot be converted.

    TVM reads most older operators, but neither Slice nor Upsample by their attributes.
    """
    if opset_version(model) >= least:
        return model
    try:
        raised = without_numbers(model, lambda light: version_converter.convert_version(light, least))
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
            onnxruntime.InferenceSession(
                model.SerializeToString(),
                options,
                providers=["CPUExecutionProvider"],
                disabled_optimizers=["MatMulAddFusion"],  # it reshapes products, and what follows stays outside
            )
        except Exception as err:  # ONNX Runtime has an error class for each of its status codes, without a common base
            raise UserInputError(
                f"network={called}: ONNX Runtime cannot load it ({one_line(err)}); export it again"
            ) from err
        return onnx.load(optimized, format="protobuf")
