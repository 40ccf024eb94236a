"""The decisions of a sketch, as programs and their records carry them."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

Tile = Any
"""The decisions of a sketch: a frozen dataclass of numbers and words."""
ANNOTATION = "ansor.sketch"
"""Of a program's outermost block: the sketch and its decisions, as `decision_text` has them."""
_IN_RECORD = re.compile(rf'"Annotate",\s*\[\s*"b\d+",\s*"\\"([^"\\]*)\\""\s*\],\s*\[\s*"{re.escape(ANNOTATION)}"\s*\]')
"""The instruction in the JSON of a trace, whose value is a string in quotes."""


def decision_text(sketch: str, tile: Tile) -> str:
    """A decision in words, such as "register tile: lanes 16, vectors 2, columns 7, rows 1, parallel".

    There are no quotes in it: TVM prints a schedule's annotations as they are.

    Args:
        sketch: Name of the sketch.
        tile: Its decisions.
    """
    words = [_words(field.name.replace("_", " "), getattr(tile, field.name)) for field in fields(tile)]
    return f"{sketch}: {', '.join(filter(None, words))}"


def _words(name: str, value: object) -> str:
    if isinstance(value, bool):
        return name if value else ""
    if value is None:
        return ""
    return f"{name} {value}"


def find_decision(record: str) -> str:
    """The annotation in the JSON of a record; empty where the program is of no sketch."""
    found = _IN_RECORD.search(record)
    return found[1] if found else ""
