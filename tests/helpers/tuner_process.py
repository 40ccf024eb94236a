"""A real `ansor-mlflow tune` in a process of its own, to be disturbed."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from helpers.commands import ANSOR_MLFLOW, FAST, Finished, flags

from ansor_mlflow import names
from ansor_mlflow.records import RecordPair, distill

SMALL_ROUNDS = {**FAST, "space": "metaschedule", "cost_model": "none", "num_trials_per_round": 2}
"""Parameters with which a tuning of a small network has many rounds, soon."""
READY_S = 240
"""Time that a tuning gets for its first rounds."""
FINISHED_S = 400
"""Time that one gets to end by itself, beside other tests on a slow machine."""


@dataclass(frozen=True)
class Tuning:
    """A running `ansor-mlflow tune`, the leader of a process group of its own, as a shell's job is."""

    process: subprocess.Popen[bytes]
    cwd: Path

    @property
    def descendants(self) -> list[psutil.Process]:
        """The fork server, the resource tracker, and the workers."""
        return psutil.Process(self.process.pid).children(recursive=True)

    @property
    def workers(self) -> list[psutil.Process]:
        """The processes that build and measure: children of the fork server."""
        direct = {process.pid for process in psutil.Process(self.process.pid).children()}
        return [process for process in self.descendants if process.pid not in direct]

    @property
    def stderr(self) -> str:
        return (self.cwd / "stderr").read_text()

    @property
    def num_rounds(self) -> int:
        return len(re.findall(r"^ +\d+ trials +[\d.]+ s  ", self.stderr, flags=re.MULTILINE))

    @property
    def records(self) -> Path:
        (directory,) = (self.cwd / ".ansor").glob(f"*/{names.RECORDS_DIR}")
        return directory

    @property
    def run_id(self) -> str:
        return self.records.parent.name

    def wait_for_rounds(self, num_rounds: int) -> None:
        """Waits until some rounds are over; their trials are in the database."""
        deadline = time.monotonic() + READY_S
        while self.num_rounds < num_rounds:
            assert self.process.poll() is None, self.stderr
            assert time.monotonic() < deadline, self.stderr
            time.sleep(0.02)

    def wait(self, timeout_s: float = FINISHED_S) -> Finished:
        exit_code = self.process.wait(timeout_s)
        return Finished(exit_code, (self.cwd / "stdout").read_text(), self.stderr)


@contextmanager
def tuning(
    network: Path | str,
    cwd: Path,
    env: Mapping[str, str],
    *,
    wrapper: Sequence[str] = (),
    command: Sequence[str] = (),
    **parameters: object,
) -> Iterator[Tuning]:
    """Starts a tuning in `cwd`, which is its TMPDIR, too, and has to be in `short_path`; ends what is left of it."""
    cwd.mkdir(exist_ok=True)
    tune = [ANSOR_MLFLOW, "tune", *flags({**SMALL_ROUNDS, "network": network, **parameters})]
    with (cwd / "stdout").open("wb") as out, (cwd / "stderr").open("wb") as err:
        process = subprocess.Popen(
            [*wrapper, *(command or tune)],
            cwd=cwd,
            env={**env, "TMPDIR": str(cwd)},
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
    started = Tuning(process, cwd)
    descendants: list[psutil.Process] = []
    try:
        yield started
    finally:
        if process.poll() is None:
            descendants = started.descendants
            process.kill()
            process.wait()
        for descendant in descendants:
            kill(descendant)


def assert_gone(processes: list[psutil.Process], timeout_s: float = 60) -> None:
    """Asserts that processes end in time; one that only waits to be reaped by the system has ended."""
    deadline = time.monotonic() + timeout_s
    while alive := [process for process in processes if is_alive(process)]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.05)


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill(process: psutil.Process) -> None:
    """Kills a process that may have ended in the meantime."""
    with suppress(psutil.NoSuchProcess):
        process.kill()


def assert_readable(records: Path, destination: Path, min_trials: int) -> None:
    """Asserts that a database holds whole records of at least so many trials."""
    pair = RecordPair.in_directory(records)
    lines = pair.records.read_text().splitlines()
    assert len(lines) >= min_trials
    target = json.loads(lines[0])[1][2]
    assert distill(pair, destination, target) >= 1
