"""What the parts of a network take in TVM and in ONNX Runtime, and which of TVM's pay.

The first partition is an estimate, because it decides what is tuned. Once there are records, it is measured.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from ansor_mlflow.device import Device, why_not_runnable
from ansor_mlflow.errors import AnsorMlflowError
from ansor_mlflow.foreign import duration
from ansor_mlflow.lowering import LoweredNetwork
from ansor_mlflow.measuring import (
    MakeCall,
    library_inference,
    measure_in_turns,
    reference_inference,
    seeded_examples,
    time_parts,
    time_parts_in_onnxruntime,
    timed_call,
)
from ansor_mlflow.model import EXPORTED_KINDS, CompiledNetwork, PartEntry, part_entries, threads_here, timed_parts
from ansor_mlflow.names import part_file
from ansor_mlflow.networks import Network, write_onnx
from ansor_mlflow.tensors import Sized, random_inputs

_SEED = 0
_TURNS = 2
_MEASURE_S = 0.3
_IS_NEAR = 0.7
"""Ratio of two times, or its inverse, within which one turn may have ranked them wrongly, and a second one is taken."""
MIN_SLOWDOWN = 1.1
"""A part of TVM's that takes so many times as long as in ONNX Runtime does not pay; less is noise."""
FASTER_THERE = "faster than in TVM"
_log = logging.getLogger("ansor_mlflow")

FallbackReasons = Mapping[int, Mapping[str, str]]
"""Why nodes stay with ONNX Runtime, as `lowering.lower_sizes` takes it."""


def estimated_parts(
    lowered: LoweredNetwork, network: Sized, device: Device, estimated_s: float
) -> tuple[PartEntry, ...]:
    """The parts of a network before it is compiled; ONNX Runtime's with their measured times."""
    parts = part_entries(lowered)
    beside = [number for number, part in enumerate(parts) if part.runs_in == "onnxruntime"]
    if not beside or network.sizes or why_not_runnable(device.fingerprint):
        return parts
    try:
        seconds = time_parts_in_onnxruntime(lowered, network, device.num_threads, _SEED)
    except AnsorMlflowError as err:
        _log.warning("what stays with ONNX Runtime is not timed: %s", err)
        return parts
    total = estimated_s + sum(seconds[number] for number in beside)
    return tuple(
        replace(part, latency_ms=seconds[number] * 1e3, latency_share=seconds[number] / total)
        if number in beside
        else part
        for number, part in enumerate(parts)
    )


def measure_parts(compiled: CompiledNetwork, lowered: LoweredNetwork) -> tuple[CompiledNetwork, FallbackReasons]:
    """Times the parts of a network that is partly ONNX Runtime's, if its library runs here."""
    sides = {part.runs_in for part in compiled.parts}
    if "onnxruntime" not in sides or why_not_runnable(compiled.fingerprint):
        return compiled, {}
    try:
        here, there = _seconds(compiled, lowered)
    except AnsorMlflowError as err:
        _log.warning("the parts of %s are not timed: %s", compiled.name, err)
        return compiled, {}
    losing = losing_parts(compiled.parts, here, there)
    fallback: dict[int, dict[str, str]] = defaultdict(dict)
    for number in losing:
        part = lowered.parts[number]
        fallback[part.size].update(
            {output: FASTER_THERE for node in part.graph.model.graph.node for output in node.output if output}
        )
        _log.info("a part takes %s in TVM, %s in ONNX Runtime, and stays there", *_times(here, there, number))
    return replace(compiled, parts=timed_parts(compiled.parts, here)), fallback


