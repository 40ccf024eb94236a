"""The figures of bars: `failures.png`, `gain.png`, `task_share.png`, and `latency.png` of an evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ansor_mlflow.measuring import Latency
from ansor_mlflow.tracking.figures import style
from ansor_mlflow.tracking.report.history import TaskHistory, TuningHistory
from ansor_mlflow.trials import TrialStatus

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
