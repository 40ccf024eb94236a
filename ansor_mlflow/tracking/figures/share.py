"""The figure `task_share.png`: which tasks the network's time goes to, before and after the tuning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ansor_mlflow.tracking.figures import style
from ansor_mlflow.tracking.report.history import TuningHistory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HEIGHT = 0.38
"""Height of a bar; a task has two, in a row that is 1 high."""


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
