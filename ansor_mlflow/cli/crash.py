"""What becomes of an error that is none of our kinds: one line, and a file for whoever mends it."""

from __future__ import annotations

import errno
import os
import platform
import shlex
import sys
import tempfile
import traceback
from importlib.metadata import distributions

from ansor_mlflow.errors import AnsorMlflowError, MachineError, UserInputError, add_note, notes_of, one_line, shortened
from ansor_mlflow.foreign import printable

_OF_USER = {errno.ENAMETOOLONG, errno.ELOOP, errno.EISDIR, errno.ENOTDIR}
"""What the system says of a path that was given."""
_PACKAGES = ("ansor_mlflow", "apache-tvm", "mlflow", "numpy", "onnx")


def known_error(err: Exception) -> AnsorMlflowError:
    """The error to end a command with: that of the system or of the machine's memory in our kinds, or a crash."""
    if isinstance(err, MemoryError):
        return MachineError("there is not enough memory; give a smaller network or batch, or take a larger machine")
    if isinstance(err, OSError) and err.errno in _OF_USER:
        name = shortened(str(err.filename or "a file"), 100)
        return UserInputError(f"{name}: {err.strerror}; give another name")
    found = AnsorMlflowError(
        f"{type(err).__name__}: {one_line(err)}: this is a bug; to have it mended, report it with the file "
        f"{_written(err)}, which says where it happened"
    )
    for note in notes_of(err):
        add_note(found, note)
    return found


def _written(err: Exception) -> str:
    """The path of a file with the traceback, the versions and the command, as they may be shown."""
    installed = {found.name.lower(): found.version for found in distributions()}
    versions = ", ".join(f"{name} {installed.get(name, 'is missing')}" for name in _PACKAGES)
    head = f"{shlex.join(sys.argv)}\n{versions}, Python {platform.python_version()}, {platform.platform()}\n\n"
    text = printable(head + "".join(traceback.format_exception(err)))
    try:
        number, path = tempfile.mkstemp(prefix="ansor-mlflow-", suffix=".txt")
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError:  # no place for it
        sys.stderr.write(text)
        return "above"
    return path
