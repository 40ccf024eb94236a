"""A disk on which one step of a program's work with files fails, or at which the program is killed."""

from __future__ import annotations

import contextlib
import errno
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from ansor_mlflow import files

Fault = Literal["short write", "EIO", "killed before", "killed after"]
FAULTS: tuple[Fault, ...] = ("short write", "EIO", "killed before", "killed after")
_STEPS = ("fsync", "replace", "rename", "unlink", "rmdir", "mkdir", "truncate")
_ERRNOS = {"short write": errno.ENOSPC, "EIO": errno.EIO}


class KilledError(BaseException):
    """The program is dead: whatever it would clean up stays as it is."""


class FaultyDisk:
    """Counts the steps below a folder, and lets one of them fail; step 0 is none."""

    def __init__(self, root: Path, fault: Fault, step: int) -> None:
        self._root = str(root)
        self._fault = fault
        self._step = step
        self.num_steps = 0
        self.is_dead = False

    def do(self, target: Any, action: Callable[[], Any], halfway: Callable[[], Any] = lambda: None) -> Any:
        """Does a step, unless it is the one that fails."""
        if not _path_of(target).startswith(self._root):
            return action()
        if self.is_dead:
            raise KilledError
        self.num_steps += 1
        if self.num_steps != self._step:
            return action()
        if self._fault in _ERRNOS:
            if self._fault == "short write":
                halfway()
            raise OSError(_ERRNOS[self._fault], os.strerror(_ERRNOS[self._fault]), str(target))
        self.is_dead = True
        if self._fault == "killed after":
            action()
        raise KilledError

    @contextlib.contextmanager
    def inserted(self) -> Iterator[None]:
        """This disk in the place of the real one, for what this process does."""
        with pytest.MonkeyPatch.context() as patch:
            for name in _STEPS:
                patch.setattr(os, name, self._wrapped(getattr(os, name)))
            patch.setattr("ansor_mlflow.files._exchange", self._wrapped(files._exchange))
            patch.setattr(io, "open", self._open)
            patch.setattr("builtins.open", self._open)
            yield

    def _wrapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def step(target: Any, *args: Any, **kwargs: Any) -> Any:
            place = target if kwargs.get("dir_fd") is None else Path(_path_of(kwargs["dir_fd"]), target)
            return self.do(place, lambda: function(target, *args, **kwargs))

        return step

    def _open(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if not set(mode) & set("wax"):
            return _real_open(file, mode, *args, **kwargs)
        opened = self.do(file, lambda: _real_open(file, mode, *args, **kwargs))
        write = opened.write

        def write_or_fail(data: Any) -> Any:
            def half() -> None:
                write(data[: len(data) // 2])
                opened.flush()

            def whole() -> Any:
                written = write(data)
                opened.flush()  # what is written is on the disk, even if the program dies now
                return written

            return self.do(file, whole, half)

        return _File(opened, write_or_fail)


class _File:
    def __init__(self, opened: Any, write: Callable[[Any], Any]) -> None:
        self._opened = opened
        self.write = write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opened, name)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()


def _path_of(target: Any) -> str:
    if isinstance(target, int):
        return str(Path(f"/proc/self/fd/{target}").readlink())
    return str(Path(target).absolute())


_real_open = io.open
