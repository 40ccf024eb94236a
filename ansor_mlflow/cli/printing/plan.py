"""What the command `plan` prints."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from ansor_mlflow.steps.reports import Plan, PlannedTask

_PIPE_WIDTH = 1000
"""Columns where there is no terminal: lines are not broken."""


def print_plan(plan: Plan) -> None:
    """Prints the tasks as a table, the totals and the notes."""
    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False, markup=False)
    console.print(f"{plan.network} for {plan.target}\n")
    console.print(_table(plan))
    console.print(
        f"\n{len(plan.tasks)} tasks, {plan.num_trials} trials, about {plan.expected_minutes:.1f} min on 2 cores"
    )
    for note in plan.notes:
        console.print(note)


def _table(plan: Plan) -> Table:
    rows = [_row(task) for task in plan.tasks]
    headers = [header for header in rows[0] if any(row[header] for row in rows)]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for header in headers:
        table.add_column(header, justify="left" if header == "task" else "right", no_wrap=header != "task")
    for row in rows:
        table.add_row(*(row[header] for header in headers))
    return table


def _row(task: PlannedTask) -> dict[str, str]:
    """A task's cells by the header of their column."""
    return {
        "": str(task.info.index),
        "task": task.info.name,
        "weight": str(task.info.weight),
        "MFLOP": f"{task.info.flops / 1e6:.1f}",
        "share": f"{task.flops_share:.1%}",
        "best µs": f"{task.best_s * 1e6:.1f}" if task.best_s is not None else "",
        "trials": str(task.num_trials),
        "min": f"{task.expected_minutes:.1f}",
    }
