"""Which runtime computes what of a network: what TVM computes wrong, or slower than another one, is left to that.

The first partition is an estimate, because it decides what is tuned. Once there are records, it is measured.
"""

from __future__ import annotations

import logging
import math
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
    allowed_error,
    compare_outputs,
    expected_of,
    is_finite,
    library_inference,
    measure_in_turns,
    outputs_of,
    random_operators,
    require_broken_stays_broken,
    says_nothing,
    seeded_examples,
    seeded_inputs,
    time_parts,
    time_parts_in_onnxruntime,
    timed_call,
    typical_inputs,
    with_broken,
)
from ansor_mlflow.model import (
    EXPORTED_KINDS,
    RUNTIME_TITLES,
    CompiledNetwork,
    PartEntry,
    part_entries,
    threads_here,
    timed_parts,
)
from ansor_mlflow.names import part_file
from ansor_mlflow.networks import Network, write_onnx
from ansor_mlflow.settings import FallbackReasons
from ansor_mlflow.tensors import Sized, all_sizes

_SEED = 0
_SEEDS = range(4)
_TYPICAL = 10.0
"""How many times the tolerance the error may be on inputs of other magnitudes than the network may be made for."""
_TURNS = 2
_MEASURE_S = 0.3
_DOUBTFUL = (1 / 3, 0.8, 1.0)
"""Ratios of two times within which, or their inverses, one turn, two, and three may have ranked them wrongly: a machine
that others use is half as fast for seconds."""
_LIMIT_S = 120.0
"""Seconds in which a library has to compute all typical inputs: one that does not is none that anybody wants."""
_HANDOVER_S = 20e-6
"""Time of handing tensors to another runtime and calling it: benchmarks/handover.py."""
MIN_SLOWDOWN = 1.05
"""A part of TVM's that takes so many times as long as in another runtime does not pay; less is noise."""
FASTER_THERE = "faster than in TVM"
WRONG_HERE = "other outputs in TVM"
_log = logging.getLogger("ansor_mlflow")


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


def why_wrong(compiled: CompiledNetwork, *, share: float = 1.0) -> str:
    """Why a library is not to be trusted; empty where its outputs are those of ONNX Runtime.

    It may use up a `share` of the tolerance. A library that does not run on this host, or a network that ONNX Runtime
    cannot compute from such inputs, is not checked: `evaluate` does it where the model runs.
    """
    network, threads = compiled.network, threads_here(compiled.entry)
    if why_not_runnable(compiled.fingerprint) or random_operators(network):
        return ""
    sizes = all_sizes(compiled)
    seeded = seeded_inputs(network, sizes, _SEEDS)
    examples = [*seeded, *typical_inputs(sizes, seeded[: len(sizes)])]
    try:
        reference = partial(expected_of, network, threads)
        expected, expected_broken = with_broken(reference, examples, examples[0])
    except AnsorMlflowError as err:
        _log.warning("the outputs of %s are not checked: %s", compiled.name, err)
        return ""
    known = [place for place, outputs in enumerate(expected) if is_finite(outputs)]
    if not known:
        _log.warning("the outputs of %s are not checked: ONNX Runtime's hold NaN or infinities", compiled.name)
        return ""
    dtype = str(compiled.provenance.get("dtype", "float32"))
    run = partial(library_inference, compiled.library, compiled, compiled.entry)
    compute = partial(outputs_of, run, limit_s=_LIMIT_S)
    try:
        computed, broken = with_broken(compute, [examples[place] for place in known], examples[0])
        pairs = zip(known, computed, strict=True)
        errors = {place: compare_outputs(outputs, expected[place]).max_rel_error for place, outputs in pairs}
        typical = range(len(seeded), len(examples))
        for place in typical:
            if place in errors and says_nothing(errors[place], network, threads, examples[place]):
                del errors[place]
        for kind, factor in ((range(len(seeded)), 1.0), (typical, _TYPICAL)):
            tried = [examples[place] for place in kind if place in errors]
            error = max((errors[place] for place in kind if place in errors), default=0.0)
            tolerance = factor * share
            tolerance *= allowed_error(error / tolerance, "auto", network, dtype, threads, tried)
            if not error <= tolerance:
                return f"max_rel_error {error:.2g}, of {tolerance:.2g} allowed"
        require_broken_stays_broken(expected_broken, broken, network)
    except AnsorMlflowError as err:
        return str(err)
    return ""


def leave_to_onnxruntime(compiled: CompiledNetwork, network: Network, reason: str) -> CompiledNetwork:
    """Leaves all of a network to ONNX Runtime."""
    return replace(compiled, parts=_whole(compiled, network, "onnxruntime", reason))


