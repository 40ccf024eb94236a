"""The figure `gain.png`: where the trials went, and what they brought."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ansor_mlflow.tracking.figures import style
from ansor_mlflow.tracking.report.history import TuningHistory

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
