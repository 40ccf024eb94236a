"""A process that works on one model, within bounds of time and memory, and what became of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ansor_mlflow.errors import MachineError
from ansor_mlflow.processes import bound_process, die_with_parent

End = Literal["whole", "parts", "refused", "traceback", "crashed", "late"]
"""How a process ended: all of the model or some of it is tuned; a clear error; any other one; by a signal; not in time.
"""
ENDS: dict[End, str] = {
    "whole": "in whole",
    "parts": "in parts",
    "refused": "refused",
    "traceback": "traceback",
    "crashed": "crashed",
    "late": "too late",
}


@dataclass(frozen=True, kw_only=True)
class Child:
    """What a process left behind."""

    end: End
    seconds: float
    """Wall-clock time with the start of Python and the imports."""
    message: str = ""
    """The last thing it said, where it did not succeed."""
    result: Any = None
    """The JSON that it printed, where it did."""


def run_child(command: Sequence[str], folder: Path, limit_s: float, memory_bytes: int | None = None) -> Child:
    """Runs a command that prints JSON, in a directory of its own; ends it after `limit_s`, with all that it started.

    Args:
        command: The command.
        folder: Where the models are; messages name a file without it.
        limit_s: Seconds.
        memory_bytes: Data memory that each of its processes may take.
    """
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=directory,
            env={**os.environ, "COLUMNS": "1000"},
            start_new_session=True,
            preexec_fn=partial(_begin, memory_bytes),  # noqa: PLW1509 - this process has no other threads
        )
        try:
            stdout, stderr = child.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return Child(end="late", seconds=limit_s, message=f"not done after {limit_s:g} s")
        finally:
            if child.poll() is None:  # after Ctrl-C, too: it is told to this process alone
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    seconds = round(time.monotonic() - started_s, 2)
    if child.returncode == 0:
        result = json.loads(stdout)
        return Child(end="parts" if result.get("parts") else "whole", seconds=seconds, result=result)
    message = _message(stderr, child.returncode).replace(f"{folder}/", "")
    return Child(end=_failure(stderr, child.returncode), seconds=seconds, message=message)


def _begin(memory_bytes: int | None) -> None:
    """Ends with the benchmark, however that ends, and takes no more than it may."""
    die_with_parent()
    bound_process(memory_bytes)


def _failure(stderr: str, exit_code: int) -> End:
    if exit_code < 0 or exit_code == MachineError.exit_code:  # it, or a process that it had started
        return "crashed"
    return "traceback" if exit_code == 1 or "Traceback (most recent call last)" in stderr else "refused"


def _message(stderr: str, exit_code: int) -> str:
    """The error in what a process printed: the last line that begins as one does."""
    lines = [line for line in stderr.splitlines() if line.strip() and not line.startswith((" ", "["))]
    errors = [line for line in lines if "Error" in line.split(":")[0]]
    return (errors or lines or [f"it ended with {exit_code}"])[-1][:500]
