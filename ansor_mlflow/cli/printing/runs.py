"""What the command `runs` prints."""

from __future__ import annotations

import sys
from datetime import datetime
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from ansor_mlflow.cli.printing.pages import print_pages

if TYPE_CHECKING:
    from ansor_mlflow.steps.reports import FoundRun, FoundRuns

_PIPE_WIDTH = 1000
"""Columns where there is no terminal: lines are not broken."""
_STYLES = {"FAILED": "red", "KILLED": "red", "RUNNING": "yellow"}


def print_runs(found: FoundRuns) -> None:
    """Prints the runs as a table, and below it where the experiment's saved views are."""
    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False, markup=False)
    console.print(f"experiment {found.experiment} ({found.experiment_id})\n")
    if found.runs:
        console.print(_table(found))
    else:
        console.print("no run was found; --network, --target and --step say which are wanted")
    if not found.are_all:
        console.print(f"\nthere are more; --limit {2 * len(found.runs)} shows twice as many")
    if found.pages:
        print()
        print_pages({name.lower(): page for name, page in found.pages.items()})


def _table(found: FoundRuns) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for header in ("started", "step", "name", "network", "target"):
        table.add_column(header, no_wrap=header in ("started", "step"))
    for header in ("latency ms", "estimate ms", "speedup", "trials"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("run", no_wrap=True)
    for run in found.runs:
        table.add_row(*_cells(run), style=_STYLES.get(run.status, ""))
    return table


def _cells(run: FoundRun) -> tuple[str, ...]:
    return (
        datetime.fromtimestamp(run.started_ms / 1000).strftime("%Y-%m-%d %H:%M"),
        run.step,
        run.name,
        run.network,
        run.target,
        _figure(run.latency_ms, "{:.3f}"),
        _figure(run.best_latency_ms, "{:.3f}"),
        _figure(run.speedup_vs_untuned, "{:.1f} ×"),
        _figure(run.trials, "{:d}"),
        run.status,
        run.run_id,
    )


def _figure(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
