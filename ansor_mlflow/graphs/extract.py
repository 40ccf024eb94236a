"""Cuts models out of a graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import onnx
from onnx import helper

from ansor_mlflow.graphs.types import ValueInfos
from ansor_mlflow.graphs.walk import inputs_of, producers_of, uses


def extract(
    model: onnx.ModelProto,
    indices: Sequence[int],
    values: ValueInfos,
    outputs: Sequence[str] | None = None,
    num_uses: Counter[str] | None = None,
) -> onnx.ModelProto:
    """The model of some nodes of a graph, given by their places, which takes what they need of the others.

    It returns `outputs`, by default all that others need of these nodes. `num_uses` spares counting how often each
    tensor is taken.
    """
    graph = model.graph
    nodes = [graph.node[index] for index in indices]
    constants = {weight.name: weight for weight in graph.initializer}
    produced = {name for node in nodes for name in node.output if name}
    needed = dict.fromkeys(name for node in nodes for name in inputs_of(node) if name and name not in produced)
    if outputs is None:
        total = Counter(uses(graph)) if num_uses is None else num_uses
        inside = Counter(name for node in nodes for name in inputs_of(node))
        outputs = [name for node in nodes for name in node.output if name and total[name] > inside[name]]
    return helper.make_model(
        helper.make_graph(
            nodes,
            graph.name,
            [values[name] for name in needed if name in values and name not in constants],  # a branch has names, too
            [values.get(name) or onnx.ValueInfoProto(name=name) for name in outputs],
            [constants[name] for name in needed if name in constants],
            value_info=[values[name] for name in sorted(produced - set(outputs)) if name in values],
        ),
        opset_imports=model.opset_import,
        ir_version=max(model.ir_version, 4),
        functions=model.functions,
    )


def ancestors(graph: onnx.GraphProto, tensors: Iterable[str], given: Collection[str] = ()) -> list[int]:
    """Places of the nodes that compute tensors, in order; those that are given need not be computed."""
    producers = producers_of(graph)
    indices: set[int] = set()
    left = [name for name in tensors if name not in given]
    while left:
        index = producers.get(left.pop())
        if index is not None and index not in indices:
            indices.add(index)
            left += [name for name in inputs_of(graph.node[index]) if name not in given]
    return sorted(indices)
