"""Prints the built-in networks and operators."""

from __future__ import annotations

from ansor_mlflow.cli.console import console, table
from ansor_mlflow.networks import OPERATORS, read_catalogue


def print_networks() -> None:
    """Prints a line for each network, then the forms of operators."""
    out = console()
    rows = [
        (
            name,
            ", ".join("×".join(map(str, shape)) for shape in size.inputs.values()),
            f"{size.parameters / 1e6:.2f} M",
            f"{size.flops / 1e9:.2f}",
            str(size.tasks),
        )
        for name, size in read_catalogue().items()
    ]
    out.print(table(["network", "~input", ">parameters", ">GFLOP", ">tasks"], rows))
    out.print("\nOperators:", *OPERATORS.values(), sep="\n  ", soft_wrap=True)
