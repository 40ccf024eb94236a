"""Where the MLflow UI shows something."""

from __future__ import annotations

from collections.abc import Mapping

from ansor_mlflow.cli.console import say
from ansor_mlflow.tracking import ui_lines

_WIDTH = len("start")


def print_pages(pages: Mapping[str, str]) -> None:
    """Prints the addresses of pages; where no server runs, after the command that starts one.

    Args:
        pages: Labels, and addresses within the UI, behind `#/`.
    """
    width = max(_WIDTH, *map(len, pages))
    for label, text in ui_lines(pages).items():
        say(f"{label:{width}}  {text}")
