"""The figure `convergence.png`: how the network, and each task, got faster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ansor_mlflow.tracking.figures.style import BLUE, COLORS, GREY, few_ticks, legend_label, new_figure, plain, set_grid
from ansor_mlflow.tracking.report.history import CurvePoint, TaskHistory, TuningHistory

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NUM_NAMED = 5
"""Tasks with a colour of their own: those that take most of the time."""
_MAX_RATIO = 30.0
"""Time over the best time of the task beyond which trials lie outside of the figure."""
_MAX_DOTS = 4000
"""Trials that are drawn; of more, every second, third and so on is."""
_LAYOUT = {"left": 0.085, "right": 0.985, "bottom": 0.175, "top": 0.91, "hspace": 0.26, "wspace": 0.06}
"""Fixed: looking for the best layout doubles the time that drawing takes, and this is drawn while a tuning goes on."""


def draw_convergence(history: TuningHistory) -> Figure:
    """Draws the best estimated latency of the network against trials and against time, and below it every trial and
    every task's best, relative to the best that the task has now; empty frames where nothing is known yet.
    """
    figure = new_figure(history.title, 7.5, is_laid_out=True)
    grid = figure.add_gridspec(2, 2, **_LAYOUT)
    by_trials = figure.add_subplot(grid[0, 0])
    by_time = figure.add_subplot(grid[0, 1], sharey=by_trials)
    tasks = figure.add_subplot(grid[1, :])
    _draw_network(by_trials, [point.num_trials for point in history.curve], history.curve)
    _draw_network(by_time, [point.elapsed_s / 60 for point in history.curve], history.curve)
    by_time.tick_params(labelleft=False)
    by_trials.set(xlabel="trials", ylabel="best latency, estimated (ms)")
    by_time.set(xlabel="time (minutes)")
    _draw_tasks(tasks, history)
    tasks.set(xlabel="trials", ylabel="time of a task / its best time")
    for axes in (by_trials, by_time, tasks):
        axes.set_xlim(left=0)
        few_ticks(axes)
        set_grid(axes)
    return figure


def _draw_network(axes: Axes, x: list[float], curve: list[CurvePoint]) -> None:
    latency_ms = [point.latency_s * 1e3 for point in curve]
    axes.step(x, latency_ms, where="post", color=BLUE, linewidth=2)
    if not latency_ms:
        return
    axes.plot(x[-1], latency_ms[-1], "o", color=BLUE, markersize=5)
    axes.set_title(f"{latency_ms[-1]:.4g} ms", loc="right", fontsize=10)  # outside, where no curve runs through it
    if max(latency_ms) > 3 * min(latency_ms):
        axes.set_yscale("log")


def _draw_tasks(axes: Axes, history: TuningHistory) -> None:
    tasks = [task for task in history.slowest() if task.measured]
    best_s = {task.name: task.state.best_s or 0.0 for task in tasks}
    dots = [(t.step, t.latency_s / best_s[t.task]) for t in history.trials if t.latency_s and t.task in best_s]
    if not dots:
        return
    dots = dots[:: 1 + len(dots) // _MAX_DOTS]
    axes.plot(*zip(*dots, strict=True), ".", color="black", alpha=0.25, markersize=3, label="a valid trial", zorder=1)
    for rank, task in enumerate(tasks):
        is_named = rank < _NUM_NAMED
        axes.step(
            *_best_over_trials(task, history),
            where="post",
            color=COLORS[rank] if is_named else GREY,
            linewidth=1.8 if is_named else 0.7,
            label=legend_label(plain(task.name), rank, _NUM_NAMED),
            zorder=3 if is_named else 2,
        )
    axes.set_yscale("log")
    axes.set_ylim(0.93, min(_MAX_RATIO, max(2.2, 1.1 * max(ratio for _, ratio in dots))))
    ticks = [1, 2, 5, 10, 20]
    axes.set_yticks(ticks, [f"{tick} ×" for tick in ticks])
    axes.set_yticks([], minor=True)
    axes.figure.legend(*axes.get_legend_handles_labels(), loc="lower center", ncols=3, fontsize=9)


def _best_over_trials(task: TaskHistory, history: TuningHistory) -> tuple[list[float], list[float]]:
    """The steps at which a task got faster, up to now, and its best from then on, relative to the best there is."""
    points = task.best_so_far()
    best_s = task.state.best_s or points[-1][1]
    steps: list[float] = []
    ratios: list[float] = []
    for step, seconds in points:
        if not ratios or seconds / best_s < ratios[-1]:
            steps.append(float(step))
            ratios.append(seconds / best_s)
    return [*steps, float(history.total_trials)], [*ratios, ratios[-1]]
