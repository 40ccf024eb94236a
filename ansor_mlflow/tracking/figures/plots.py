"""The figures of a tuning run: convergence, times of tasks, and the roofline."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ansor_mlflow.measuring import Latency
from ansor_mlflow.tracking.figures import style
from ansor_mlflow.tracking.figures.style import (
    BLUE,
    COLORS,
    GREY,
    add_legend,
    few_ticks,
    legend_label,
    new_figure,
    plain,
    set_grid,
)
from ansor_mlflow.tracking.report.history import CurvePoint, TaskHistory, TuningHistory
from ansor_mlflow.trials import TrialStatus
from ansor_mlflow.tuning import Roofline

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


_CLASSES = tuple(status for status in TrialStatus if status is not TrialStatus.OK)
_HEIGHT = 0.38
"""Height of a bar of `task_share.png`; a task has two, in a row that is 1 high."""
_NUM_BINS = 60


def draw_failures(history: TuningHistory) -> Figure:
    """Draws the failed trials of each task by class; a class has the same colour in every tuning."""
    bars = style.bars_of([task for task in history.tasks if _num_failed(task)], _num_failed)
    figure = style.new_figure(history.title, style.height_of(len(bars), 0.32))
    axes = figure.subplots()
    left = [0] * len(bars)
    for status, color in zip(_CLASSES, style.COLORS, strict=False):
        widths = [sum(task.state.num_trials[status] for task in bar.tasks) for bar in bars]
        if any(widths):
            label = f"{status.value.replace('_', ' ')}: {sum(widths)} of {history.total_trials} trials"
            axes.barh(range(len(bars)), widths, 0.7, left=left, color=color, label=label)
            left = [start + width for start, width in zip(left, widths, strict=True)]
    style.label_bars(axes, bars)
    axes.set_xlabel("failed trials")
    axes.set_xlim(0, 1.05 * max([*left, 1]))
    style.few_ticks(axes)
    style.add_legend(figure)
    style.set_grid(axes, "x")
    return figure


def _num_failed(task: TaskHistory) -> int:
    return sum(task.state.num_trials[status] for status in _CLASSES)


def draw_gain(history: TuningHistory) -> Figure:
    """Draws for every task the trials spent on it, beside the time by which they made the network faster."""
    bars = style.bars_of([task for task in history.tasks if task.num_trials], lambda task: task.gain_s)
    figure = style.new_figure(history.title, style.height_of(len(bars), 0.32))
    trials, gains = figure.subplots(1, 2, sharey=True)
    columns = [
        (trials, [bar.total(lambda task: task.num_trials) for bar in bars], style.BLUE, "{:.0f}"),
        (gains, [bar.total(lambda task: task.gain_s) * 1e3 for bar in bars], style.GREEN, "{:.3g}"),
    ]
    for axes, values, color, form in columns:
        drawn = axes.barh(range(len(bars)), values, 0.7, color=color)
        axes.bar_label(drawn, [form.format(value) for value in values], padding=3, fontsize=9)
        axes.set_xlim(0, 1.2 * max([*values, 0]) or 1)
        style.set_grid(axes, "x")
    style.few_ticks(trials)
    style.label_bars(trials, bars)
    trials.set_xlabel("trials, failed ones included")
    gains.set_xlabel("gain: estimated time saved in the network (ms)")
    return figure


def draw_task_share(history: TuningHistory) -> Figure:
    """Draws every task's share of the network's time: before is the first valid measurement of each task, or the record
    that it began with; after is its best. Both times its weight.
    """
    before_s, after_s = history.before_s or 1.0, history.after_s or 1.0
    tasks = [task for task in history.tasks if task.after_s]
    bars = style.bars_of(tasks, lambda task: max(task.before_s / before_s, task.after_s / after_s))
    before = [bar.total(lambda task: task.before_s) for bar in bars]
    after = [bar.total(lambda task: task.after_s) for bar in bars]
    before_percent = [100 * seconds / before_s for seconds in before]
    after_percent = [100 * seconds / after_s for seconds in after]

    figure = style.new_figure(history.title, style.height_of(len(bars), 0.42))
    axes = figure.subplots()
    for percents, offset, color, label in (
        (before_percent, -_HEIGHT / 2, style.ORANGE, f"before: {history.before_s * 1e3:.4g} ms in all"),
        (after_percent, _HEIGHT / 2, style.BLUE, f"after: {history.after_s * 1e3:.4g} ms in all"),
    ):
        axes.barh([row + offset for row in range(len(bars))], percents, _HEIGHT, color=color, label=label)
    ends = [max(shares) for shares in zip(before_percent, after_percent, strict=True)]
    for row, end in enumerate(ends):
        text = f"{before[row] * 1e3:.3g} → {after[row] * 1e3:.3g} ms"
        axes.annotate(text, (end, row), (4, 0), textcoords="offset points", va="center", fontsize=9)
    style.label_bars(axes, bars)
    axes.set_xlabel("share of the network's estimated time (%)")
    axes.set_xlim(0, 1.25 * max(ends, default=80))
    style.add_legend(figure)
    style.set_grid(axes, "x")
    return figure


def draw_latency(title: str, latency: Latency) -> Figure:
    """Draws how many calls took how long, with the median and the 90th percentile."""
    figure = style.new_figure(title, 4.0)
    axes = figure.subplots()
    axes.hist(latency.samples_ms, bins=_NUM_BINS, color=style.BLUE)
    axes.axvline(latency.median_ms, color=style.GREEN, linewidth=2, label=f"median, {latency.median_ms:.4g} ms")
    axes.axvline(latency.p90_ms, color=style.VERMILION, linewidth=2, label=f"90th percentile, {latency.p90_ms:.4g} ms")
    axes.set(xlabel="time of a call (ms)", ylabel="calls")
    style.few_ticks(axes)
    style.set_grid(axes, "y")
    style.add_legend(figure)
    return figure


_NUM_IN_ROOFLINE = 6
"""Tasks with a colour of their own: those that take most of the time."""


def draw_roofline(history: TuningHistory, roofline: Roofline, argument_bytes: Mapping[str, int]) -> Figure:
    """Draws what each task reaches against its intensity, below the two roofs. Tasks that compute nothing are left out.

    Args:
        history: What the tuning did.
        roofline: The roofs of the host.
        argument_bytes: Size of the arguments of each task, by the hash of its workload.
    """
    tasks = [task for task in history.slowest() if task.state.gflops and argument_bytes.get(_hash(task))]
    intensities = [task.state.info.flops / argument_bytes[_hash(task)] for task in tasks]
    figure = new_figure(history.title, 6)
    axes = figure.subplots()
    _draw_roofs(axes, roofline, intensities)
    for rank, (task, intensity) in enumerate(zip(tasks, intensities, strict=True)):
        share = task.after_s / history.after_s
        axes.plot(
            intensity,
            task.state.gflops or 0.0,
            marker="o",
            markersize=6 + 20 * math.sqrt(share),
            color=COLORS[rank] if rank < _NUM_IN_ROOFLINE else GREY,
            markeredgecolor="black",
            markeredgewidth=0.5,
            label=legend_label(f"{plain(task.name)}, {share:.0%} of the time", rank, _NUM_IN_ROOFLINE),
            linestyle="none",
        )
    axes.set(xscale="log", yscale="log", xlabel="arithmetic intensity (FLOP/byte of arguments)", ylabel="GFLOP/s")
    set_grid(axes)
    add_legend(figure)
    return figure


def _draw_roofs(axes: Axes, roofline: Roofline, intensities: list[float]) -> None:
    peak, bandwidth = roofline.peak_flops_per_s / 1e9, roofline.bandwidth_bytes_per_s / 1e9
    ridge = peak / bandwidth
    low, high = min([*intensities, ridge]) / 3, max([*intensities, ridge]) * 3
    label = f"roof of this host: {peak:.4g} GFLOP/s of float32, {bandwidth:.3g} GB/s"
    axes.plot([low, ridge, high], [low * bandwidth, peak, peak], color="black", linewidth=1.5, label=label)
    axes.set_xlim(low, high)


def _hash(task: TaskHistory) -> str:
    return task.state.info.workload_hash
