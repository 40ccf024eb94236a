"""What may be shown of a text: to a terminal, and to a shell that a command is given to."""

from __future__ import annotations

import logging
import re
import shlex

from ansor_mlflow.foreign.credentials import without_credentials

_UNSEEN = re.compile(
    "[\0-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb]"
)
"""What moves a terminal's cursor, changes its colours or the order of letters, or is not seen; and half characters."""


def printable(text: str) -> str:
    """A text from anywhere for a terminal, a log or a page: without credentials, control characters as escapes."""
    return _UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode(), without_credentials(text))


def printable_line(text: str) -> str:
    """A text as `printable` makes it, on one line."""
    return printable(" ".join(text.split("\n")))


def printable_json(text: str) -> str:
    """JSON with what moves a terminal's cursor as escapes of JSON, which mean the same."""
    return _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class PrintableFormatter(logging.Formatter):
    """Formats what is logged as `printable`, tracebacks too."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def for_shell(text: str, variable: str) -> str:
    """A word of a command line. One with credentials is left to a variable, without which the shell says what to do.

    Args:
        text: What the command is to be given.
        variable: Name of an environment variable that has, or is to have, this text.
    """
    if without_credentials(text) == text:
        return shlex.quote(text)
    return f'"${{{variable}:?is to have it, with its credentials}}"'
