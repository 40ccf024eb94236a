"""The kinds of errors that a user meets, each with the exit code of the command that ends with it."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

from ansor_mlflow.foreign import printable, printable_line

_MAX_CHARS = 4000
_TRACEBACK = re.compile(r"Traceback \(most recent call last\):.*\n(?=\S)", re.DOTALL)


def one_line(err: BaseException, limit: int = 300) -> str:
    """An error's text on one line, shortened, and as it may be shown: servers and files repeat what they were given.

    Of the tracebacks that some servers send the last line is left.
    """
    text = _TRACEBACK.sub("", str(err))
    return shortened(printable(" ".join(text.split()) or type(err).__name__), limit)


def shortened(text: str, limit: int) -> str:
    """The beginning of a text that is too long."""
    return text if len(text) <= limit else f"{text[:limit]}…"


def add_note(err: BaseException, note: str) -> None:
    """Adds lines that are printed below an error, as `BaseException.add_note` of Python 3.11 does."""
    err.__dict__.setdefault("__notes__", []).append(note)


def notes_of(err: BaseException | None) -> list[str]:
    """What `add_note` has added."""
    return list(getattr(err, "__notes__", []))


def first_line(err: BaseException | str) -> str:
    """The first line of an error's text; those of TVM go on with a stack."""
    return (str(err).strip().splitlines() or ["" if isinstance(err, str) else type(err).__name__])[0]


@contextmanager
def only_warn(what: str) -> Iterator[None]:
    """Makes an error inside a warning that begins with `what`: it is no reason to end a step."""
    try:
        yield
    except Exception as err:  # noqa: BLE001 - whatever it is, the step goes on without
        logging.getLogger("ansor_mlflow").warning("%s: %s", what, one_line(err))


class AnsorMlflowError(Exception):
    """A condition that a user can understand and act on.

    The message is one line: what was given, what the rule is, what to do next. It may be shown: see `printable`.
    """

    exit_code = 1

    def __init_subclass__(cls, exit_code: int = 0) -> None:
        cls.exit_code = exit_code or cls.exit_code  # a kind of a kind ends with the same

    def __init__(self, message: str) -> None:
        if len(message) > _MAX_CHARS:  # of what was given, which stands in the middle: the end says what to do
            message = f"{message[: _MAX_CHARS // 2]}…{message[-_MAX_CHARS // 2 :]}"
        super().__init__(printable_line(message))


class UserInputError(AnsorMlflowError, exit_code=2):
    """A parameter, a file or a name that the user gave is not usable."""


class MachineError(AnsorMlflowError, exit_code=3):
    """Something outside the program is missing: a package, a compiler, a server, a bucket."""


class TuningError(AnsorMlflowError, exit_code=4):
    """Tuning ended without a valid trial for a task that has work to do."""


class RecordsError(AnsorMlflowError, exit_code=5):
    """Tuning records are damaged, missing, or belong to another device."""


class ModelError(AnsorMlflowError, exit_code=6):
    """A tuned model was altered, is incomplete, or has no library for this machine."""


class CorrectnessError(AnsorMlflowError, exit_code=7):
    """The compiled network's outputs differ from the reference by more than the tolerance."""


class SlowerError(AnsorMlflowError, exit_code=8):
    """A tuning is slower than the one that it is compared with by more than the user allows."""


class NotFasterError(AnsorMlflowError, exit_code=9):
    """A model was not promoted, because it is not faster than the champion by as much as the user wants."""


class UndecidedError(AnsorMlflowError, exit_code=10):
    """A model was not promoted, because it was not decided which one is faster, or the champion changed meanwhile."""


INTERRUPTED_EXIT_CODE = 130
"""Exit code of a command that SIGINT or SIGTERM ended."""


def error_for_exit_code(exit_code: int, message: str) -> AnsorMlflowError:
    """The error kind that ends a command with `exit_code`, carrying `message`."""
    for kind in AnsorMlflowError.__subclasses__():
        if kind.exit_code == exit_code:
            return kind(message)
    return AnsorMlflowError(message)
