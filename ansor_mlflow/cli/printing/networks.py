"""Prints the built-in networks and operators."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from ansor_mlflow.networks import OPERATORS, read_catalogue


def print_networks() -> None:
    """Prints a line for each network, then the forms of operators."""
    table = Table("network", "input")
    for title in ("parameters", "GFLOP", "tasks"):
        table.add_column(title, justify="right")
    for name, size in read_catalogue().items():
        shapes = ", ".join("×".join(map(str, shape)) for shape in size.inputs.values())
        table.add_row(name, shapes, f"{size.parameters / 1e6:.2f} M", f"{size.flops / 1e9:.2f}", str(size.tasks))
    console = Console()
    console.print(table)
    console.print("Operators:", *OPERATORS.values(), sep="\n  ", highlight=False, markup=False, soft_wrap=True)
