"""Reads ONNX graphs: nodes with those in branches, what a node takes, attributes, and copies without weights.

An ONNX model is a protobuf message of at most 2 GiB, and each copy of a weight in a message stays in memory until the
message is gone. So weights are never copied with the graph that they are left out of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import onnx
from onnx import TensorProto, helper

MAX_SHAPE_ELEMENTS = 2**16
"""A tensor with more elements is not a shape that inference has to know the values of."""
_MAX_COMPUTED_ELEMENTS = 2**24
"""Constants that are computed with are folded up to here; beyond, the result would be as large as a network."""
_LAYERS = {"Conv", "ConvTranspose", "GRU", "Gather", "Gemm", "LSTM", "MatMul", "RNN"}
"""Operators whose constants are weights, of which nothing is computed beforehand."""


def branches_of(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yields the graphs that are attributes of a node, as those of `If`, `Loop` and `Scan` are."""
    for attribute in node.attribute:
        if attribute.HasField("g"):  # a damaged file may not say that it is a graph
            yield attribute.g
        yield from attribute.graphs


def nodes_of(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yields nodes, and those in their branches."""
    for node in nodes:
        yield node
        for branch in branches_of(node):
            yield from nodes_of(branch.node)


def constants_of(nodes: Iterable[onnx.NodeProto]) -> Iterator[TensorProto]:
    """Yields the tensors that are attributes of nodes, and all tensors of their branches."""
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
        for branch in branches_of(node):
            yield from tensors_of(branch)


def tensors_of(graph: onnx.GraphProto) -> Iterator[TensorProto]:
    """Yields the weights of a graph and the constants of its nodes, also of those in a branch."""
    yield from graph.initializer
    yield from constants_of(graph.node)


def uses(graph: onnx.GraphProto) -> Iterator[str]:
    """Yields each name as often as a node, also one in a branch, or an output takes it."""
    for node in graph.node:
        yield from inputs_of(node)
    yield from (output.name for output in graph.output)


def inputs_of(node: onnx.NodeProto) -> Iterator[str]:
    """Yields the names that a node takes, and those that its branches take."""
    yield from node.input
    for branch in branches_of(node):
        yield from uses(branch)


def rename(node: onnx.NodeProto, names: Mapping[str, str]) -> None:
    """Renames the tensors of a node, and those that its branches take from outside."""
    for tensors in (node.input, node.output):
        tensors[:] = [names.get(name, name) for name in tensors]
    for attribute in node.attribute:
        if attribute.HasField("g"):
            own = set(own_names(attribute.g))
            from_outside = {name: other for name, other in names.items() if name not in own}
            for inner in attribute.g.node:
                rename(inner, from_outside)
            for output in attribute.g.output:
                output.name = from_outside.get(output.name, output.name)


def own_names(graph: onnx.GraphProto) -> Iterator[str]:
    """The tensors of a branch that do not come from outside."""
    yield from (value.name for value in (*graph.input, *graph.initializer))
    yield from (name for node in graph.node for name in node.output if name)


def input_of(node: onnx.NodeProto, position: int) -> str:
    """Name of an input; empty where the node has none there."""
    return str(node.input[position]) if position < len(node.input) else ""


def producers_of(graph: onnx.GraphProto) -> dict[str, int]:
    """The place of the node that makes each tensor."""
    return {name: index for index, node in enumerate(graph.node) for name in node.output if name}


def attributes_of(node: onnx.NodeProto) -> dict[str, Any]:
    """A node's attributes by their names; strings are text."""
    values = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in values.items()}


def opset_version(model: onnx.ModelProto) -> int:
    """Version of ONNX's own operators."""
    return next((int(opset.version) for opset in model.opset_import if opset.domain in ("", "ai.onnx")), 1)


def with_weights(model: onnx.ModelProto, weights: Iterable[TensorProto]) -> onnx.ModelProto:
    """A copy of a model with other initializers; its own are never copied."""
    of_model = {field.name: value for field, value in model.ListFields() if field.name != "graph"}
    of_graph = {field.name: value for field, value in model.graph.ListFields() if field.name != "initializer"}
    copy = onnx.ModelProto(**of_model)
    copy.graph.CopyFrom(onnx.GraphProto(**of_graph))
    copy.graph.initializer.extend(weights)
    return copy


def without_numbers(model: onnx.ModelProto, change: Callable[[onnx.ModelProto], onnx.ModelProto]) -> onnx.ModelProto:
    """Applies a function of ONNX's that needs no more of weights than their types and shapes.

    Each of them writes the model as one message and reads it again, several times: seconds for half a gigabyte. So it
    gets a copy in which large weights are empty, and the model that it returns gets them back.
    """
    large = {weight.name: weight for weight in model.graph.initializer if is_large(weight)}
    weights = (
        TensorProto(name=weight.name, data_type=weight.data_type, dims=weight.dims) if weight.name in large else weight
        for weight in model.graph.initializer
    )
    changed = change(with_weights(model, weights))
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
    return bool(math.prod(weight.dims) > max_elements)


def remove_unused_initializers(graph: onnx.GraphProto) -> None:
    """Removes them from the inputs, too, where older ONNX files list them."""
    unused = {initializer.name for initializer in graph.initializer} - set(uses(graph))
    for entries in (graph.initializer, graph.input):
        for entry in [entry for entry in entries if entry.name in unused]:
            entries.remove(entry)
