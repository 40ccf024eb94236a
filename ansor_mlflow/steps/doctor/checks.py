"""What a check finds."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from ansor_mlflow.errors import AnsorMlflowError, one_line

Status = Literal["green", "yellow", "red"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """What was found about one thing."""

    name: str
    status: Status
    """Green is fine; with yellow a tuning works, but is slow or less exact, or something could not be looked at; with
    red it fails, or its numbers mean nothing."""
    message: str
    fix: str = ""
    """What to do; empty where it is green."""

    @staticmethod
    def green(name: str, message: str) -> Check:
        """What is as it should be."""
        return Check(name=name, status="green", message=message)

    @staticmethod
    def yellow(name: str, message: str, fix: str) -> Check:
        """What could be better."""
        return Check(name=name, status="yellow", message=message, fix=fix)

    @staticmethod
    def red(name: str, message: str, fix: str) -> Check:
        """What does not work."""
        return Check(name=name, status="red", message=message, fix=fix)

    @staticmethod
    def of_error(name: str, err: Exception, fix: str = "look for the cause in docs/errors.md") -> Check:
        """What failed; an error of ours has the fix as the last clause of its message."""
        text = str(err) if isinstance(err, AnsorMlflowError) else f"{type(err).__name__}: {one_line(err)}"
        message, semicolon, next_step = text.rpartition("; ")
        is_ours = bool(semicolon) and isinstance(err, AnsorMlflowError)
        return Check.red(name, message if is_ours else text, next_step if is_ours else fix)


RunCheck = Callable[[], Check | None]
"""Looks at one thing; None where there is nothing to look at."""


def run_checks(checks: Mapping[str, RunCheck]) -> Iterator[Check]:
    """Makes checks one after the other; one that ends with an error is red."""
    for name, run in checks.items():
        try:
            found = run()
        except Exception as err:  # noqa: BLE001 - whatever goes wrong in a check is what it found
            found = Check.of_error(name, err)
        if found is not None:
            yield found


class BackgroundChecks:
    """Checks that wait for others than this machine: they run in a thread, which is left alone if they take too long.

    Args:
        checks: See `run_checks`; by their names.
        timeout_s: Seconds from now that all of them may take.
    """

    def __init__(self, checks: Mapping[str, RunCheck], timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s
        self._running = ""
        self._found: queue.SimpleQueue[Check | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, args=[checks], daemon=True).start()

    def _run(self, checks: Mapping[str, RunCheck]) -> None:
        for name, run in checks.items():
            self._running = name
            for check in run_checks({name: run}):
                self._found.put(check)
        self._found.put(None)

    def results(self) -> Iterator[Check]:
        """The checks, each as soon as it is done; in place of one that takes too long, and of those after it, a red."""
        while True:
            try:
                check = self._found.get(timeout=max(0.0, self._deadline_s - time.monotonic()))
            except queue.Empty:
                message = f"no answer within {self._timeout_s:.0f} s"
                yield Check.red(self._running, message, "check the address, the network and what is in between")
                return
            if check is None:
                return
            yield check
