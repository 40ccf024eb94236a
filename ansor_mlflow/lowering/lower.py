"""ONNX → Relax → layout → fused tasks.

A tuned schedule is found again by the structural hash of its function, so whatever changes a function here makes
its older records useless: raise `LOWERING_VERSION` with a change that concerns most networks. Where one concerns few
functions, these are as if they had not been tuned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import onnx

from ansor_mlflow.device import platform_of, vector_lanes
from ansor_mlflow.errors import UserInputError
from ansor_mlflow.graphs import (
    PaddedLayer,
    best_padding,
    fold_batch_norms,
    give_outputs_nodes,
    layers_to_pad,
    pad_output_channels,
    raise_opset,
    rewrite_operators,
    simplify,
)
from ansor_mlflow.lowering.fallback import LoweredPart, lower_parts
from ansor_mlflow.lowering.lower_graph import lower_graph, lower_node
from ansor_mlflow.lowering.network import LoweredNetwork, NetworkPart, TuningTask, short_name
from ansor_mlflow.settings import LoweringSettings, Padding
from ansor_mlflow.trials import TaskInfo

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.target import Target


LOWERING_VERSION = 6
"""Provenance of records: two lowerings with different versions may give different tasks for one network."""
_MAX_SHOWN = 3

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
    fallback: Mapping[int, Mapping[str, str]] = {},
) -> LoweredNetwork:
    """Lowers a network in each of its sizes. Tasks that are the same in several sizes are one.

    `fallback` says for a size, by its number, why a node stays with ONNX Runtime though TVM may know it, by an output
    of it as the parts of an earlier lowering name it.
    """
    from ansor_mlflow.lowering.relax_passes import join_modules

    sizes = [
        _lower_size(model, target, settings, called, fallback.get(number, {})) for number, model in enumerate(models)
    ]
    parts: list[NetworkPart] = []
    modules: dict[str, IRModule] = {}
    for size, (lowered, _) in enumerate(sizes):
        for graph, part in lowered:
            name = f"part{len(parts)}" if part is not None else ""
            parts.append(NetworkPart(graph, name, size))
            if part is not None:
                modules[name] = part
    is_whole = len(parts) == 1
    mod = modules["part0"] if is_whole else join_modules(modules)
    tasks = _extract_tasks(mod, target)
    if settings.algorithm != "direct" and platform_of(target).has_sketches:
        from ansor_mlflow.lowering.algorithms import with_algorithms

        tasks = with_algorithms(mod, tasks, settings.algorithm, called)
    hard_to_tile = tuple(dict.fromkeys(layer for _, layers in sizes for layer in layers))
    return LoweredNetwork(mod, tasks, () if is_whole else tuple(parts), hard_to_tile)


def _lower_size(
    model: onnx.ModelProto, target: Target, settings: LoweringSettings, called: str, fallback: Mapping[str, str]
) -> tuple[list[LoweredPart], list[PaddedLayer]]:
    """The parts of a network in one size, and its layers that `pad_channels=auto` pads."""
    graph = rewrite_operators(fold_batch_norms(simplify(raise_opset(model), called)))
    if not graph.graph.node:
        raise UserInputError(f"network={called}: its outputs do not depend on its inputs, so there is nothing to tune")
    give_outputs_nodes(graph)
    has_sketches = platform_of(target).has_sketches
    hard_to_tile = list(layers_to_pad(graph, vector_lanes(target))) if has_sketches else []
    padding = _padding(settings.pad_channels, target)
    if padding is not None and (hard_to_tile or settings.pad_channels != "auto"):
        graph = pad_output_channels(graph, padding)
    lower_whole = partial(lower_graph, target=target, settings=settings)
    parts = lower_parts(graph, lower_whole, partial(lower_node, target=target), fallback)
    reasons = {operator: reason for part, _ in parts for operator, reason in part.reasons.items()}
    more = len(reasons) - _MAX_SHOWN
    shown = ", ".join(f"{operator} ({reason})" for operator, reason in list(reasons.items())[:_MAX_SHOWN])
    shown += f" and {more} more" if more > 0 else ""
    if all(mod is None for _, mod in parts):
        raise UserInputError(
            f"network={called}: TVM can compute no part of the network: {shown}; ONNX Runtime alone is the runtime for "
            "it"
        )
    if reasons and settings.partition == "off":
        raise UserInputError(
            f"network={called}: TVM cannot compute {shown}; partition=auto leaves that to ONNX Runtime"
        )
    return parts, hard_to_tile


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

    gone: Counter[str] = Counter()
    for name, num_calls in count_written_in_place(mod).items():
        gone[hash_of(mod[name])] += num_calls
    tasks: list[TuningTask] = []
    for task in ms.relax_integration.extract_tasks(mod, target):
        function = task.dispatched[0]
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
