"""Takes the branches that are decided before a network is called: `If` whose condition is known.

ONNX Runtime does so, too, and may crash over it where a branch holds others (version 1.31).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx.reference import ReferenceEvaluator

from ansor_mlflow.networks.inputs.values import add_weights

_MAX_ANCESTORS = 64
"""A condition that takes more nodes than these is left as it is."""


def take_known_branches(model: onnx.ModelProto) -> None:
    """Puts the nodes of the branch that is taken in the place of every `If` whose condition is known. Changes `model`.

    Known is what follows from initializers and constants alone.
    """
    graph = model.graph
    weights = {weight.name: weight for weight in graph.initializer}
    makers = {output: index for index, node in enumerate(graph.node) for output in node.output}
    taken: dict[str, onnx.GraphProto] = {}
    for node in graph.node:
        if node.op_type == "If" and node.input and node.output:
            condition = _known_value(model, weights, makers, node.input[0])
            branch = None if condition is None or condition.size != 1 else _branch(node, is_true=bool(condition.item()))
            if branch is not None:
                taken[node.output[0]] = branch
    if not taken:
        return
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        branch = taken.get(node.output[0]) if node.op_type == "If" and node.output else None
        nodes.extend([node] if branch is None else _inlined(model, node, branch))
    del graph.node[:]
    graph.node.extend(nodes)
    take_known_branches(model)  # those within


def _branch(node: onnx.NodeProto, *, is_true: bool) -> onnx.GraphProto | None:
    """The branch of an `If` that is taken; None where the node is damaged, which shape inference reports."""
    wanted = "then_branch" if is_true else "else_branch"
    branch = next((attribute.g for attribute in node.attribute if attribute.name == wanted), None)
    return branch if branch is not None and len(branch.output) == len(node.output) else None


def _inlined(model: onnx.ModelProto, node: onnx.NodeProto, branch: onnx.GraphProto) -> Iterable[onnx.NodeProto]:
    """The nodes of a branch with names that are its own, and what hands its outputs over; its weights go to `model`."""
    inner = onnx.GraphProto()
    inner.CopyFrom(branch)
    names = {name: f"{node.output[0]}/{name}" for name in _own_names(inner)}
    for weight in inner.initializer:
        weight.name = names[weight.name]
    add_weights(model, inner.initializer)
    for node_ in inner.node:
        _rename(node_, names)
    identities = (
        onnx.helper.make_node("Identity", [names.get(value.name, value.name)], [output], name=f"{node.name}/{output}")
        for value, output in zip(inner.output, node.output, strict=True)
        if output
    )
    return [*inner.node, *identities]


def _rename(node: onnx.NodeProto, names: Mapping[str, str]) -> None:
    """Renames the tensors of a node, and those that its branches take from outside."""
    for tensors in (node.input, node.output):
        renamed = [names.get(name, name) for name in tensors]
        del tensors[:]
        tensors.extend(renamed)
    for attribute in node.attribute:
        if attribute.HasField("g"):
            own = set(_own_names(attribute.g))
            from_outside = {name: other for name, other in names.items() if name not in own}
            for inner in attribute.g.node:
                _rename(inner, from_outside)
            for output in attribute.g.output:
                output.name = from_outside.get(output.name, output.name)


def _own_names(graph: onnx.GraphProto) -> Iterator[str]:
    """The tensors of a branch that do not come from outside."""
    yield from (value.name for value in (*graph.input, *graph.initializer))
    yield from (name for node in graph.node for name in node.output if name)


def _known_value(
    model: onnx.ModelProto, weights: Mapping[str, onnx.TensorProto], makers: Mapping[str, int], name: str
) -> npt.NDArray[Any] | None:
    """The value of a tensor that follows from initializers and constants alone.

    Args:
        model: The model.
        weights: Its initializers by name.
        makers: The index of the node that each tensor comes from.
        name: The tensor.
    """
    needed = set[int]()
    wanted, seen = [name], {name}
    while wanted:
        tensor = wanted.pop()
        if tensor in weights:
            continue
        if tensor not in makers or len(needed) == _MAX_ANCESTORS:
            return None
        needed.add(makers[tensor])
        others = {other for other in model.graph.node[makers[tensor]].input if other} - seen
        seen |= others
        wanted.extend(others)
    graph = onnx.helper.make_graph(
        [model.graph.node[index] for index in sorted(needed)],
        "condition",
        [],
        [onnx.helper.make_empty_tensor_value_info(name)],
        [weights[tensor] for tensor in seen if tensor in weights],
    )
    try:
        (value,) = ReferenceEvaluator(onnx.helper.make_model(graph, opset_imports=model.opset_import)).run(None, {})
    except Exception:  # noqa: BLE001 - the evaluator has no error class of its own
        return None
    return np.asarray(value)
