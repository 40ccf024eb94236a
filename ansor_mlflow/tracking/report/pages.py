"""The pages that show a tuning and where the time of a network goes, and where the MLflow UI shows a run."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import mlflow

from ansor_mlflow import names
from ansor_mlflow.foreign import (
    Code,
    Image,
    Part,
    Report,
    Table,
    duration,
    figure,
    for_shell,
    html_of,
    printable,
    time_unit,
    without_credentials,
)
from ansor_mlflow.measuring import KernelTimes, rival_titles
from ansor_mlflow.tracking.report.history import TaskHistory, TuningHistory
from ansor_mlflow.trials import STOP_REASONS, TrialStatus

_MAX_KERNELS = 5
_MAX_LINES = 80  # lines of a schedule that are shown
_CAPTIONS = {
    names.CONVERGENCE_FIGURE: "How the network and its tasks got faster, over trials and over time.",
    names.TASK_SHARE_FIGURE: "Each task's share of the network's time, before and after the tuning.",
    names.GAIN_FIGURE: "The trials spent on each task, and the time that they saved in the network.",
    names.ROOFLINE_FIGURE: "What each task reaches, below what this host can do. The area of a point is the task's "
    "share of the time; a task whose arguments stay in the caches may lie above the slope.",
    names.FAILURES_FIGURE: "Failed trials by task and class.",
}
_TASK_HEADERS = (
    *("task", ">weight", ">share of time", ">best ({best})", ">GFLOP/s", ">trials", ">failed", ">gain ({gain})"),
    "stopped",
)
_WARM_START_HEADERS = ("source", ">records", ">applied", ">for the cost model", "note")


def _milliseconds(value: float) -> str:
    return duration(value / 1e3)


def _figures() -> list[tuple[str, str, Callable[[float], str]]]:
    """What is shown of a model: titles, metrics and formats."""
    titles = rival_titles()
    return [
        ("tuned", names.LATENCY_MS, _milliseconds),
        ("speedup over the best rival", names.SPEEDUP_VS_BEST, "{:.2f} ×".format),
        *((f"speedup over {title}", names.speedup_vs(rival), "{:.2f} ×".format) for rival, title in titles.items()),
        ("speedup over untuned", names.SPEEDUP_VS_UNTUNED, "{:.1f} ×".format),
        *((title, names.rival_latency_ms(rival), _milliseconds) for rival, title in titles.items()),
        ("untuned", names.UNTUNED_LATENCY_MS, _milliseconds),
        ("without trials", names.INSTANT_LATENCY_MS, _milliseconds),
        ("tuned, 90th percentile", names.LATENCY_P90_MS, _milliseconds),
        ("tuned, as estimated by the tuning", names.BEST_LATENCY_MS, _milliseconds),
        ("and as its second measurements say", names.CONFIRMED_LATENCY_MS, _milliseconds),
        ("measured / second measurements", names.ESTIMATE_RATIO, "{:.2f}".format),
        ("share of ONNX Runtime's parts", names.ONNXRUNTIME_SHARE, "{:.1%}".format),
        ("largest relative error", names.MAX_REL_ERROR, "{:.1e}".format),
        ("operations in 8 bits", names.QUANTIZED_SHARE, "{:.0%}".format),
        ("lost by quantising", names.QUANTIZATION_LOSS, "{:.3g}".format),
        ("coverage of tasks", names.COVERAGE_TASKS, "{:.0%}".format),
        ("trials", names.TRIALS_MEASURED, "{:.0f}".format),
    ]


def run_address(experiment_id: str, run_id: str) -> str:
    """Address of a run in the UI; where no server runs, in that of the one that `server_command` starts.

    It asks for MLflow's pages of training, which are not those that MLflow opens by itself.
    """
    uri = mlflow.get_tracking_uri()
    server = without_credentials(uri).replace("…@", "").rstrip("/") if _is_served(uri) else "http://127.0.0.1:5000"
    return f"{server}/#/experiments/{experiment_id}/runs/{run_id}?workflowType=machine_learning"


def server_command() -> str:
    """The command that starts a server for the store; empty where one runs."""
    uri = mlflow.get_tracking_uri()
    return "" if _is_served(uri) else f"mlflow server --backend-store-uri {for_shell(uri, 'MLFLOW_TRACKING_URI')}"


def _is_served(tracking_uri: str) -> bool:
    return tracking_uri.startswith(("http://", "https://"))


def summary_rows(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Labels and figures, of the metrics that there are: the latency first."""
    return [(label, form(metrics[name])) for label, name, form in _figures() if name in metrics]


