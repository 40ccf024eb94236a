"""Worker processes that build and measure candidate programs, whatever those do.

A candidate may loop for ever, crash or eat its worker alive; each costs that one candidate. Workers are forked from a
server that has loaded TVM once, so that a new worker costs milliseconds instead of the seconds of that import.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Literal, TypeVar

from pebble import ProcessExpired, ProcessPool

from ansor_mlflow.errors import MachineError

In = TypeVar("In")
Out = TypeVar("Out")

_PRELOAD = ["ansor_mlflow.tuning.preload"]
_PR_SET_PDEATHSIG = 1
_MAX_ATTEMPTS = 3
_POLL_S = 1.0


@dataclass(frozen=True)
class Outcome(Generic[Out]):
    """What became of one call in a worker: a value, or why there is none."""

    value: Out | None = None
    failure: Literal["", "failed", "timed_out"] = ""
    error: str = ""


class WorkerPool:
    """A pool of processes that survives its tasks. To be closed, or used as a context manager.

    Args:
        max_workers: Number of processes.
        max_tasks: Tasks after which a worker is replaced by a fresh one, because builds leak; 0 keeps it.
    """

    def __init__(self, max_workers: int, *, max_tasks: int = 0) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        self._make_pool = partial(
            ProcessPool,
            max_workers=max_workers,
            max_tasks=max_tasks,
            initializer=_start_worker,
            context=context,
        )
        self._pool = self._make_pool()

    def map(self, function: Callable[[In], Out], inputs: Sequence[In], timeout_s: float) -> list[Outcome[Out]]:
        """Calls `function` in the workers, once for each input; outcomes come in the order of the inputs.

        A worker that dies between two tasks, because the system killed it, breaks Pebble's whole pool. All inputs are
        then done again in a new pool.

        Raises:
            MachineError: New pools break, too.
        """
        for _ in range(_MAX_ATTEMPTS):
            try:
                return self._map(function, inputs, timeout_s)
            except BrokenProcessPool:
                self.close()
                self._pool = self._make_pool()
        raise MachineError(
            f"worker processes died before they took up work, {_MAX_ATTEMPTS} times in a row; free memory, call the "
            'tuner below `if __name__ == "__main__":`, and look at the lines above'
        )

    def _map(self, function: Callable[[In], Out], inputs: Sequence[In], timeout_s: float) -> list[Outcome[Out]]:
        try:
            futures = [self._pool.schedule(function, args=[item], timeout=timeout_s) for item in inputs]
        except RuntimeError as err:
            raise BrokenProcessPool from err
        while wait(futures, _POLL_S).not_done:
            if not self._pool.active:  # a task that was scheduled while the pool broke would never be done
                raise BrokenProcessPool
        return [_outcome(future, timeout_s) for future in futures]

    def close(self) -> None:
        """Ends the workers, running tasks included."""
        self._pool.stop()
        self._pool.join()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _outcome(future: Any, timeout_s: float) -> Outcome[Any]:
    try:
        return Outcome(value=future.result())
    except TimeoutError:
        return Outcome(failure="timed_out", error=f"killed after {timeout_s:g} s")
    except ProcessExpired as err:
        return Outcome(failure="failed", error=f"the worker process died ({_exit_text(err.exitcode)})")
    except (CancelledError, BrokenProcessPool):
        raise
    except Exception as err:  # noqa: BLE001 - whatever a candidate raises is its result, not our failure
        return Outcome(failure="failed", error=_shortened(f"{type(err).__name__}: {err}"))


def _exit_text(exitcode: int) -> str:
    if exitcode < 0:
        return signal.Signals(-exitcode).name
    return f"exit code {exitcode}"


def _shortened(text: str, limit: int = 2000) -> str:
    return text if len(text) <= limit else text[:limit] + "…"


def _start_worker() -> None:
    """Ties the worker's life to that of the fork server, which dies with the tuner, and leaves Ctrl-C to the tuner."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
