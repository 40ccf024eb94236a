"""Types of tensors, as ONNX Runtime infers them where ONNX does not, or infers what no run gives.

ONNX knows nothing of the sizes behind operators of other domains, and counts the bins of `STFT` wrongly. What runs
such an operator is ONNX Runtime, so that its word counts. The numbers of large weights decide no type, and are left out
of what is inferred from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper

from ansor_mlflow.networks.inputs.trials import run_briefly, start_session
from ansor_mlflow.tensors import TensorSpec, random_inputs

MAX_SHAPE_ELEMENTS = 2**16
"""A tensor with more elements is not a shape that inference has to know the values of."""
_MEASURED_DOMAIN = "ai.onnx.ml"
"""Its operators on tensors have outputs of sizes that follow from those of their inputs, which nobody infers."""

_Shape = tuple[int, ...]


def corrected_types(
    model: onnx.ModelProto, inputs: Sequence[TensorSpec], directory: Path | None
) -> list[onnx.ValueInfoProto]:
    """Types of tensors with which ONNX infers all others as ONNX Runtime does.

    Args:
        model: Model with static inputs.
        inputs: Its inputs; with them it is run where nobody infers a shape.
        directory: Where the weights are that are not in the model.

    Returns:
        As few as that takes: for most models none.
    """
    measured: list[onnx.ValueInfoProto] = []
    while True:
        types, shapes = _inferred(model, measured)
        unknown = [
            name
            for node in model.graph.node
            if node.domain == _MEASURED_DOMAIN and all(name in shapes for name in node.input if name)
            for name in node.output
            if name and name not in shapes
        ]
        found = _measured(model, unknown, inputs, directory) if unknown else []
        if not found:
            return types
        measured += found


def types_as_before(model: onnx.ModelProto, before: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """As `corrected_types`, for a model that was made of one with such types; nothing is run."""
    produced = {name for node in model.graph.node if node.domain == _MEASURED_DOMAIN for name in node.output}
    return _inferred(model, [value for value in before.graph.value_info if value.name in produced])[0]


def without_numbers(model: onnx.ModelProto, change: Callable[[onnx.ModelProto], onnx.ModelProto]) -> onnx.ModelProto:
    """Applies a function of ONNX's that needs no more of weights than their types and shapes.

    Each of them writes the model as one message and reads it again, several times: seconds for half a gigabyte.

    Args:
        model: Stays as it is.
        change: Gets a copy in which large weights are empty, and returns a model with the same weights.

    Returns:
        What the function returned, with the weights.
    """
    large = {weight.name: weight for weight in model.graph.initializer if math.prod(weight.dims) > MAX_SHAPE_ELEMENTS}
    light = onnx.ModelProto(**message_fields(model, without={"graph"}))
    light.graph.CopyFrom(onnx.GraphProto(**message_fields(model.graph, without={"initializer"})))
    light.graph.initializer.extend(
        onnx.TensorProto(name=weight.name, data_type=weight.data_type, dims=weight.dims)
        if weight.name in large
        else weight
        for weight in model.graph.initializer
    )
    changed = change(light)
    for weight in changed.graph.initializer:
        if weight.name in large:
            weight.CopyFrom(large[weight.name])
    return changed


def with_inputs_for(model: onnx.ModelProto, names: Collection[str]) -> onnx.ModelProto:
    """A copy in which some weights are inputs; their numbers are never copied."""
    graph = model.graph
    weights = {weight.name for weight in graph.initializer}  # before IR version 4 they are inputs, too
    copy = onnx.ModelProto(**message_fields(model, without={"graph"}))
    copy.graph.CopyFrom(onnx.GraphProto(**message_fields(graph, without={"initializer", "input"})))
    copy.graph.initializer.extend(weight for weight in graph.initializer if weight.name not in names)
    copy.graph.input.extend(value for value in graph.input if value.name not in weights)
    copy.graph.input.extend(
        helper.make_tensor_value_info(weight.name, weight.data_type, weight.dims)
        for weight in graph.initializer
        if weight.name in names
    )
    copy.ir_version = max(copy.ir_version, 4)
    return copy


def message_fields(message: onnx.ModelProto | onnx.GraphProto, *, without: set[str]) -> dict[str, Any]:
    """The fields of a message that are set, for the constructor of another one: weights that are left out are never
    copied.
    """
    return {field.name: value for field, value in message.ListFields() if field.name not in without}


def _inferred(
    model: onnx.ModelProto, known: Iterable[onnx.ValueInfoProto]
) -> tuple[list[onnx.ValueInfoProto], dict[str, _Shape]]:
    """The types that ONNX has to be told beside those that are known, and the shapes of all tensors that have one."""
    light = _without_types(model)
    types = list(known)
    light.graph.value_info.extend(types)
    theirs = _onnxruntimes_types(light)
    while True:
        del light.graph.value_info[:]
        light.graph.value_info.extend(types)
        graph = onnx.shape_inference.infer_shapes(light, data_prop=True).graph
        shapes = {
            v.name: s for v in (*graph.input, *graph.value_info, *graph.output) if (s := static_shape(v)) is not None
        }
        told = {value.name for value in types}
        differ = {
            name for name, value in theirs.items() if name not in told and shapes.get(name) != static_shape(value)
        }
        first = [
            theirs[name]
            for node in graph.node
            if differ.isdisjoint(node.input)
            for name in node.output
            if name in differ
        ]
        if not first:
            return types, shapes | {weight.name: tuple(weight.dims) for weight in graph.initializer}
        types += first


def _without_types(model: onnx.ModelProto) -> onnx.ModelProto:
    """A model whose large weights are inputs, with neither types nor shapes of what it computes."""
    large = {weight.name for weight in model.graph.initializer if math.prod(weight.dims) > MAX_SHAPE_ELEMENTS}
    light = with_inputs_for(model, large)
    del light.graph.value_info[:]
    for output in light.graph.output:
        output.ClearField("type")
    return light


def _onnxruntimes_types(model: onnx.ModelProto) -> Mapping[str, onnx.ValueInfoProto]:
    """Types of the nodes' outputs, where ONNX Runtime infers a static shape; none, if it does not load the model.

    A shape without axes is left out: ONNX Runtime writes what it does not know in the same way.
    """
    try:
        session = start_session(_with_outputs(model, _produced(model)).SerializeToString(), None, optimized=False)
    except Exception:  # noqa: BLE001 - ONNX Runtime has an error class for each of its status codes, protobuf its own
        return {}
    return {
        output.name: helper.make_tensor_value_info(output.name, _ELEMENT_TYPES[output.type], output.shape)
        for output in session.get_outputs()
        if output.type in _ELEMENT_TYPES and output.shape and all(isinstance(size, int) for size in output.shape)
    }


def _measured(
    model: onnx.ModelProto, names: Sequence[str], inputs: Sequence[TensorSpec], directory: Path | None
) -> list[onnx.ValueInfoProto]:
    """Types of tensors in a run; none, if ONNX Runtime does not run the model, or not for long."""
    try:
        session = start_session(_with_outputs(model, names).SerializeToString(), directory, optimized=False)
        arrays = run_briefly(session, names, random_inputs(inputs, seed=0)) or []
    except Exception:  # noqa: BLE001 - as above
        return []
    return [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in zip(names, arrays, strict=False)  # none of a run that is too long
        if isinstance(array, np.ndarray)
    ]


def _produced(model: onnx.ModelProto) -> list[str]:
    return [name for node in model.graph.node for name in node.output if name]


def _with_outputs(model: onnx.ModelProto, names: Iterable[str]) -> onnx.ModelProto:
    """A copy of a model that returns more tensors."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    there = {output.name for output in copy.graph.output}
    copy.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in there)
    return copy


def static_shape(value: onnx.ValueInfoProto | None) -> _Shape | None:
    """The shape of a tensor; None where it is not known, or the value is no tensor."""
    if value is None or not value.type.tensor_type.HasField("shape"):
        return None
    dims = value.type.tensor_type.shape.dim
    return tuple(dim.dim_value for dim in dims) if all(dim.HasField("dim_value") for dim in dims) else None


_ELEMENT_TYPES = {f"tensor({name.lower()})": number for name, number in onnx.TensorProto.DataType.items()}
"""ONNX's numbers of element types by ONNX Runtime's names of tensors."""
