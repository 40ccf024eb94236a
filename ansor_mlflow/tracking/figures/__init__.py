"""Figures of a tuning, drawn from its history, and of a latency; `save_figure` writes one as PNG."""

from ansor_mlflow.tracking.figures.plots import (
    draw_convergence,
    draw_failures,
    draw_gain,
    draw_latency,
    draw_roofline,
    draw_task_share,
)
from ansor_mlflow.tracking.figures.style import save_figure

__all__ = [
    "draw_convergence",
    "draw_failures",
    "draw_gain",
    "draw_latency",
    "draw_roofline",
    "draw_task_share",
    "save_figure",
]
