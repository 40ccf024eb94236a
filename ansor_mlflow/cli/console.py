"""What commands print with. Whatever reaches the terminal has no credentials and no control characters."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import click
from rich.console import Console
from rich.segment import Segment
from rich.table import Table as RichTable
from rich.text import Text

from ansor_mlflow.foreign import Code, Image, Report, Table, printable, printable_line

_PIPE_WIDTH = 1000
"""Columns where there is no terminal: lines are not broken."""


def say(text: object = "", *, err: bool = False) -> None:
    """Prints a line to standard output, or to standard error."""
    click.echo(printable(str(text)), err=err)


def say_marked(mark: str, text: str) -> None:
    """Prints a line behind a word in the colour that it names."""
    console().print(Text.assemble((f"{mark:<8}", mark), printable(text)), soft_wrap=True)


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


def show(report: Report) -> None:
    """Prints a report: its title, its parts with empty lines around tables and programs, and where things are."""
    out, is_line = console(), True
    for part in (report.title, *report.parts):
        if isinstance(part, Image):
            continue
        if not (is_line and isinstance(part, str)):
            out.print()
        is_line = isinstance(part, str)
        if isinstance(part, str):
            out.print(part, soft_wrap=True)
            continue
        if part.title:
            out.print(Text(printable(part.title), style="bold"), soft_wrap=True)
        if isinstance(part, Code):
            say(part.text)
        else:
            out.print(table(part))
    if report.where and not is_line:
        out.print()
    for label, where in report.where.items():
        say(f"{label:<6} {where}")


def table(description: Table) -> RichTable:
    """A table without lines, see `Table`."""
    made = RichTable(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=bool(description.headers))
    for header in description.headers or ("", "~"):
        justify = "right" if header.startswith(">") else "left"
        made.add_column(header.lstrip(">~"), justify=justify, no_wrap=not header.startswith("~"))  # type: ignore[arg-type]
    for cells, style in zip_longest(description.rows, description.marks, fillvalue=""):
        made.add_row(*map(printable_line, cells), style=str(style))
    return made