def result_rows(history: TuningHistory) -> list[tuple[str, str]]:
    """What a tuning that has ended found, and why it ended."""
    result = history.result
    assert result is not None
    times_s = {
        "estimated latency": result.estimated_latency_s,
        "measured a second time": result.confirmed_latency_s,
        "before, with first measurements": history.before_s or None,
    }
    rows = [(label, duration(seconds)) for label, seconds in times_s.items() if seconds is not None]
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
        known = "no record" if kernel.estimated_us is None else f"in its record {duration(kernel.estimated_us / 1e6)}"
        rows.append((f"{kernel.name}, {count(kernel.num_calls, 'call')}", f"{duration(kernel.us / 1e6)}, {known}"))
    if others:
        rows.append((count(len(others), "other kernel"), duration(sum(kernel.us for kernel in others) / 1e6)))
    return [*rows, ("between kernels", duration(kernels.between_us / 1e6))]


def count(number: int, noun: str) -> str:
    """A number with its noun."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def html_page(report: Report) -> str:
    """A report as a page of its own."""
    page = files("ansor_mlflow.tracking.report").joinpath("page.html").read_text("utf-8")
    content = html_of(report, level=1)
    return page.replace("{{ title }}", escape(printable(report.title)), 1).replace("{{ content }}", content, 1)


def kernels_page(network: str, target: str, kernels: KernelTimes) -> str:
    """A page that says where the time of a network goes, the kernel that is furthest from its record first."""
    sums = [
        ("a call", duration(kernels.latency_us / 1e6)),
        ("between kernels", duration(kernels.between_us / 1e6)),
        ("without a record", duration(kernels.without_record_us / 1e6)),
    ]
    unit_s, unit = time_unit(max((kernel.us for kernel in kernels.furthest), default=0.0) / 1e6)

    def in_unit(us: float | None, form: str = "{:.4g}") -> str:
        return figure(None if us is None else us / 1e6 / unit_s, form)

    rows = [
        (
            kernel.name,
            str(kernel.num_calls),
            f"{kernel.us / kernels.latency_us:.1%}",
            in_unit(kernel.us),
            in_unit(kernel.estimated_us),
            in_unit(None if kernel.estimated_us is None else kernel.difference_us, "{:+.4g}"),
        )
        for kernel in kernels.furthest
    ]
    times = (f">{title} ({unit})" for title in ("in the network", "in its record", "difference"))
    headers = ("kernel", ">calls", ">share", *times)
    note = "All calls of a kernel within one call of the network, and the same calls as its record promised them."
    return html_page(Report(f"Kernels of {network}", [target, Table(sums), note, Table(rows, headers)]))


class ScheduleText(NamedTuple):
    """The schedule of a task, as TVM prints it."""

    task: str
    lines: Sequence[str]

    @property
    def text(self) -> str:
        num_more = len(self.lines) - _MAX_LINES
        more = [f"# … {num_more} more lines: see ansor-mlflow explain"] if num_more > 0 else []
        return "\n".join([*self.lines[:_MAX_LINES], *more])


@dataclass(frozen=True, kw_only=True)
class KernelNote:
    """What is known of a task's fastest program besides its time."""

    sketch: str = ""  # the sketch and its decisions, in words; empty for a program of MetaSchedule's space
    own_ratio: float | None = None
    """Time of the program that the sketch chooses without a trial, over that of the fastest one."""
    roof_share: float | None = None  # least time that the host's roofs allow, over that of the fastest program
    limit: str = ""  # what bounds that least time: "arithmetic" or "memory"


