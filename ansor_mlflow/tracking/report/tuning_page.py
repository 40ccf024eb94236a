"""The page `report.html`: all of a tuning on one sheet."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansor_mlflow import names
from ansor_mlflow.foreign import without_credentials
from ansor_mlflow.tracking.report.history import TaskHistory, TuningHistory
from ansor_mlflow.tracking.report.note import STOP_REASONS
from ansor_mlflow.tracking.report.pages import Image, render_page
from ansor_mlflow.trials import TrialStatus

_CAPTIONS = {
    names.CONVERGENCE_FIGURE: "How the network and its tasks got faster, over trials and over time.",
    names.TASK_SHARE_FIGURE: "Each task's share of the network's time, before and after the tuning.",
    names.GAIN_FIGURE: "The trials spent on each task, and the time that they saved in the network.",
    names.ROOFLINE_FIGURE: "What each task reaches, below what this host can do. The area of a point is the task's "
    "share of the time; a task whose arguments stay in the caches may lie above the slope.",
    names.FAILURES_FIGURE: "Failed trials by task and class.",
}
_SPARK_WIDTH, _SPARK_HEIGHT = 110.0, 24.0
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
    stays: Sequence[str] = (),
) -> str:
    """Makes the page of a tuning that has ended.

    Args:
        history: What the tuning did.
        directory: The run's directory, with the figures, and with what describes environment and warm start.
        run_id: Shown below the title.
        commands: Command lines that do the tuning again.
        kernels: What is known of the tasks' fastest programs, by the hash of the workload.
        schedules: Schedules of the slowest tasks.
        stays: What ONNX Runtime computes beside the tasks, in clauses.
    """
    plan = history.plan
    assert plan is not None  # it has ended
    images = [Image.of_file(directory / name, text) for name, text in _CAPTIONS.items() if (directory / name).exists()]
    environment = _read_json(directory / names.ENVIRONMENT_FILE, {})
    return render_page(
        "tuning.html",
        title=plan.network,
        subtitle=" · ".join(filter(None, [plan.target, environment.get("cpu_model"), f"run {run_id}"])),
        summary=_summary(history),
        tasks=[_task_row(task, history, kernels) for task in _in_order(history)],
        images=images,
        failures=history.failures(),
        environment=list(_flat(environment)),
        warm_start=_read_json(directory / names.WARM_START_FILE, []),
        commands=[without_credentials(command) for command in commands],
        schedules=schedules,
        stays=stays,
    )


def sparkline(points: Sequence[tuple[float, float]]) -> str:
    """Points of an SVG polyline: a curve of steps that fills its frame; empty for none.

    Args:
        points: x, which rises, and y.
    """
    if not points:
        return ""
    first, last = points[0][0], points[-1][0]
    low, high = min(y for _, y in points), max(y for _, y in points)
    corners = [points[0]]
    for x, y in points[1:]:
        if y != corners[-1][1]:
            corners += [(x, corners[-1][1]), (x, y)]
    corners.append((last, corners[-1][1]))
    width, height = _SPARK_WIDTH / ((last - first) or 1), _SPARK_HEIGHT / ((high - low) or 1)
    if first == last:  # a single measurement: a line
        corners, width = [(0, low), (1, low)], _SPARK_WIDTH
        first = 0
    return " ".join(f"{(x - first) * width:.1f},{(high - y) * height:.1f}" for x, y in corners)


def _summary(history: TuningHistory) -> dict[str, Any]:
    result, plan = history.result, history.plan
    assert result is not None
    assert plan is not None
    estimated_s, confirmed_s = result.estimated_latency_s, result.confirmed_latency_s
    return {
        "estimated_ms": estimated_s * 1e3 if estimated_s is not None else None,
        "confirmed_ms": confirmed_s * 1e3 if confirmed_s is not None else None,
        "before_ms": history.before_s * 1e3,
        "num_trials": result.total_trials,
        "budget": plan.num_trials,
        "minutes": result.elapsed_s / 60,
        "stop_reason": STOP_REASONS.get(result.stop_reason, result.stop_reason),
        "num_without": sum(task.num_trials > 0 and task.state.best_s is None for task in history.tasks),
    }


def _in_order(history: TuningHistory) -> list[TaskHistory]:
    """All tasks, those that take most of the time first."""
    return sorted(history.tasks, key=lambda task: -task.after_s)


def _task_row(task: TaskHistory, history: TuningHistory, kernels: Mapping[str, KernelNote]) -> dict[str, Any]:
    state = task.state
    kernel = kernels.get(state.info.workload_hash, KernelNote())
    is_known = state.best_s is not None
    return {
        "name": state.info.name,
        "weight": state.info.weight,
        "share_percent": 100 * task.after_s / (history.after_s or 1) if is_known else None,
        "best_us": state.best_s * 1e6 if state.best_s is not None else None,
        "gflops": state.gflops or None,
        "num_trials": state.total_trials,
        "num_failed": state.total_trials - state.num_trials[TrialStatus.OK],
        "gain_ms": task.gain_s * 1e3 if is_known else None,
        "sparkline": sparkline(task.best_so_far()),
        "stop_reason": state.stop_reason,
        "sketch": kernel.sketch,
        "own_ratio": kernel.own_ratio,
        "roof_percent": 100 * kernel.roof_share if kernel.roof_share is not None else None,
        "limit": kernel.limit,
    }


def _read_json(path: Path, default: Any) -> Any:
    return json.loads(path.read_text()) if path.exists() else default


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Names and values; of what is nested, with the names of both."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value)
