"""The figure `failures.png`: which tasks had failed trials, and how they failed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ansor_mlflow.tracking.figures import style
from ansor_mlflow.tracking.report.history import TaskHistory, TuningHistory
from ansor_mlflow.trials import TrialStatus

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CLASSES = tuple(status for status in TrialStatus if status is not TrialStatus.OK)


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
