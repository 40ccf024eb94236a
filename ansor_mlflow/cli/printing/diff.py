"""What the command `diff` prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ansor_mlflow.cli.console import console, microseconds, table
from ansor_mlflow.cli.json_file import write_output

if TYPE_CHECKING:
    from ansor_mlflow.steps.reports import TaskDifference, TuningDifference

_VERDICTS = {"faster": "faster", "slower": "slower", "same": "", "only_first": "only A", "only_second": "only B"}
_STYLES = {"faster": "green", "slower": "red", "only_first": "yellow", "only_second": "yellow", "same": ""}


def print_diff(difference: TuningDifference) -> None:
    """Prints both sides, a table of tasks, the sum, and what else differs."""
    out = console()
    for letter, side in (("A", difference.first), ("B", difference.second)):
        out.print(f"{letter}  {side.name}  ({side.device}, run {side.run_id})")
    out.print()
    headers = ["~task", ">calls", ">share", ">A µs", ">B µs", ">B/A", ">noise", "B is"]
    styles = (_STYLES[task.verdict] for task in difference.tasks)
    out.print(table(headers, map(_cells, difference.tasks), styles))
    out.print()
    for line in summary(difference):
        out.print(line)
    for title, entries in _others(difference):
        if entries:
            rows = ((name, first or "", second or "") for name, (first, second) in entries.items())
            out.print(f"\n{title}\n")
            out.print(table(["~", "~A", "~B"], rows))


def write_page(difference: TuningDifference, path: str) -> None:
    """Writes the same as a page of HTML that needs no network; nothing where `path` is empty.

    Raises:
        UserInputError: The file cannot be written.
    """
    from ansor_mlflow.tracking import render_page

    if not path:
        return
    page = render_page(
        "diff.html",
        title="Two tunings compared",
        first=difference.first,
        second=difference.second,
        summary=summary(difference),
        tasks=[_page_row(task) for task in difference.tasks],
        others=[
            (title, [(name, first or "", second or "") for name, (first, second) in entries.items()])
            for title, entries in _others(difference)
        ],
    )
    write_output("html", path, page)


def _page_row(task: TaskDifference) -> dict[str, Any]:
    return {
        "name": task.task,
        "weight": task.weight,
        "share_percent": task.share * 100,
        "first_us": None if task.first_s is None else task.first_s * 1e6,
        "second_us": None if task.second_s is None else task.second_s * 1e6,
        "ratio": task.ratio,
        "noise_percent": task.noise * 100,
        "verdict": _VERDICTS[task.verdict] or "the same",
        "is_bad": task.verdict in ("slower", "only_first"),
    }


def _others(difference: TuningDifference) -> list[tuple[str, Mapping[str, tuple[str | None, str | None]]]]:
    return [
        ("parameters that differ", difference.params),
        ("device entries that differ", difference.device),
        ("versions that differ", difference.versions),
    ]


def summary(difference: TuningDifference) -> list[str]:
    """Sentences on the whole."""
    counts = {verdict: sum(task.verdict == verdict for task in difference.tasks) for verdict in _VERDICTS}
    lines = [
        f"B against A: {counts['faster']} tasks faster, {counts['slower']} slower, {counts['same']} the same within "
        f"the noise, {counts['only_first']} only in A, {counts['only_second']} only in B"
    ]
    pairs = {
        "estimated, tasks of both": (difference.first.estimated_ms, difference.second.estimated_ms),
        "measured end to end": (difference.first.latency_ms, difference.second.latency_ms),
    }
    for label, (first, second) in pairs.items():
        if first and second:
            lines.append(f"{label}: {first:.3f} ms, {second:.3f} ms ({second / first - 1:+.1%})")
    if difference.distrust:
        lines.append(f"the times cannot be trusted: {difference.distrust}")
    return lines


def _cells(task: TaskDifference) -> tuple[str, ...]:
    return (
        task.task,
        str(task.weight),
        f"{task.share:.1%}",
        microseconds(task.first_s),
        microseconds(task.second_s),
        f"{task.ratio:.3f}" if task.ratio else "",
        f"± {task.noise:.1%}",
        _VERDICTS[task.verdict],
    )
