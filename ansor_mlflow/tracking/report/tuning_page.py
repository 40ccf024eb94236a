"""The page `report.html`: all of a tuning on one sheet."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansor_mlflow import names
from ansor_mlflow.foreign import Code, Image, Part, Report, Table, figure
from ansor_mlflow.tracking.report.history import FailureClass, TaskHistory, TuningHistory
from ansor_mlflow.tracking.report.pages import html_page, result_rows
from ansor_mlflow.trials import TrialStatus

_CAPTIONS = {
    names.CONVERGENCE_FIGURE: "How the network and its tasks got faster, over trials and over time.",
    names.TASK_SHARE_FIGURE: "Each task's share of the network's time, before and after the tuning.",
    names.GAIN_FIGURE: "The trials spent on each task, and the time that they saved in the network.",
    names.ROOFLINE_FIGURE: "What each task reaches, below what this host can do. The area of a point is the task's "
    "share of the time; a task whose arguments stay in the caches may lie above the slope.",
    names.FAILURES_FIGURE: "Failed trials by task and class.",
}
_TASK_HEADERS = (
    *("task", ">weight", ">share of time", ">best (µs)", ">GFLOP/s", ">trials", ">failed", ">gain (ms)"),
    "stopped",
)
_KERNEL_HEADERS = ("task", "sketch", ">of the roof", "limited by", ">without trials (×)")
_MAX_LINES = 80
"""Lines of a schedule that are shown."""


@dataclass(frozen=True, kw_only=True)
class ScheduleText:
    """The schedule of a task, as TVM prints it."""

    task: str
    lines: Sequence[str]

    @property
    def text(self) -> str:
        """The first lines of it."""
        num_more = len(self.lines) - _MAX_LINES
        more = [f"# … {num_more} more lines: see ansor-mlflow explain"] if num_more > 0 else []
        return "\n".join([*self.lines[:_MAX_LINES], *more])


@dataclass(frozen=True, kw_only=True)
class KernelNote:
    """What is known of a task's fastest program besides its time."""

    sketch: str = ""
    """The sketch and its decisions, in words; empty for a program of MetaSchedule's space."""
    own_ratio: float | None = None
    """Time of the program that the sketch chooses without a trial, over that of the fastest one."""
    roof_share: float | None = None
    """Least time that the host's roofs allow, over that of the fastest program."""
    limit: str = ""
    """What bounds that least time: "arithmetic" or "memory"."""


def tuning_page(
    history: TuningHistory,
    directory: Path,
    *,
    run_id: str,
    commands: Sequence[str] = (),
    kernels: Mapping[str, KernelNote] = {},
    schedules: Sequence[ScheduleText] = (),
    fallback: Sequence[str] = (),
) -> str:
    """Makes the page of a tuning that has ended.

    Args:
        history: What the tuning did.
        directory: The run's directory, with the figures, and with what describes environment and warm start.
        run_id: Reported below the title.
        commands: Command lines that do the tuning again.
        kernels: What is known of the tasks' fastest programs, by the hash of the workload.
        schedules: Schedules of the slowest tasks.
        fallback: What ONNX Runtime computes beside the tasks, in clauses.
    """
    plan = history.plan
    assert plan is not None  # it has ended
    environment = _read_json(directory / names.ENVIRONMENT_FILE, {})
    tasks = sorted(history.tasks, key=lambda task: -task.after_s)
    images = {name: text for name, text in _CAPTIONS.items() if (directory / name).exists()}
    parts: list[Part] = [
        " · ".join(filter(None, [plan.target, environment.get("cpu_model"), f"run {run_id}"])),
        Table(result_rows(history)),
        "The latency is an estimate: Σ weight × best time of each task, measured one by one. ansor-mlflow compile and "
        "evaluate build and measure the network as a whole.",
        Table([_task_row(task, history) for task in tasks], _TASK_HEADERS, "Tasks"),
        Table([_kernel_row(task, kernels) for task in tasks], _KERNEL_HEADERS, "Fastest programs"),
        "Without trials: time of the program that the sketch chooses by itself, over that of the fastest one.",
        *(f"{clause}." for clause in fallback),
        *(Image(base64.b64encode((directory / name).read_bytes()).decode(), text) for name, text in images.items()),
        *(_failed(failure, history.total_trials) for failure in history.failures()),
        *_warm_start(_read_json(directory / names.WARM_START_FILE, [])),
        *(Code(schedule.text, f"Schedule of {schedule.task}") for schedule in schedules),
        Table(list(_flat(environment)), title="Environment"),
        *(Code(command, "" if index else "Again") for index, command in enumerate(commands)),
    ]
    return html_page(Report(plan.network, parts))


def _task_row(task: TaskHistory, history: TuningHistory) -> tuple[str, ...]:
    state, is_known = task.state, task.state.best_s is not None
    return (
        state.info.name,
        str(state.info.weight),
        figure(task.after_s / (history.after_s or 1) if is_known else None, "{:.1%}"),
        figure(state.best_s * 1e6 if state.best_s is not None else None),
        figure(state.gflops or None),
        str(state.total_trials),
        str(state.total_trials - state.num_trials[TrialStatus.OK]),
        figure(task.gain_s * 1e3 if is_known else None, "{:.3g}"),
        state.stop_reason,
    )


def _kernel_row(task: TaskHistory, kernels: Mapping[str, KernelNote]) -> tuple[str, ...]:
    kernel = kernels.get(task.state.info.workload_hash, KernelNote())
    ratios = figure(kernel.roof_share, "{:.0%}"), kernel.limit, figure(kernel.own_ratio, "{:.2f}")
    return (task.name, kernel.sketch, *ratios)


def _failed(failure: FailureClass, num_trials: int) -> Code:
    status = failure.status.value.replace("_", " ")
    title = f"Failed trials, {status}: {failure.num_trials} of {num_trials} trials, the first of {failure.task}"
    return Code(failure.error or "no message", title)


def _warm_start(taken: Sequence[Mapping[str, Any]]) -> list[Table]:
    columns = ("source", "num_records", "num_applied", "num_transferred", "note")
    headers = ("source", ">records", ">applied", ">for the cost model", "note")
    rows = [[str(source[column]) for column in columns] for source in taken]
    return [Table(rows, headers, "Earlier records")] if rows else []


def _read_json(path: Path, default: Any) -> Any:
    return json.loads(path.read_text()) if path.exists() else default


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Names and values; of what is nested, with the names of both."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value)
