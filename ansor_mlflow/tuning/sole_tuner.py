"""One tuner per directory: two would number the workloads of one database differently."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from ansor_mlflow.errors import UserInputError
from ansor_mlflow.files import write_text


@contextmanager
def sole_tuner(directory: Path) -> Iterator[None]:
    """Holds a directory, which is made if need be; the system lets go of it when the process ends, however it ends.

    Raises:
        UserInputError: Another tuner holds it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    directory = directory.resolve()  # it has one name only, and is not "."
    owner = directory.with_name(f"{directory.name}.tuner.json")
    lock = FileLock(directory.with_name(f"{directory.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout as err:
        raise UserInputError(
            f"{directory}: {_describe(owner)} tunes in this directory; wait until it ends, or give another directory"
        ) from err
    try:
        started = datetime.now().astimezone().isoformat(timespec="seconds")
        write_text(owner, json.dumps({"process": os.getpid(), "host": platform.node(), "started": started}))
        yield
    finally:
        owner.unlink(missing_ok=True)
        lock.release()


def _describe(owner: Path) -> str:
    try:
        fields = json.loads(owner.read_text())
        return f"process {fields['process']} on {fields['host']} (since {fields['started']})"
    except (OSError, ValueError, KeyError):  # it has only just begun, or is about to end
        return "another process"
