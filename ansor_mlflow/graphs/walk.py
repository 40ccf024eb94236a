"""Reads ONNX graphs: their nodes with those in branches, what a node takes, and its attributes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import onnx
from onnx import helper


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


def constants_of(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.TensorProto]:
    """Yields the tensors that are attributes of nodes, and all tensors of their branches."""
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
        for branch in branches_of(node):
            yield from tensors_of(branch)


def tensors_of(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
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
