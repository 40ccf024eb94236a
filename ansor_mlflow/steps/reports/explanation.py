"""What is known of a tuned task, and how it is shown."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ansor_mlflow.foreign import Code, Part, Report, Reported, Table, microseconds
from ansor_mlflow.measuring import KernelTimes
from ansor_mlflow.model import PartEntry
from ansor_mlflow.tracking import kernel_rows
from ansor_mlflow.trials import TaskInfo
from ansor_mlflow.tuning import Bound, Roofline

_SCHEDULE_HEAD = """import tvm
from tvm.script import tirx as T


def apply_schedule(sch: tvm.s_tir.Schedule) -> None:
"""


@dataclass(frozen=True, kw_only=True)
class Explanation(Reported):
    """A tuned task: what it computes, how, how fast, and how fast it could be."""

    network: str
    target: str
    """Short description of the target, such as "llvm znver4 ×2"."""
    num_threads: int
    task: TaskInfo
    best_s: float
    """Seconds per call of the fastest record."""
    network_s: float
    """Σ weight × best time over the tasks that have a record, in seconds."""
    num_tasks: int
    num_tuned_tasks: int
    """Tasks that have a record."""
    parts: tuple[PartEntry, ...]
    """Parts of the network, if ONNX Runtime computes some of it."""
    argument_bytes: int
    """Size of the task's arguments, the result included."""
    sketch: str
    """The sketch and its decisions, in words; empty for a program of MetaSchedule's space."""
    own_ratio: float | None
    """Time of the program that the sketch chooses without a trial, over that of the fastest one; None where it was not
    measured."""
    ways_s: dict[str, float]
    """Seconds per call of the fastest first measurement in each way to compute the layer that was tried."""
    computation: str
    """The unscheduled function, as TVMScript."""
    schedule: tuple[str, ...]
    """Statements of a Python program that schedules the function, a `tvm.s_tir.Schedule` named `sch`."""
    scheduled: str
    """The scheduled function, as TVMScript."""
    roofline: Roofline | None
    """Roofline of this host; None where it cannot run the target."""
    bound: Bound | None
    """Least time that the roofline leaves the task; None without a roofline."""
    evaluated: str = ""
    """ID of the last evaluation of a model with these records that timed its kernels; empty where there is none."""
    kernels: KernelTimes | None = None
    """Where the time of that model went."""

    @property
    def gflops_per_s(self) -> float:
        """What the fastest record reaches."""
        return self.task.flops / self.best_s / 1e9

    @property
    def time_share(self) -> float:
        """The task's share of `network_s`, from 0 to 1."""
        return self.task.weight * self.best_s / self.network_s

    @property
    def flops_per_byte(self) -> float:
        """Intensity: FLOPs over bytes of arguments."""
        return self.task.flops / self.argument_bytes

    def report(self) -> Report:
        """The figures first, then the programs."""
        parts: list[Part] = [Table(_figures(self))]
        if self.roofline and self.bound:
            title = f"Roofline of this host, {self.num_threads} threads"
            parts.append(Table(_roof(self, self.roofline, self.bound), title=title))
        if self.kernels:
            title = f"Kernels of the whole network, in the evaluation {self.evaluated}"
            parts.append(Table(kernel_rows(self.kernels), title=title))
        schedule = _SCHEDULE_HEAD + "\n".join(f"    {line}" for line in self.schedule)
        parts += [
            Code(_readable(self.computation), "Computation"),
            Code(schedule, "Schedule"),
            Code(_readable(self.scheduled), "Scheduled program"),
        ]
        return Report(f"Task {self.task.index}: {self.task.name}", parts)


def _readable(script: str) -> str:
    """TVMScript with plain numbers instead of `T.int64(7)`, which fill the lines; the JSON file has them."""
    return re.sub(r"T\.int64\((-?\d+)\)", r"\1", script)


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
