"""Child processes end with their parent, whatever ends it, and have a time limit."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ansor_mlflow.errors import MachineError, UserInputError
from ansor_mlflow.model import rebuild
from ansor_mlflow.model.rebuild import BuildJob, build_in_child_process
from ansor_mlflow.processes import in_child_process
from ansor_mlflow.settings import LoweringSettings

_PARENT = """
import os, sys, time
from ansor_mlflow.model import rebuild
from ansor_mlflow.processes import in_child_process
from ansor_mlflow.settings import LoweringSettings

def hang(path):
    with open(path, "w") as file:
        print(os.getpid(), file=file)
    time.sleep(600)

def make_builds_hang():
    rebuild.build = lambda job: hang(job.network)

def build(path):
    rebuild._CHILD = rebuild._CHILD.replace("; main(", "; import parent; parent.make_builds_hang(); main(")
    lowering = LoweringSettings()
    job = rebuild.BuildJob(network=path, records="", target={}, num_threads=1, lowering=lowering, library="")
    rebuild.build_in_child_process(job)

if __name__ == "__main__":
    build(sys.argv[2]) if sys.argv[1] == "build" else in_child_process(hang, sys.argv[2])
"""


class UnsendableError(Exception):
    """Cannot be made again from its text."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def fail(kind: str) -> None:
    raise UnsendableError(kind, "cannot be sent") if kind == "unsendable" else UserInputError(f"{kind} is refused")


def wait_until(holds: Callable[[], bool]) -> bool:
    end_s = time.monotonic() + 60
    while not (held := holds()) and time.monotonic() < end_s:
        time.sleep(0.02)
    return held


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize("kind", ["measurement", "build"])
def test_a_child_ends_with_a_parent_that_is_killed(kind: str, tmp_path: Path) -> None:
    script, pid_file = tmp_path / "parent.py", tmp_path / "pid"
    script.write_text(_PARENT)
    parent = subprocess.Popen([sys.executable, str(script), kind, str(pid_file)])
    try:
        assert wait_until(lambda: pid_file.exists() and pid_file.read_text().endswith("\n"))
        child = int(pid_file.read_text())
        assert not is_gone(child)
    finally:
        parent.kill()
        parent.wait()
    assert wait_until(lambda: is_gone(child))


def test_a_child_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ansor_mlflow.processes.TIME_LIMIT_S", 0.5)
    started_s = time.monotonic()
    with pytest.raises(MachineError, match=r"took longer than 0.5 s, which is the limit, and was ended"):
        in_child_process(time.sleep, 600)
    assert time.monotonic() - started_s < 30


def test_a_build_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(rebuild, "TIME_LIMIT_S", 0.2)
    lowering = LoweringSettings()
    job = BuildJob(network=str(tmp_path), records="", target={}, num_threads=1, lowering=lowering, library="")
    with pytest.raises(MachineError, match=r"builds the library took longer than 0.2 s, which is the limit"):
        build_in_child_process(job)


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [("this", UserInputError, "^this is refused$"), ("unsendable", RuntimeError, "UnsendableError: unsendable cannot")],
)
def test_an_error_of_the_child_is_raised_here(kind: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text) as raised:
        in_child_process(fail, kind)
    assert "in fail" in str(raised.value.__cause__)


def test_a_long_answer_comes_whole() -> None:
    assert len(in_child_process(bytes, 10**8)) == 10**8
