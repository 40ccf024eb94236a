"""The figure `latency.png`: how long the calls of a model took."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ansor_mlflow.measuring import Latency
from ansor_mlflow.tracking.figures.style import BLUE, GREEN, VERMILION, add_legend, few_ticks, new_figure, set_grid

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NUM_BINS = 60


def draw_latency(title: str, latency: Latency) -> Figure:
    """Draws how many calls took how long, with the median and the 90th percentile."""
    figure = new_figure(title, 4.0)
    axes = figure.subplots()
    axes.hist(latency.samples_ms, bins=_NUM_BINS, color=BLUE)
    axes.axvline(latency.median_ms, color=GREEN, linewidth=2, label=f"median, {latency.median_ms:.4g} ms")
    axes.axvline(latency.p90_ms, color=VERMILION, linewidth=2, label=f"90th percentile, {latency.p90_ms:.4g} ms")
    axes.set(xlabel="time of a call (ms)", ylabel="calls")
    few_ticks(axes)
    set_grid(axes, "y")
    add_legend(figure)
    return figure
