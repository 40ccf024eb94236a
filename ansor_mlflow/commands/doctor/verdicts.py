"""What a check finds, and how checks are run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, TimeoutError
from dataclasses import dataclass
from typing import Literal

from ansor_mlflow.errors import AnsorMlflowError, one_line


@dataclass(frozen=True)
class Check:
    """What was found about one thing."""

    name: str
    status: Literal["green", "yellow", "red"]
    """Green is fine; with yellow a tuning works, but is slow or less exact, or something could not be looked at; with
    red it fails, or its numbers mean nothing."""
    message: str
    fix: str = ""
    """What to do; empty where it is green."""

    def __str__(self) -> str:
        return f"{self.name:<17}{self.message}{f'; {self.fix}' if self.fix else ''}"


RunCheck = Callable[[], Check | None]
"""Looks at one thing; returns None where there is nothing to look at."""


def run_checks(checks: Mapping[str, RunCheck]) -> Iterator[Check]:
    """Makes checks one after the other; one that ends with an error is red."""
    for name, run in checks.items():
        try:
            found = run()
        except Exception as err:  # noqa: BLE001 - whatever goes wrong in a check is what it found
            found = failed(name, err)
        if found is not None:
            yield found


def failed(name: str, err: Exception) -> Check:
    """A check that ended with an error; one of ours has the fix as the last clause of its message."""
    if not isinstance(err, AnsorMlflowError):
        return Check(name, "red", f"{type(err).__name__}: {one_line(err)}", "look for the cause in docs/errors.md")
    message, _, fix = str(err).rpartition("; ")
    return Check(name, "red", message or str(err), fix if message else "look for the cause in docs/errors.md")


def bounded(name: str, run: RunCheck, timeout_s: float) -> RunCheck:
    """A check that waits for others than this machine: in a thread, which is left alone if it takes too long."""

    def run_bounded() -> Check | None:
        found: Future[list[Check]] = Future()
        threading.Thread(target=lambda: found.set_result(list(run_checks({name: run}))), daemon=True).start()
        try:
            return next(iter(found.result(timeout_s)), None)
        except TimeoutError:
            fix = "check the address, the network and what is in between"
            return Check(name, "red", f"no answer within {timeout_s:.0f} s", fix)

    return run_bounded
