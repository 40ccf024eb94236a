"""ONNX → parts that TVM can compute, found by trying → Relax → layout → fused tasks.

A tuned schedule is found again by the structural hash of its function, so whatever changes a function here makes
its older records useless: raise `LOWERING_VERSION` with a change that concerns most networks. Where one concerns few
functions, these are as if they had not been tuned.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import onnx

from ansor_mlflow.device import platform_of, vector_lanes, weight_bits
from ansor_mlflow.errors import UserInputError
from ansor_mlflow.graphs import (
    GraphPart,
    PaddedLayer,
    ValueInfos,
    best_padding,
    branches_of,
    extract,
    fallback_reasons,
    fold_scales,
    give_outputs_nodes,
    has_weights_of,
    is_tensor,
    keep_bytes,
    layers_to_pad,
    pad_output_channels,
    partition,
    producers_of,
    raise_opset,
    rewrite_operators,
    segments,
    simplify,
    static_shape,
    uses,
    value_infos,
    without_tiny_weights,
)
from ansor_mlflow.lowering.lower_graph import NotLoweredError, lower_graph, lower_node
from ansor_mlflow.lowering.network import LoweredNetwork, NetworkPart, TuningTask, short_name
from ansor_mlflow.settings import NO_FALLBACK, FallbackReasons, LoweringSettings, Padding
from ansor_mlflow.trials import TaskInfo

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.target import Target


LOWERING_VERSION = 8
"""Provenance of records: two lowerings with different versions may give different tasks for one network."""
_MAX_SHOWN = 3
_DOMAINS = ("", "ai.onnx", "com.microsoft")
"""Domains of the operators that TVM knows."""
_LowerGraph = Callable[[onnx.ModelProto], "IRModule"]
"""Lowers a graph to fused functions, or raises `NotLoweredError`."""
_LoweredPart = tuple[GraphPart, "IRModule | None"]
"""A part of the network with its functions, if it is one of TVM's."""

_DEFAULTS = LoweringSettings()


def lower(
    model: onnx.ModelProto, target: Target, settings: LoweringSettings = _DEFAULTS, called: str = ""
) -> LoweredNetwork:
    """Lowers an ONNX model with static inputs to fused functions for `target`; see `lower_sizes`."""
    return lower_sizes([model], target, settings, called or model.graph.name)


def lower_sizes(
    models: Iterable[onnx.ModelProto],
    target: Target,
    settings: LoweringSettings,
    called: str,
    fallback: FallbackReasons = NO_FALLBACK,
    num_segments: int = 1,
) -> LoweredNetwork:
    """Lowers a network in each of its sizes. Tasks that are the same in several sizes are one.

    One that TVM computes all of may be cut into segments, so that each of them can be timed: see `graphs.segments`.
    """
    from ansor_mlflow.lowering.relax_passes import join_modules

    sizes = [
        _lower_size(model, target, settings, called, fallback.get(number, {}), num_segments)
        for number, model in enumerate(models)
    ]
    parts: list[NetworkPart] = []
    modules: dict[str, IRModule] = {}
    for size, (lowered, _) in enumerate(sizes):
        for graph, part in lowered:
            name = f"part{len(parts)}" if part is not None else ""
            parts.append(NetworkPart(graph, name, size))
            if part is not None:
                modules[name] = part
    is_whole = len(parts) == len(modules) == 1
    mod = modules["part0"] if is_whole else join_modules(modules)
    tasks = _extract_tasks(mod, target)
    if settings.algorithm != "direct" and platform_of(target).has_sketches:
        from ansor_mlflow.lowering.algorithms import with_algorithms

        tasks = with_algorithms(mod, tasks, settings.algorithm, called)
    hard_to_tile = tuple(dict.fromkeys(layer for _, layers in sizes for layer in layers))
    return LoweredNetwork(mod, tasks, () if is_whole else tuple(parts), hard_to_tile)


def _lower_size(
    model: onnx.ModelProto,
    target: Target,
    settings: LoweringSettings,
    called: str,
    fallback: Mapping[str, str],
    num_segments: int,
) -> tuple[list[_LoweredPart], list[PaddedLayer]]:
    """The parts of a network in one size, and its layers that `pad_channels=auto` pads."""
    graph, hard_to_tile = prepare_graph(model, target, settings, called)
    lower_whole = partial(lower_graph, target=target, settings=settings)
    parts = _lower_parts(graph, lower_whole, partial(lower_node, target=target), fallback, num_segments)
    reasons = {operator: reason for part, _ in parts for operator, reason in part.reasons.items()}
    more = len(reasons) - _MAX_SHOWN
    shown = ", ".join(f"{operator} ({reason})" for operator, reason in list(reasons.items())[:_MAX_SHOWN])
    shown += f" and {more} more" if more > 0 else ""
    if reasons and settings.partition == "off":
        raise UserInputError(
            f"network={called}: TVM cannot compute {shown}; partition=auto leaves that to ONNX Runtime"
        )
    return parts, hard_to_tile


