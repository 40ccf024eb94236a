"""The figure `roofline.png`: how close the tasks come to what the host can do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ansor_mlflow.tracking.figures.style import COLORS, GREY, add_legend, legend_label, new_figure, plain, set_grid
from ansor_mlflow.tracking.report.history import TaskHistory, TuningHistory
from ansor_mlflow.tuning import Roofline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NUM_NAMED = 6
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
            color=COLORS[rank] if rank < _NUM_NAMED else GREY,
            markeredgecolor="black",
            markeredgewidth=0.5,
            label=legend_label(f"{plain(task.name)}, {share:.0%} of the time", rank, _NUM_NAMED),
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
