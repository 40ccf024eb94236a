"""What the command `explain` prints: sections of plain text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.text import Text

from ansor_mlflow.cli.console import console, microseconds, say
from ansor_mlflow.foreign import printable

if TYPE_CHECKING:
    from ansor_mlflow.measuring import KernelTimes
    from ansor_mlflow.steps.reports import Explanation
    from ansor_mlflow.tuning import Bound, Roofline

_MAX_KERNELS = 5
_SCHEDULE_HEAD = """import tvm
from tvm.script import tirx as T


def apply_schedule(sch: tvm.s_tir.Schedule) -> None:
"""


def print_explanation(explanation: Explanation) -> None:
    """Prints the figures first, then the programs."""
    task = explanation.task
    _section(f"Task {task.index}: {task.name}", _aligned(_figures(explanation)))
    if explanation.roofline and explanation.bound:
        title = f"Roofline of this host, {explanation.num_threads} threads"
        _section(title, _aligned(_roof(explanation, explanation.roofline, explanation.bound)))
    if kernels := explanation.kernels:
        title = f"Kernels of the whole network, in the evaluation {explanation.evaluated}"
        _section(title, _aligned(_kernel_rows(kernels)))
    _section("Computation", _readable(explanation.computation))
    _section("Schedule", _SCHEDULE_HEAD + "\n".join(f"    {line}" for line in explanation.schedule))
    _section("Scheduled program", _readable(explanation.scheduled))


def _readable(script: str) -> str:
    """TVMScript with plain numbers instead of `T.int64(7)`, which fill the lines; the JSON file has them."""
    return re.sub(r"T\.int64\((-?\d+)\)", r"\1", script)


def _section(title: str, text: str) -> None:
    console().print(Text(printable(title), style="bold"), soft_wrap=True)
    say(f"{text}\n")


def _aligned(rows: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"  {label:<15}{value}" for label, value in rows)


def _figures(explanation: Explanation) -> list[tuple[str, str]]:
    task = explanation.task
    weighted_ms, network_ms = task.weight * explanation.best_s * 1e3, explanation.network_s * 1e3
    of_tasks = f"{explanation.num_tuned_tasks} of {explanation.num_tasks} tasks"
    return [
        ("network", f"{explanation.network} for {explanation.target}"),
        ("operations", f"{task.flops / 1e6:.3f} MFLOP, {task.weight} × in the network"),
        ("arguments", f"{explanation.argument_bytes / 1e6:.3f} MB, {explanation.flops_per_byte:.1f} FLOPs per byte"),
        ("best time", f"{microseconds(explanation.best_s)} µs, {explanation.gflops_per_s:.1f} GFLOP/s"),
        *([("ways", _ways(explanation))] if len(explanation.ways_s) > 1 else []),
        *([("error", _error(task.max_rel_error))] if task.max_rel_error is not None else []),
        ("sketch", explanation.sketch or "none: a program of MetaSchedule's space"),
        *([("without trials", _own_choice(explanation.own_ratio))] if explanation.own_ratio is not None else []),
        ("share of time", f"{explanation.time_share:.1%}: {weighted_ms:.3f} of {network_ms:.3f} ms, {of_tasks}"),
        *(("beside TVM", str(part)) for part in explanation.parts if part.runs_in == "onnxruntime"),
    ]


def _ways(explanation: Explanation) -> str:
    """The ways to compute the layer, the one that is taken first."""
    ordered = sorted(explanation.ways_s, key=lambda way: (way != explanation.task.way, explanation.ways_s[way]))
    return ", ".join(f"{way} {microseconds(explanation.ways_s[way])} µs" for way in ordered)


def _error(max_rel_error: float) -> str:
    return f"at most {max_rel_error:.1e} of the largest output of this way, against float64"


def _own_choice(ratio: float) -> str:
    return "the same program" if ratio == 1 else f"the sketch's own choice, {ratio:.2f} × as long"


def _kernel_rows(kernels: KernelTimes) -> list[tuple[str, str]]:
    """All of the time, and the kernels that are furthest from what their records say."""
    covered_us = kernels.latency_us - kernels.between_us
    rows = [
        (
            "kernels",
            f"{covered_us:.0f} of {kernels.latency_us:.0f} µs, {kernels.without_record_us:.0f} without a record",
        ),
        ("between them", f"{kernels.between_us:.0f} µs"),
    ]
    for number, kernel in enumerate(kernels.furthest[:_MAX_KERNELS]):
        known = "no record" if kernel.estimated_us is None else f"{kernel.estimated_us:.0f} in its record"
        label = "" if number else "furthest off"
        rows.append((label, f"{kernel.name}, {kernel.num_calls} ×: {kernel.us:.0f} µs, {known}"))
    return rows


def _roof(explanation: Explanation, roofline: Roofline, bound: Bound) -> list[tuple[str, str]]:
    reached = bound.shortest_s / explanation.best_s
    gain_ms = explanation.task.weight * (explanation.best_s - bound.shortest_s) * 1e3
    at_roof = f"{microseconds(bound.shortest_s)} µs instead of {microseconds(explanation.best_s)} µs"
    if gain_ms > 0:
        at_roof += f", {gain_ms:.3f} ms less for the network"
    else:
        at_roof += ": its arguments stay in the caches, or the host was busy while the roofs were measured"
    return [
        ("peak", f"{roofline.peak_flops_per_s / 1e9:.1f} GFLOP/s of float32 multiply-adds"),
        ("memory", f"{roofline.bandwidth_bytes_per_s / 1e9:.1f} GB/s of a copy"),
        ("attainable", f"{explanation.task.flops / bound.shortest_s / 1e9:.1f} GFLOP/s, limited by {bound.limit}"),
        ("reached", f"{reached:.0%}"),
        ("at the roof", at_roof),
    ]
