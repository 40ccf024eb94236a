"""What the command `bisect` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ansor_mlflow.cli.console import console, table

if TYPE_CHECKING:
    from ansor_mlflow.steps.bisection import Bisection


def print_bisection(bisection: Bisection) -> None:
    """Prints a table of what was found, where the smallest model is, and how to compare it."""
    out = console()
    out.print(f"{bisection.network} for {bisection.target}")
    out.print(table(["", "~"], bisection.rows()))
    out.print()
    if bisection.wrong is None:
        out.print("nothing differs from ONNX Runtime")
    else:
        out.print(f"model, inputs and outputs  {bisection.wrong.directory}")
        out.print(f"compare it                 {bisection.wrong.command}")
    if bisection.note:
        out.print(bisection.note)