def tuning_page(
    history: TuningHistory,
    directory: Path,
    *,
    run_id: str,
    commands: Sequence[str] = (),
    kernels: Mapping[str, KernelNote] = {},
    schedules: Sequence[ScheduleText] = (),
    fallback: Sequence[str] = (),
) -> str:
    """Makes the page of a tuning that has ended: what is known of the fastest programs is by the hash of the workload,
    what ONNX Runtime computes in clauses, and all else in the run's directory.
    """
    plan = history.plan
    assert plan is not None  # it has ended
    environment = _read_json(directory / names.ENVIRONMENT_FILE, {})
    warm_start = [
        [str(source[column]) for column in ("source", "num_records", "num_applied", "num_transferred", "note")]
        for source in _read_json(directory / names.WARM_START_FILE, [])
    ]
    tasks = sorted(history.tasks, key=lambda task: -task.after_s)
    best = time_unit(max((task.state.best_s or 0.0 for task in tasks), default=0.0))
    gain = time_unit(max((task.gain_s for task in tasks), default=0.0))
    headers = [header.format(best=best[1], gain=gain[1]) for header in _TASK_HEADERS]
    programs = []
    for task in tasks:
        kernel = kernels.get(task.state.info.workload_hash, KernelNote())
        ratios = figure(kernel.roof_share, "{:.0%}"), kernel.limit, figure(kernel.own_ratio, "{:.2f}")
        programs.append((task.name, kernel.sketch, *ratios))
    failures = []
    for failed in history.failures():
        number = f"{failed.num_trials} of {len(history.trials)} trials, the first of {failed.task}"
        title = f"Failed trials, {failed.status.value.replace('_', ' ')}: {number}"
        failures.append(Code(failed.error or "no message", title))
    images = {name: text for name, text in _CAPTIONS.items() if (directory / name).exists()}
    parts: list[Part] = [
        " · ".join(filter(None, [plan.target, environment.get("cpu_model"), f"run {run_id}"])),
        Table(result_rows(history)),
        "The latency is an estimate: Σ weight × best time of each task, measured one by one. ansor-mlflow compile and "
        "evaluate build and measure the network as a whole.",
        Table([_task_row(task, history, best[0], gain[0]) for task in tasks], headers, "Tasks"),
        Table(programs, ("task", "sketch", ">of the roof", "limited by", ">without trials (×)"), "Fastest programs"),
        "Without trials: time of the program that the sketch chooses by itself, over that of the fastest one.",
        *(f"{clause}." for clause in fallback),
        *(Image(base64.b64encode((directory / name).read_bytes()).decode(), text) for name, text in images.items()),
        *failures,
        *([Table(warm_start, _WARM_START_HEADERS, "Earlier records")] if warm_start else []),
        *(Code(schedule.text, f"Schedule of {schedule.task}") for schedule in schedules),
        Table(list(_flat(environment)), title="Environment"),
        *(Code(command, "" if index else "Again") for index, command in enumerate(commands)),
    ]
    return html_page(Report(plan.network, parts))


def _task_row(task: TaskHistory, history: TuningHistory, best_unit_s: float, gain_unit_s: float) -> tuple[str, ...]:
    state, is_known = task.state, task.state.best_s is not None
    return (
        state.info.name,
        str(state.info.weight),
        figure(task.after_s / (history.after_s or 1) if is_known else None, "{:.1%}"),
        figure(state.best_s / best_unit_s if state.best_s is not None else None),
        figure(state.gflops or None),
        str(state.total_trials),
        str(state.total_trials - state.num_trials[TrialStatus.OK]),
        figure(task.gain_s / gain_unit_s if is_known else None, "{:.3g}"),
        state.stop_reason,
    )


def _read_json(path: Path, default: Any) -> Any:
    return json.loads(path.read_text()) if path.exists() else default


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Names and values; of what is nested, with the names of both."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value)
