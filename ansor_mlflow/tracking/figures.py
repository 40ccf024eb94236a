"""Figures of a tuning run as PNG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ConvergencePoint:
    """The estimated latency of the network after a round."""

    num_trials: int
    elapsed_s: float
    latency_ms: float


def save_convergence(points: Sequence[ConvergencePoint], title: str, path: Path) -> None:
    """Draws the best estimated latency against trials and against time; an empty frame where there are no points."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), dpi=110, layout="constrained", facecolor="white")
    figure.suptitle(title)
    axes = figure.subplots(1, 2, sharey=True)
    latency = [point.latency_ms for point in points]
    series = [([p.num_trials for p in points], "trials"), ([p.elapsed_s / 60 for p in points], "minutes")]
    for axis, (x, label) in zip(axes, series, strict=True):
        axis.step(x, latency, where="post", color="#0072b2", linewidth=2)
        axis.set_xlabel(label)
        axis.set_xlim(left=0)
        axis.grid(visible=True, alpha=0.3)
    axes[0].set_ylabel("best latency, estimated (ms)")
    if latency and max(latency) > 3 * min(latency):
        axes[0].set_yscale("log")
    figure.savefig(path)
