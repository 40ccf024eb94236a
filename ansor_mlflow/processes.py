"""Processes that end with the one that started them, whatever ends it, and whose work has a time limit."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.pool import ExceptionWithTraceback  # type: ignore[attr-defined]
from typing import Any, TypeVar

from ansor_mlflow.errors import MachineError

Given = TypeVar("Given")
Result = TypeVar("Result")

TIME_LIMIT_S = 3600.0
"""Seconds that a child process may take: far more than the slowest network needs, and far less than for ever."""
_EXIT_S = 10.0
"""Seconds that a child which has answered may take to end."""
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Ends this process with the thread that started it.

    Args:
        parent: ID of the process that started it, if it is known: it may have died before this was called.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent not in (None, os.getppid()):
        os._exit(1)


def in_child_process(function: Callable[[Given], Result], argument: Given) -> Result:
    """Calls a function in a process that is started for it and ends after it, and never later than this one.

    Raises:
        MachineError: The process died, or its time was over. What the function raises is raised here.
    """
    context = multiprocessing.get_context("spawn")
    answers, answer = context.Pipe(duplex=False)
    process = context.Process(target=_call, args=(answer, os.getpid(), function, argument))
    with answers:
        try:
            with answer:
                process.start()
            if not wait([answers, process.sentinel], TIME_LIMIT_S):
                raise MachineError(
                    f"a process that runs the network took longer than {TIME_LIMIT_S:g} s, which is the limit, and was "
                    "ended; run it where nothing else runs, or compile the network again if it hangs"
                )
            with suppress(EOFError):
                result, err = answers.recv()
                process.join(_EXIT_S)  # what is measured next is to have the machine for itself
                if err is not None:
                    raise err
                return result  # type: ignore[no-any-return]
        finally:
            if process.pid is not None:
                process.kill()
                process.join()
    raise MachineError(
        "a process that runs the network died (out of memory, or a crash in its library); "
        'free memory, compile the network again, or, in a script, call this below `if __name__ == "__main__":`'
    )


def _call(answer: Connection, parent: int, function: Callable[[Given], Any], argument: Given) -> None:
    """The child: sends what the function returned or raised."""
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is told to the parent, which ends this process
    try:
        answer.send((function(argument), None))
    except Exception as err:  # noqa: BLE001 - it is raised in the parent
        answer.send((None, _sendable(err)))


def _sendable(err: Exception) -> ExceptionWithTraceback:
    """An error with its traceback; its text alone, where it is of a kind that cannot be sent."""
    try:
        pickle.loads(pickle.dumps(err))  # noqa: S301 - it was made in this line
        return ExceptionWithTraceback(err, err.__traceback__)
    except Exception:  # noqa: BLE001 - its constructor is called
        return ExceptionWithTraceback(RuntimeError(f"{type(err).__name__}: {err}"), err.__traceback__)