def prefer_onnxruntime(compiled: CompiledNetwork, network: Network) -> CompiledNetwork:
    """Leaves all of a network to ONNX Runtime, where it computes it faster than the library does on this host.

    The library stays in the model, for hosts where it is the faster one.
    """
    is_elsewhere = not compiled.fingerprint.platform.in_process or why_not_runnable(compiled.fingerprint)
    if compiled.sizes or is_elsewhere or _has_types_of_tvm(compiled):
        return compiled
    threads = threads_here(compiled.entry)
    examples = [random_inputs(compiled.inputs, _SEED)]
    runs = {
        "tvm": partial(library_inference, compiled.library, compiled, compiled.entry),
        "onnxruntime": partial(reference_inference, compiled.network, threads),
    }
    calls = {name: partial(timed_call, make_inference, examples) for name, make_inference in runs.items()}
    try:
        here_ms, there_ms = _milliseconds(calls)
        if _IS_NEAR < here_ms / there_ms < 1 / _IS_NEAR:
            here_ms, there_ms = map(min, (here_ms, there_ms), _milliseconds(calls))
    except AnsorMlflowError as err:
        _log.warning("%s is not compared with ONNX Runtime: %s", compiled.name, err)
        return compiled
    provenance = {**compiled.provenance, "tvm_ms": here_ms, "onnxruntime_ms": there_ms}
    if here_ms <= MIN_SLOWDOWN * there_ms:
        return replace(compiled, provenance=provenance)
    _log.warning(
        "ONNX Runtime computes all of %s, in %s, for which TVM takes %s; more trials may change that",
        *(compiled.name, duration(there_ms / 1e3), duration(here_ms / 1e3)),
    )
    operators = Counter(node.op_type for node in network.model.graph.node)
    part = PartEntry(
        runs_in="onnxruntime",
        name=part_file(0),
        inputs=tuple(spec.name for spec in compiled.inputs),
        outputs=tuple(spec.name for spec in compiled.outputs),
        operators=dict(sorted(operators.items())),
        flops_share=1.0,
        reasons=dict.fromkeys(sorted(operators), FASTER_THERE),
        latency_ms=there_ms,
        latency_share=1.0,
    )
    write_onnx(network.model, compiled.library.parent / part.name)
    return replace(compiled, parts=(part,), provenance=provenance)


def _milliseconds(calls: Mapping[str, MakeCall]) -> tuple[float, float]:
    here, there = measure_in_turns(calls, turns=1, measure_s=_MEASURE_S).values()
    return here.median_ms, there.median_ms


def _has_types_of_tvm(compiled: CompiledNetwork) -> bool:
    """Whether an input or output is of a type that ONNX Runtime hands to no NumPy array, such as bfloat16."""
    return any(np.dtype(spec.dtype).kind not in EXPORTED_KINDS for spec in (*compiled.inputs, *compiled.outputs))


def _seconds(compiled: CompiledNetwork, lowered: LoweredNetwork) -> tuple[list[float], list[float]]:
    num_threads = threads_here(compiled.entry)
    examples = seeded_examples(compiled, _SEED)
    here: list[list[float]] = []
    there: list[list[float]] = []
    for _ in range(_TURNS):
        here.append(time_parts(compiled.library, compiled, compiled.entry, examples))
        there.append(time_parts_in_onnxruntime(lowered, compiled, num_threads, _SEED))
    return list(map(min, *here)), list(map(min, *there))


def losing_parts(parts: Sequence[PartEntry], here: Sequence[float], there: Sequence[float]) -> list[int]:
    """The places of TVM's parts that do not pay. The largest of each size does, because there is no model without."""
    mine: dict[int, list[int]] = defaultdict(list)
    for number, part in enumerate(parts):
        if part.runs_in == "tvm":
            mine[part.size].append(number)
    losing = []
    for numbers in mine.values():
        slow = [number for number in numbers if here[number] > MIN_SLOWDOWN * there[number]]
        if len(slow) == len(numbers):
            kept = max(slow, key=lambda number: parts[number].flops_share)
            slow.remove(kept)
            _log.warning(
                "what TVM computes takes %s, in ONNX Runtime it would take %s: tune for longer",
                *_times(here, there, kept),
            )
        losing += slow
    return losing


def _times(here: Sequence[float], there: Sequence[float], number: int) -> tuple[str, str]:
    return duration(here[number]), duration(there[number])
