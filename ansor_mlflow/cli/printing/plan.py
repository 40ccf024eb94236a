"""What the command `plan` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ansor_mlflow.cli.console import console, microseconds, table

if TYPE_CHECKING:
    from ansor_mlflow.steps.reports import Plan, PlannedTask


def print_plan(plan: Plan) -> None:
    """Prints the tasks as a table, the totals and the notes."""
    out = console()
    out.print(f"{plan.network} for {plan.target}\n")
    rows = [_row(task) for task in plan.tasks]
    headers = [header for header in rows[0] if any(row[header] for row in rows)]
    out.print(table(headers, ([row[header] for header in headers] for row in rows)))
    out.print(f"\n{len(plan.tasks)} tasks, {plan.num_trials} trials, about {plan.expected_minutes:.1f} min on 2 cores")
    for note in plan.notes:
        out.print(note)


def _row(task: PlannedTask) -> dict[str, str]:
    """A task's cells by the header of their column."""
    return {
        ">": str(task.info.index),
        "~task": task.info.name,
        ">weight": str(task.info.weight),
        ">MFLOP": f"{task.info.flops / 1e6:.1f}",
        ">share": f"{task.flops_share:.1%}",
        ">best µs": microseconds(task.best_s),
        ">trials": str(task.num_trials),
        ">min": f"{task.expected_minutes:.1f}",
    }
