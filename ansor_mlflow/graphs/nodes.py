"""What the rewritings of ONNX graphs share."""

from __future__ import annotations

from collections.abc import Iterator

import onnx


def uses(graph: onnx.GraphProto) -> Iterator[str]:
    """Yields each name as often as a node, also one in a branch, or an output takes it."""
    for node in graph.node:
        yield from node.input
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from uses(attribute.g)
    yield from (output.name for output in graph.output)


def attribute(node: onnx.NodeProto, name: str, default: float) -> float:
    """The number that is a node's attribute of that name, or the default."""
    return next((float(onnx.helper.get_attribute_value(a)) for a in node.attribute if a.name == name), default)


def remove_unused_initializers(graph: onnx.GraphProto) -> None:
    """Removes them from the inputs, too, where older ONNX files list them."""
    unused = {initializer.name for initializer in graph.initializer} - set(uses(graph))
    for entries in (graph.initializer, graph.input):
        for entry in [entry for entry in entries if entry.name in unused]:
            entries.remove(entry)
