"""Pages of HTML that hold everything they show: no scripts, nothing from a network."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2


@dataclass(frozen=True, kw_only=True)
class Image:
    """A picture within a page."""

    base64: str
    """The PNG file."""
    caption: str

    @staticmethod
    def of_file(path: Path, caption: str) -> Image:
        """Reads a PNG file."""
        return Image(base64=base64.b64encode(path.read_bytes()).decode(), caption=caption)


def render_page(template: str, *, title: str, subtitle: str = "", **values: Any) -> str:
    """Fills in a template of `templates/` that extends `base.html`. Texts are escaped, whatever is in them.

    Args:
        template: File name of the template.
        title: Title of the page.
        subtitle: Below it.
        values: What the template names besides.
    """
    return _environment().get_template(template).render(title=title, subtitle=subtitle, **values)


def html_table(title: str, rows: Iterable[Sequence[str]], headers: Sequence[str] = ()) -> str:
    """A table as a notebook shows it; texts are escaped.

    Args:
        title: Above it.
        rows: Texts of the cells.
        headers: Headers of the columns.
    """
    lines = [_row(headers, "th")] if headers else []
    lines += [_row(row, "td") for row in rows]
    return f"<table><caption>{html.escape(title)}</caption>{''.join(lines)}</table>"


def _row(cells: Sequence[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("ansor_mlflow.tracking.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
