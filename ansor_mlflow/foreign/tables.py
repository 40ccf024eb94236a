"""What a result says, as plain parts; the console shows them as text, a notebook or a page as HTML."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ansor_mlflow.foreign.showing import printable

Mark = Literal["", "green", "yellow", "red"]


@dataclass(frozen=True)
class Table:
    """Rows of cells; without headers they are labels and values.

    A header that begins with ">" is over numbers, one with "~" over texts that give way on a narrow terminal.
    """

    rows: Sequence[Sequence[str]]
    headers: Sequence[str] = ()
    title: str = ""
    marks: Sequence[Mark] = ()  # colours of the rows; none by default


@dataclass(frozen=True)
class Code:
    """A program, a command or an error, which is shown as it is."""

    text: str
    title: str = ""


@dataclass(frozen=True)
class Image:
    """A picture, which only pages show."""

    base64: str  # the PNG file
    caption: str


Part: TypeAlias = "str | Table | Code | Image"


@dataclass(frozen=True)
class Report:
    """What a result says: a title, and below it sentences, tables and programs in their order."""

    title: str
    parts: Sequence[Part] = ()
    where: Mapping[str, str] = field(default_factory=dict)
    """Names and addresses of what was made, such as "run" and its ID."""


class Reported:
    """A result that the console, a notebook and pages show by its `report`."""

    def report(self) -> Report:
        """What the result says."""
        raise NotImplementedError

    def _repr_html_(self) -> str:
        return html_of(self.report())


def figure(value: float | None, form: str = "{:.4g}") -> str:
    """A number for a cell; a dash where there is none."""
    return "–" if value is None else form.format(value)


_TIME_UNITS = ((1.0, "s"), (1e-3, "ms"))


def time_unit(seconds: float) -> tuple[float, str]:
    """The unit in which people read a time, or a column whose largest time it is: its seconds and its sign."""
    rounded = float(f"{seconds:.4g}")
    return next((unit for unit in _TIME_UNITS if rounded >= unit[0]), (1e-6, "µs"))


def duration(seconds: float) -> str:
    """A time for people, with four digits: 12.34 µs, 9.856 ms, 3.841 s."""
    unit_s, unit = time_unit(seconds)
    return f"{seconds / unit_s:.4g} {unit}"


def microseconds(seconds: float | None) -> str:
    """A time for a column of them; empty where there is none."""
    return "" if seconds is None else f"{seconds * 1e6:.1f}"


def html_of(report: Report, level: int = 3) -> str:
    """A report as HTML; credentials are hidden and texts escaped, whatever is in them."""
    return "\n".join([_tag(f"h{level}", report.title), *_body(report, level)])


def _body(report: Report, level: int) -> Iterator[str]:
    heading = f"h{level + 1}"
    for part in (*report.parts, *([Table(list(report.where.items()))] if report.where else [])):
        if isinstance(part, str):
            yield _tag("p", part)
        elif isinstance(part, Image):
            alt = html.escape(printable(part.caption))
            image = f'<img src="data:image/png;base64,{html.escape(part.base64)}" alt="{alt}">'
            yield f"<figure>{image}{_tag('figcaption', part.caption)}</figure>"
        else:
            yield _tag(heading, part.title) if part.title else ""
            yield _tag("pre", part.text) if isinstance(part, Code) else _table(part)


def _table(table: Table) -> str:
    numbers = [header.startswith(">") for header in table.headers]
    rows = [_row([header.lstrip(">~") for header in table.headers], numbers, "th")] if table.headers else []
    marks = [*table.marks, *[""] * (len(table.rows) - len(table.marks))]
    rows += [_row(row, numbers, "td", mark) for row, mark in zip(table.rows, marks, strict=True)]
    return f"<table>{''.join(rows)}</table>"


def _row(cells: Sequence[str], numbers: Sequence[bool], tag: str, mark: str = "") -> str:
    are_numbers = [*numbers, *[False] * (len(cells) - len(numbers))]
    made = (_tag(tag, cell, "number" if is_number else "") for cell, is_number in zip(cells, are_numbers, strict=True))
    return f"<tr{f' class={mark}' if mark else ''}>{''.join(made)}</tr>"


def _tag(tag: str, text: str, kind: str = "") -> str:
    return f"<{tag}{f' class={kind}' if kind else ''}>{html.escape(printable(text))}</{tag}>"
