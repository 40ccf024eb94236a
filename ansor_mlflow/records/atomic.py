"""Files that are either whole or not there, whenever the process or the machine stops."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

_RESERVE_BYTES = 8 * 2**20


def write_text(path: Path, text: str) -> None:
    """Writes a file under a temporary name, flushes it to the disk, and gives it its name."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def is_full(directory: Path) -> bool:
    """Whether a directory's disk has no more than the reserve with which a run still ends in good order."""
    return shutil.disk_usage(directory).free < _RESERVE_BYTES
