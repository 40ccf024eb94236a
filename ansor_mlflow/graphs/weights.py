"""Models without the numbers of their weights: what changes or types a graph needs none of them.

An ONNX model is a protobuf message of at most 2 GiB, and each copy of a weight in a message stays in memory until the
message is gone. So weights are never copied with the graph that they are left out of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from typing import Any

import onnx
from onnx import TensorProto, helper

from ansor_mlflow.graphs.walk import inputs_of, uses

MAX_SHAPE_ELEMENTS = 2**16
"""A tensor with more elements is not a shape that inference has to know the values of."""
_MAX_COMPUTED_ELEMENTS = 2**24
"""Constants that are computed with are folded up to here; beyond, the result would be as large as a network."""
_LAYERS = {"Conv", "ConvTranspose", "GRU", "Gather", "Gemm", "LSTM", "MatMul", "RNN"}
"""Operators whose constants are weights, of which nothing is computed beforehand."""


def with_weights(model: onnx.ModelProto, weights: Iterable[TensorProto]) -> onnx.ModelProto:
    """A copy of a model with other initializers; its own are never copied."""
    copy = onnx.ModelProto(**_fields(model, without="graph"))
    copy.graph.CopyFrom(onnx.GraphProto(**_fields(model.graph, without="initializer")))
    copy.graph.initializer.extend(weights)
    return copy


def without_numbers(model: onnx.ModelProto, change: Callable[[onnx.ModelProto], onnx.ModelProto]) -> onnx.ModelProto:
    """Applies a function of ONNX's that needs no more of weights than their types and shapes.

    Each of them writes the model as one message and reads it again, several times: seconds for half a gigabyte. So it
    gets a copy in which large weights are empty, and the model that it returns gets them back.
    """
    large = {weight.name: weight for weight in model.graph.initializer if is_large(weight)}
    light = with_weights(
        model,
        (
            TensorProto(name=weight.name, data_type=weight.data_type, dims=weight.dims)
            if weight.name in large
            else weight
            for weight in model.graph.initializer
        ),
    )
    changed = change(light)
    for weight in changed.graph.initializer:
        if weight.name in large:
            weight.CopyFrom(large[weight.name])
    return changed


def with_inputs_for(model: onnx.ModelProto, names: Collection[str]) -> onnx.ModelProto:
    """A copy in which some weights are inputs."""
    weights = {weight.name: weight for weight in model.graph.initializer}
    copy = with_weights(model, (weight for name, weight in weights.items() if name not in names))
    for value in [value for value in copy.graph.input if value.name in weights]:  # before IR version 4
        copy.graph.input.remove(value)
    copy.graph.input.extend(
        helper.make_tensor_value_info(name, weight.data_type, weight.dims)
        for name, weight in weights.items()
        if name in names
    )
    copy.ir_version = max(copy.ir_version, 4)
    return copy


def without_weights(model: onnx.ModelProto) -> tuple[onnx.ModelProto, dict[str, TensorProto]]:
    """A copy in which large weights are inputs, and these weights by name; it always fits into one message of 2 GiB."""
    graph = model.graph
    computed_with = {name for node in graph.node if node.op_type not in _LAYERS for name in inputs_of(node)}
    weights = {
        weight.name: weight
        for weight in graph.initializer
        if is_large(weight, _MAX_COMPUTED_ELEMENTS if weight.name in computed_with else MAX_SHAPE_ELEMENTS)
    }
    return with_inputs_for(model, weights), weights


def is_large(weight: TensorProto, max_elements: int = MAX_SHAPE_ELEMENTS) -> bool:
    """Whether a weight has more elements than a shape, or than another limit."""
    num_elements: int = math.prod(weight.dims)
    return num_elements > max_elements


def remove_unused_initializers(graph: onnx.GraphProto) -> None:
    """Removes them from the inputs, too, where older ONNX files list them."""
    unused = {initializer.name for initializer in graph.initializer} - set(uses(graph))
    for entries in (graph.initializer, graph.input):
        for entry in [entry for entry in entries if entry.name in unused]:
            entries.remove(entry)


def _fields(message: onnx.ModelProto | onnx.GraphProto, *, without: str) -> dict[str, Any]:
    """The fields of a message that are set, but for one, for the constructor of another message."""
    return {field.name: value for field, value in message.ListFields() if field.name != without}
