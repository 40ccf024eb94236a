"""What the command `runs` prints."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

from ansor_mlflow.cli.console import console, say, table
from ansor_mlflow.cli.printing.pages import print_pages
from ansor_mlflow.foreign import without_credentials

if TYPE_CHECKING:
    from ansor_mlflow.steps.reports import FoundRun, FoundRuns

_STYLES = {"FAILED": "red", "KILLED": "red", "RUNNING": "yellow"}


def print_runs(found: FoundRuns) -> None:
    """Prints the runs as a table, and below it where the experiment's saved views are."""
    out = console()
    out.print(f"experiment {found.experiment} ({found.experiment_id})\n")
    if found.runs:
        headers = ["started", "step", "~name", "~network", "~target"]
        headers += [">latency ms", ">estimate ms", ">speedup", ">trials", "status", "run"]
        styles = (_STYLES.get(run.status, "") for run in found.runs)
        out.print(table(headers, map(_cells, found.runs), styles))
        if any(run.distrust for run in found.runs):
            out.print("\n? the times of this run cannot be trusted; its tag ansor.distrust says why")
    else:
        import mlflow  # whose store was asked

        out.print(f"no run was found in {without_credentials(mlflow.get_tracking_uri())}")
    if not found.are_all:
        out.print(f"\nthere are more; --limit {2 * len(found.runs)} shows twice as many")
    if found.pages:
        say()
        print_pages({name.lower(): page for name, page in found.pages.items()})


def _cells(run: FoundRun) -> tuple[str, ...]:
    return (
        datetime.fromtimestamp(run.started_ms / 1000).strftime("%Y-%m-%d %H:%M"),
        run.step,
        run.name,
        run.network,
        run.target,
        _figure(run.latency_ms, _form(run)),
        _figure(run.best_latency_ms, _form(run)),
        _figure(run.speedup_vs_untuned, "{:.1f} ×"),
        _figure(run.trials, "{:d}"),
        run.status,
        run.run_id,
    )


def _form(run: FoundRun) -> str:
    return "{:.3f} ?" if run.distrust else "{:.3f}"


def _figure(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
