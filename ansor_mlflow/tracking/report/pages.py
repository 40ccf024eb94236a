"""Where the MLflow UI shows something."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files

import mlflow

from ansor_mlflow import names
from ansor_mlflow.foreign import Report, Table, figure, for_shell, html_of, printable, without_credentials
from ansor_mlflow.measuring import KernelTimes
from ansor_mlflow.tracking.report.history import TuningHistory
from ansor_mlflow.trials import StopReason

_OWN_SERVER = "http://127.0.0.1:5000"
"""Where `mlflow server` listens by itself."""


def run_page(experiment_id: str, run_id: str) -> str:
    """Address of a run within the UI, behind `#/`."""
    return f"experiments/{experiment_id}/runs/{run_id}"


def ui_address(page: str) -> str:
    """Address of a page; where no server runs, of the one that `server_command` starts.

    Args:
        page: Address within the UI, behind `#/`.
    """
    uri = mlflow.get_tracking_uri()
    server = without_credentials(uri).replace("…@", "").rstrip("/") if _is_served(uri) else _OWN_SERVER
    return f"{server}/#/{page}"


def server_command() -> str:
    """The command that starts a server for the store; empty where one runs."""
    uri = mlflow.get_tracking_uri()
    return "" if _is_served(uri) else f"mlflow server --backend-store-uri {for_shell(uri, 'MLFLOW_TRACKING_URI')}"


def _is_served(tracking_uri: str) -> bool:
    return tracking_uri.startswith(("http://", "https://"))


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


_LATENCIES = (
    ("untuned", names.UNTUNED_LATENCY_MS, "{:.4g} ms"),
    ("without trials", names.INSTANT_LATENCY_MS, "{:.4g} ms"),
    *((title, names.rival_latency_ms(rival), "{:.4g} ms") for rival, title in names.RIVALS.items()),
    ("tuned", names.LATENCY_MS, "{:.4g} ms"),
)
_OTHERS = (
    ("tuned, 90th percentile", names.LATENCY_P90_MS, "{:.4g} ms"),
    ("tuned, as estimated by the tuning", names.BEST_LATENCY_MS, "{:.4g} ms"),
    ("and as its second measurements say", names.CONFIRMED_LATENCY_MS, "{:.4g} ms"),
    ("measured / second measurements", names.ESTIMATE_RATIO, "{:.2f}"),
    ("speedup over untuned", names.SPEEDUP_VS_UNTUNED, "{:.1f} ×"),
    *((f"speedup over {title}", names.speedup_vs(rival), "{:.2f} ×") for rival, title in names.RIVALS.items()),
    ("speedup over the best of them", names.SPEEDUP_VS_BEST, "{:.2f} ×"),
    ("share of ONNX Runtime's parts", names.ONNXRUNTIME_SHARE, "{:.1%}"),
    ("largest relative error", names.MAX_REL_ERROR, "{:.1e}"),
    ("coverage of tasks", names.COVERAGE_TASKS, "{:.0%}"),
    ("trials", names.TRIALS_MEASURED, "{:.0f}"),
)

_MAX_KERNELS = 5
STOP_REASONS = {
    StopReason.TRIALS: "the budget of trials was spent",
    StopReason.MINUTES: "the budget of time was spent",
    StopReason.PLATEAU: "no task improved any more",
    StopReason.SPACE_EXHAUSTED: "every program of the search space was measured",
    StopReason.NOTHING_TO_TUNE: "there is nothing to tune",
    StopReason.KNOWN: "earlier tunings know enough already",
    StopReason.INTERRUPTED: "it was interrupted",
}
"""What the values of `StopReason` mean."""


def summary_rows(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Labels and figures, of the metrics that there are; those of `latency_rows` first."""
    return [*latency_rows(metrics), *_rows(_OTHERS, metrics)]


def latency_rows(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """The latencies of what was compared; that of the model last."""
    return _rows(_LATENCIES, metrics)


def _rows(rows: Sequence[tuple[str, str, str]], metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    return [(label, form.format(metrics[name])) for label, name, form in rows if name in metrics]


def result_rows(history: TuningHistory) -> list[tuple[str, str]]:
    """What a tuning that has ended found, and why it ended."""
    result = history.result
    assert result is not None
    times_s = {
        "estimated latency": result.estimated_latency_s,
        "measured a second time": result.confirmed_latency_s,
        "before, with first measurements": history.before_s or None,
    }
    rows = [(label, f"{seconds * 1e3:.4g} ms") for label, seconds in times_s.items() if seconds is not None]
    if result.uncovered:
        rows.append(("without a valid trial", f"{len(result.uncovered)} of {count(len(result.tasks), 'task')}"))
    num_failed = sum(failure.num_trials for failure in history.failures())
    failed = f", of which {num_failed} failed" if num_failed else ""
    ended = f"{STOP_REASONS.get(result.stop_reason, result.stop_reason)} ({result.stop_reason})"
    time = f"{result.elapsed_s / 60:.1f} minutes"
    return [*rows, ("trials", f"{result.total_trials}{failed}"), ("time", time), ("ended", ended)]


def kernel_rows(kernels: KernelTimes) -> list[tuple[str, str]]:
    """The kernels that are furthest from what their records say, and what no record tells of."""
    furthest, others = kernels.furthest[:_MAX_KERNELS], kernels.furthest[_MAX_KERNELS:]
    rows = []
    for kernel in furthest:
        known = "no record" if kernel.estimated_us is None else f"in its record {kernel.estimated_us:.4g}"
        rows.append((f"{kernel.name}, {count(kernel.num_calls, 'call')}", f"{kernel.us:.4g} µs, {known}"))
    if others:
        rows.append((count(len(others), "other kernel"), f"{sum(kernel.us for kernel in others):.4g} µs"))
    return [*rows, ("between kernels", f"{kernels.between_us:.4g} µs")]


def count(number: int, noun: str) -> str:
    """A number with its noun."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