def prefer_fastest(compiled: CompiledNetwork, network: Network, runtimes: Sequence[str]) -> CompiledNetwork:
    """Leaves each size of a network to the runtime that computes it fastest on this host; to TVM where it is near."""
    others = [name for name in runtimes if name != "tvm"]
    is_elsewhere = not compiled.fingerprint.platform.in_process or why_not_runnable(compiled.fingerprint)
    if not others or is_elsewhere or _has_types_of_tvm(compiled):
        return compiled
    parts = {name: _whole(compiled, network, name, FASTER_THERE) for name in others}
    try:
        times = milliseconds_of({"tvm": compiled, **{name: replace(compiled, parts=parts[name]) for name in others}})
    except AnsorMlflowError as err:
        _log.warning("%s is not compared with other runtimes: %s", compiled.name, err)
        return compiled
    chosen: list[PartEntry] = []
    for size, of_size in enumerate(times):
        fastest = min(of_size, key=lambda name: of_size[name] * (1 if name == "tvm" else MIN_SLOWDOWN))
        if fastest == "tvm":
            chosen += [part for part in compiled.parts if part.size == size]
            continue
        _log.warning(
            "%s computes all of %s, in %s, for which TVM takes %s; more trials may change that",
            *(RUNTIME_TITLES[fastest], all_sizes(compiled)[size] if compiled.sizes else compiled.name),
            *(duration(of_size[name] / 1e3) for name in (fastest, "tvm")),
        )
        chosen.append(replace(parts[fastest][size], latency_ms=of_size[fastest], latency_share=1.0))
    return replace(compiled, parts=tuple(chosen), provenance={**compiled.provenance, "runtimes_ms": times})


def best_mix(here: Sequence[float], there: Sequence[float]) -> tuple[list[bool], float]:
    """Which segments of a network ONNX Runtime is to compute, and the seconds of all with what handing over takes: the
    shortest path through the times of each segment in TVM (`here`) and in ONNX Runtime (`there`).
    """
    paths: list[tuple[float, list[bool]]] = []  # the shortest that ends in TVM, and the shortest in ONNX Runtime
    for seconds in zip(here, there, strict=True):
        paths = [
            min(
                (before + own_s + (_HANDOVER_S if sides[-1:] == [not side] else 0.0), [*sides, side])
                for before, sides in paths or [(0.0, [])]
            )
            for side, own_s in zip((False, True), seconds, strict=True)
        ]
    total_s, sides = min(paths)
    return sides, total_s


def losing_segments(compiled: CompiledNetwork, lowered: LoweredNetwork, fastest_s: float) -> FallbackReasons:
    """What of a network in segments, each of them TVM's, is to be ONNX Runtime's, so that a call takes less than
    `fastest_s`; nothing where no mix promises that.
    """
    try:
        here, there = _seconds(compiled, lowered)
    except AnsorMlflowError as err:
        _log.warning("the segments of %s are not timed: %s", compiled.name, err)
        return {}
    sides, seconds = best_mix(here, there)
    if len(set(sides)) == 1 or seconds * MIN_SLOWDOWN > fastest_s:
        return {}
    _log.info("ONNX Runtime computes %d of %d segments of %s", sum(sides), len(sides), compiled.name)
    losing = [part.graph.model.graph.node for part, side in zip(lowered.parts, sides, strict=True) if side]
    return {0: {output: FASTER_THERE for nodes in losing for node in nodes for output in node.output if output}}


def milliseconds_of(variants: Mapping[str, CompiledNetwork]) -> list[dict[str, float]]:
    """Times some variants of a network in turns; the milliseconds of a call of each, for each size of the network."""
    runs = {name: partial(library_inference, each.library, each, each.entry) for name, each in variants.items()}
    one = next(iter(variants.values()))
    return [
        _milliseconds({name: partial(timed_call, run, [inputs]) for name, run in runs.items()})
        for inputs in seeded_inputs(one.network, all_sizes(one), [_SEED])
    ]


def _whole(compiled: CompiledNetwork, network: Network, runtime: str, reason: str) -> tuple[PartEntry, ...]:
    """The parts of a network of which another runtime computes all, one for each size; their files are written."""
    parts = []
    for size, model in enumerate(network.models()):
        operators = dict(sorted(Counter(node.op_type for node in model.graph.node).items()))
        part = PartEntry(
            runs_in=runtime,  # type: ignore[arg-type]
            name=part_file(len(compiled.parts) + size),  # beside those of a part that TVM does not compute
            inputs=tuple(spec.name for spec in compiled.inputs),
            outputs=tuple(spec.name for spec in compiled.outputs),
            operators=operators,
            flops_share=1.0,
            reasons=dict.fromkeys(operators, reason),
            size=size,
        )
        write_onnx(model, compiled.library.parent / part.name)
        parts.append(part)
    return tuple(parts)


def _milliseconds(calls: Mapping[str, MakeCall]) -> dict[str, float]:
    """The shortest medians of as many turns as it takes to say which is faster than the first."""
    found: dict[str, float] = {}
    for doubtful in _DOUBTFUL:
        for name, latency in measure_in_turns(calls, turns=1, measure_s=_MEASURE_S).items():
            found[name] = min(latency.median_ms, found.get(name, math.inf))
        first, *others = found.values()
        if not any(doubtful < other / first < 1 / doubtful for other in others):
            break
    return found


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
