"""Scratch directories that do not outlive their tuner, even if it is killed."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from filelock import FileLock, Timeout

from ansor_mlflow.errors import MachineError
from ansor_mlflow.files import is_full

_PREFIX = "ansor_mlflow-build-"
_OWNER_LOCK = ".owner.lock"
_DISK_FULL = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))


class ScratchDirectory:
    """A new directory in the system's temporary directory, held by a lock as long as this process lives.

    Making one removes those of tuners that were killed: their locks are free. To be closed.
    """

    def __init__(self) -> None:
        _remove_abandoned(Path(tempfile.gettempdir()))
        hidden = Path(tempfile.mkdtemp(prefix="ansor_mlflow-new-"))
        self.path = hidden.with_name(hidden.name.replace("ansor_mlflow-new-", _PREFIX))
        """Path of the directory."""
        self._lock = FileLock(hidden / _OWNER_LOCK)
        self._lock.acquire()
        hidden.rename(self.path)  # only now do other tuners see it, and it is locked

    def require_space(self, errors: Iterable[str] = ()) -> None:
        """Checks that files can be written.

        Args:
            errors: What failed meanwhile; a quota that is used up, or a lack of inodes, shows there alone.

        Raises:
            MachineError: The disk is full.
        """
        if is_full(self.path) or any(sign in error for error in errors for sign in _DISK_FULL):
            raise MachineError(
                f"no space is left in the temporary directory {self.path.parent}; free some, or set TMPDIR to another"
            )

    def close(self) -> None:
        """Removes the directory."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()


def _remove_abandoned(parent: Path) -> None:
    for directory in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError, Timeout):
            if directory.is_symlink() or directory.stat().st_uid != os.getuid():
                continue
            with FileLock(directory / _OWNER_LOCK, timeout=0):
                shutil.rmtree(directory, ignore_errors=True)
