"""Which parts of a network TVM computes, found by trying, and why the others fall back to ONNX Runtime."""

from __future__ import annotations

import bisect
import contextlib
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import onnx

from ansor_mlflow.graphs import (
    GraphPart,
    ValueInfos,
    branches_of,
    extract,
    fallback_reasons,
    is_tensor,
    partition,
    producers_of,
    static_shape,
    uses,
    value_infos,
)
from ansor_mlflow.lowering.lower_graph import NotLoweredError

if TYPE_CHECKING:
    from tvm.ir import IRModule

LowerGraph = Callable[[onnx.ModelProto], "IRModule"]
"""Lowers a graph to fused functions, or raises `NotLoweredError`."""
LoweredPart = tuple[GraphPart, "IRModule | None"]
"""A part of the network with its functions, if it is one of TVM's."""

_DOMAINS = ("", "ai.onnx", "com.microsoft")
"""Domains of the operators that TVM knows."""


def lower_parts(
    model: onnx.ModelProto, lower_whole: LowerGraph, lower_node: LowerGraph, fallback: Mapping[str, str]
) -> list[LoweredPart]:
    """Lowers a simplified network in as few parts as possible, in the order in which they run.

    `lower_node` says sooner than `lower_whole` whether a node can be lowered. `fallback` says why a node stays with
    ONNX Runtime, whatever TVM could do, by an output of it.
    """
    values = value_infos(model)
    places = producers_of(model.graph)
    reasons = {places[output]: reason for output, reason in fallback.items() if output in places}
    reasons |= {**fallback_reasons(model), **_known_reasons(model, values)}
    if not reasons:
        with contextlib.suppress(NotLoweredError):
            return [(part, lower_whole(part.model)) for part in partition(model, {}, values)]
    reasons.update(_reasons_by_trial(model, values, lower_node, reasons))
    while True:
        lowered: list[LoweredPart] = []
        for part in partition(model, reasons, values):
            try:
                lowered.append((part, lower_whole(part.model) if part.runs_in == "tvm" else None))
            except NotLoweredError as err:
                culprit = part.model.graph.node[_first_that_fails(part.model, lower_whole)]
                reasons[places[next(filter(None, culprit.output))]] = str(err)
                break
        else:
            return lowered


def _known_reasons(model: onnx.ModelProto, values: ValueInfos) -> dict[int, str]:
    """Why nodes stay with ONNX Runtime that need not be tried."""
    reasons = {}
    for index, node in enumerate(model.graph.node):
        if any(branches_of(node)):
            reasons[index] = "control flow"
        elif node.domain not in _DOMAINS:
            reasons[index] = f"an operator of {node.domain}"
        elif not all(is_tensor(values.get(name)) for name in (*node.input, *node.output)):
            reasons[index] = "values that are no tensors"
        elif any(static_shape(values.get(name)) is None for name in (*node.input, *node.output) if name):
            reasons[index] = "shapes that depend on values"
    return reasons


def _reasons_by_trial(
    model: onnx.ModelProto, values: ValueInfos, lower_node: LowerGraph, known: Mapping[int, str]
) -> dict[int, str]:
    """Why TVM cannot lower a node; nodes that differ in their names alone are tried once."""
    tried: dict[bytes, str] = {}
    reasons = {}
    num_uses = Counter(uses(model.graph))
    for index in range(len(model.graph.node)):
        if index in known:
            continue
        alone = extract(model, [index], values, num_uses=num_uses)
        key = _without_names(alone)
        if key not in tried:
            tried[key] = _why_not(alone, lower_node)
        if tried[key]:
            reasons[index] = tried[key]
    return reasons


def _why_not(model: onnx.ModelProto, lower_graph: LowerGraph) -> str:
    try:
        lower_graph(model)
    except NotLoweredError as err:
        return str(err)
    return ""


def _without_names(model: onnx.ModelProto) -> bytes:
    """A key of a model of one node: all but its names."""
    graph = onnx.GraphProto()
    graph.CopyFrom(model.graph)
    (node,) = graph.node
    names = {name: f"{number}" for number, name in enumerate(dict.fromkeys([*node.input, *node.output])) if name}
    node.name = graph.name = ""
    for entries in (node.input, node.output):
        entries[:] = [names.get(name, "") for name in entries]
    for tensor in (*graph.initializer, *graph.input, *graph.output):
        tensor.name = names.get(tensor.name, "")
    return hashlib.sha256(graph.SerializeToString(deterministic=True)).digest()


def _first_that_fails(model: onnx.ModelProto, lower_whole: LowerGraph) -> int:
    """Place of the node with which the graph up to it cannot be lowered any more, by bisection."""
    values, num_nodes = value_infos(model), len(model.graph.node)

    def fails(last: int) -> bool:
        return bool(_why_not(extract(model, range(last + 1), values), lower_whole))

    return bisect.bisect_left(range(num_nodes), True, hi=num_nodes - 1, key=fails)
