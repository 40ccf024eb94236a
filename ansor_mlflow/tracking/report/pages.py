"""Pages of HTML that hold everything they show: no scripts, nothing from a network."""

from __future__ import annotations

from html import escape
from importlib.resources import files

from ansor_mlflow.foreign import Report, Table, figure, html_of, printable
from ansor_mlflow.measuring import KernelTimes


def html_page(report: Report) -> str:
    """A report as a page of its own."""
    page = files("ansor_mlflow.tracking.report").joinpath("page.html").read_text("utf-8")
    content = html_of(report, level=1)
    return page.replace("{{ title }}", escape(printable(report.title)), 1).replace("{{ content }}", content, 1)


def kernels_page(network: str, target: str, kernels: KernelTimes) -> str:
    """A page that says where the time of a network goes, the kernel that is furthest from its record first."""
    sums = [
        ("a call", f"{kernels.latency_us:.4g} µs"),
        ("between kernels", f"{kernels.between_us:.4g} µs"),
        ("without a record", f"{kernels.without_record_us:.4g} µs"),
    ]
    rows = [
        (
            kernel.name,
            str(kernel.num_calls),
            f"{kernel.us / kernels.latency_us:.1%}",
            figure(kernel.us),
            figure(kernel.estimated_us),
            figure(None if kernel.estimated_us is None else kernel.difference_us, "{:+.4g}"),
        )
        for kernel in kernels.furthest
    ]
    headers = ("kernel", ">calls", ">share", ">in the network (µs)", ">in its record (µs)", ">difference (µs)")
    note = "All calls of a kernel within one call of the network, and the same calls as its record promised them."
    return html_page(Report(f"Kernels of {network}", [target, Table(sums), note, Table(rows, headers)]))
