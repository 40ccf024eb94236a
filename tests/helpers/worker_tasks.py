"""What tests have workers do. A worker imports the module of its task, so this one imports little."""

from __future__ import annotations

import os
import time
from collections import deque
from itertools import repeat
from pathlib import Path


def pid_of_worker(_: object) -> int:
    return os.getpid()


def grow(_: object) -> None:
    """Takes memory bit by bit, as a build that unrolls for ever."""
    chunks = []
    while True:
        chunks.append(bytearray(2**20))


def fill_array(_: object) -> None:
    import numpy as np

    np.ones(2**28)


def fill_tensor(_: object) -> None:
    import tvm

    tvm.runtime.empty((2**29,), "float32")


def hang(path: Path) -> None:
    """Writes the worker's process ID to a file, and never returns."""
    path.write_text(str(os.getpid()))
    while True:
        time.sleep(60)


def loop_in_c(_: object) -> None:
    """Never returns to Python's interpreter, as a kernel that loops for ever."""
    deque(repeat(None), maxlen=0)


def wait_for_pid(path: Path, timeout_s: float = 120) -> int:
    """The process ID of a worker that hangs, as soon as it does."""
    deadline_s = time.monotonic() + timeout_s
    while not path.exists() or not path.read_text():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    return int(path.read_text())
