"""The page of an evaluation that says where the time of a network goes."""

from __future__ import annotations

from ansor_mlflow.measuring import KernelTimes
from ansor_mlflow.tracking.report.pages import render_page


def kernels_page(network: str, target: str, kernels: KernelTimes) -> str:
    """A page with a table of all kernels, the one that is furthest from its record first.

    Args:
        network: What the kernels compute.
        target: The device, in words.
        kernels: Their times.
    """
    return render_page("kernels.html", title=f"Kernels of {network}", subtitle=target, times=kernels)