def prepare_graph(
    model: onnx.ModelProto, target: Target, settings: LoweringSettings, called: str
) -> tuple[onnx.ModelProto, list[PaddedLayer]]:
    """The graph that TVM is given, or is split into parts, and its layers that `pad_channels=auto` pads."""
    has_sketches = platform_of(target).has_sketches
    raised = raise_opset(model)

    def rewritten(*, of_bytes: bool) -> onnx.ModelProto:
        simple = without_tiny_weights(fold_scales(simplify(keep_bytes(raised) if of_bytes else raised, called)))
        # Sketches are for CPUs, as are the layers of many steps.
        return rewrite_operators(simple, writes_out_steps=not has_sketches, has_dot_products=of_bytes)

    bits = weight_bits(target)
    graph = rewritten(of_bytes=bits > 0)
    if bits and not has_weights_of(bits, graph):  # floats are exact
        graph = rewritten(of_bytes=False)
    if not graph.graph.node:
        raise UserInputError(f"network={called}: its outputs do not depend on its inputs, so there is nothing to tune")
    give_outputs_nodes(graph)
    hard_to_tile = list(layers_to_pad(graph, vector_lanes(target))) if has_sketches else []
    padding = _padding(settings.pad_channels, target)
    if padding is not None and (hard_to_tile or settings.pad_channels != "auto"):
        graph = pad_output_channels(graph, padding)
    return graph, hard_to_tile


def _padding(pad_channels: Padding, target: Target) -> Callable[[int], int] | None:
    """The function that `pad_output_channels` takes; None where nothing is to be padded."""
    if pad_channels == "off" or (pad_channels == "auto" and not platform_of(target).has_sketches):
        return None
    if pad_channels == "auto":
        lanes = vector_lanes(target)
        return lambda channels: best_padding(channels, lanes)
    return lambda channels: -(-channels // pad_channels) * pad_channels


def _extract_tasks(mod: IRModule, target: Target) -> tuple[TuningTask, ...]:
    from tvm.s_tir import meta_schedule as ms
    from tvm.s_tir.analysis import estimate_tir_flops
    from tvm.s_tir.meta_schedule.utils import shash2hex

    from ansor_mlflow.codegen.concatenations import count_written_in_place  # the door would load TVM
    from ansor_mlflow.lowering.algorithms import hash_of  # so would this one
    from ansor_mlflow.lowering.recurrence import SCHEDULED

    gone: Counter[str] = Counter()
    for name, num_calls in count_written_in_place(mod).items():
        gone[hash_of(mod[name])] += num_calls
    tasks: list[TuningTask] = []
    for task in ms.relax_integration.extract_tasks(mod, target):
        function = task.dispatched[0]
        if SCHEDULED in function["main"].attrs:
            continue
        workload_hash = shash2hex(function)
        weight = int(task.weight) - gone[workload_hash]
        if not weight:
            continue
        info = TaskInfo(
            index=len(tasks),
            name=short_name(str(task.task_name), workload_hash),
            weight=weight,
            flops=float(estimate_tir_flops(function)),
            workload_hash=workload_hash,
        )
        tasks.append(TuningTask(info=info, mod=function))
    return tuple(tasks)


def _lower_parts(
    model: onnx.ModelProto,
    lower_whole: _LowerGraph,
    lower_node: _LowerGraph,
    fallback: Mapping[str, str],
    num_segments: int,
) -> list[_LoweredPart]:
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
            cut = partition(model, {}, values) if num_segments == 1 else segments(model, values, num_segments)
            return [(part, lower_whole(part.model)) for part in cut]
    reasons.update(_reasons_by_trial(model, values, lower_node, reasons))
    while True:
        lowered: list[_LoweredPart] = []
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
    model: onnx.ModelProto, values: ValueInfos, lower_node: _LowerGraph, known: Mapping[int, str]
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


def _why_not(model: onnx.ModelProto, lower_graph: _LowerGraph) -> str:
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


def _first_that_fails(model: onnx.ModelProto, lower_whole: _LowerGraph) -> int:
    """Place of the node with which the graph up to it cannot be lowered any more, by bisection."""
    values, num_nodes = value_infos(model), len(model.graph.node)

    def fails(last: int) -> bool:
        return bool(_why_not(extract(model, range(last + 1), values), lower_whole))

    return bisect.bisect_left(range(num_nodes), True, hi=num_nodes - 1, key=fails)
