"""What commands print with. Whatever reaches the terminal has no credentials and no control characters."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import click
from rich.console import Console
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from ansor_mlflow.foreign import printable, printable_line

_PIPE_WIDTH = 1000
"""Columns where there is no terminal: lines are not broken."""


def say(text: object = "", *, err: bool = False) -> None:
    """Prints a line to standard output, or to standard error."""
    click.echo(printable(str(text)), err=err)


class PlainConsole(Console):
    """A console that every `str` passes as `printable`, in the cells of tables, too, and nothing with control
    characters. Whoever makes a `Text` hides the credentials in it.
    """

    def render_str(self, text: str, **kwargs: Any) -> Text:
        return super().render_str(printable(text), **kwargs)  # as a whole, before it is broken into lines

    def render(self, *args: Any, **kwargs: Any) -> Iterator[Segment]:
        for segment in super().render(*args, **kwargs):
            is_sound = segment.control or segment.text.strip("\n").isprintable()
            yield segment if is_sound else segment._replace(text=printable(segment.text))


def console() -> Console:
    """Standard output, for text as it is."""
    return PlainConsole(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False, markup=False)


def table(headers: Iterable[str], rows: Iterable[Sequence[str]], styles: Iterable[str] | None = None) -> Table:
    """A table without lines.

    Args:
        headers: Column names. One that begins with ">" holds numbers, one with "~" gives way on a narrow terminal.
        rows: Cells of each row.
        styles: Styles of the rows.
    """
    made = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for header in headers:
        justify = "right" if header.startswith(">") else "left"
        made.add_column(header.lstrip(">~"), justify=justify, no_wrap=not header.startswith("~"))  # type: ignore[arg-type]
    for cells, style in zip(rows, styles or iter(lambda: "", None), strict=False):
        made.add_row(*map(printable_line, cells), style=style)
    return made


def microseconds(seconds: float | None) -> str:
    """A time for a column of them; empty where there is none."""
    return "" if seconds is None else f"{seconds * 1e6:.1f}"
