"""Files that are either whole or not there, whenever the process or the machine stops; and where they may be."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from ansor_mlflow.errors import MachineError

_RESERVE_BYTES = 8 * 2**20
_MAX_NAME_BYTES = 255
"""Longest name of a file on Linux."""


def path_below(folder: Path, name: str) -> Path:
    """The path below a folder that a name means which came from a file, a server or a URI.

    Every such name passes here before anything is read or written under it.

    Raises:
        ValueError: It is no plain relative path, or a link on the way leads out of the folder.
    """
    parts = PurePosixPath(name).parts if isinstance(name, str) else ()
    is_plain = name.isprintable() and not any(p in ("/", "//", "..") for p in parts) if parts else False
    if not is_plain or max(len(os.fsencode(part)) for part in parts) > _MAX_NAME_BYTES:
        raise ValueError(f"{name!r:.100} names no file below a folder")
    path = folder / name
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
        raise ValueError(f"{name!r:.100} is a link to something outside of its folder")
    return path


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A file that gets its name, and is on the disk, once all of it was written; nothing is left after an error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes a whole file, or leaves it as it was."""
    with new_file(path) as file:
        file.write(text.encode())


def append(path: Path, data: bytes) -> None:
    """Appends to a file, and flushes it to the disk; takes back what was written if that fails.

    Raises:
        MachineError: The disk is full.
    """
    path.touch()
    size = path.stat().st_size
    try:
        with path.open("ab") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as err:
        os.truncate(path, size)
        if err.errno in (errno.ENOSPC, errno.EDQUOT):
            raise disk_full(path) from err
        raise


def end_last_line(path: Path) -> None:
    """Ends the last line of a file: its writer may have died in it, or just before the end."""
    path.touch()
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        if file.read() in (b"", b"\n"):
            return
    append(path, b"\n")


def is_full(directory: Path) -> bool:
    """Whether a directory's disk has no more than the reserve with which a run still ends in good order."""
    return shutil.disk_usage(directory).free < _RESERVE_BYTES


def disk_full(path: Path) -> MachineError:
    """The error that says so."""
    return MachineError(f"no space is left for records in {path.parent}; free some, and tune again")
