"""Child processes end with their parent, whatever ends it, and have a time limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ansor_mlflow.errors import MachineError, UserInputError
from ansor_mlflow.processes import in_child_process

_PARENT = """
import os, sys, time
from ansor_mlflow.processes import in_child_process

def hang(path):
    with open(path, "w") as file:
        print(os.getpid(), file=file)
    time.sleep(600)

if __name__ == "__main__":
    in_child_process(hang, sys.argv[1])
"""
_UNGUARDED = """
from ansor_mlflow.processes import in_child_process

print(in_child_process(abs, -3))
"""


class UnsendableError(Exception):
    """Cannot be made again from its text."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def fail(kind: str) -> None:
    raise UnsendableError(kind, "cannot be sent") if kind == "unsendable" else UserInputError(f"{kind} is refused")


def die(word: str) -> None:
    print(word, file=sys.stderr, flush=True)
    os._exit(1) if word else os.kill(os.getpid(), signal.SIGSEGV)


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


def test_a_child_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    script, pid_file = tmp_path / "parent.py", tmp_path / "pid"
    script.write_text(_PARENT)
    parent = subprocess.Popen([sys.executable, str(script), str(pid_file)])
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
    assert time.monotonic() - started_s < 200


def test_a_script_without_a_guard_may_call_functions_of_modules(tmp_path: Path) -> None:
    """As one does that loads a model for which a library has to be built."""
    script = tmp_path / "script.py"
    script.write_text(_UNGUARDED)
    assert subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True).stdout == "3\n"


def test_a_child_that_dies_says_its_last_words() -> None:
    with pytest.raises(MachineError, match=r"^the process that dies died \(no memory\); look away$"):
        in_child_process(die, "no memory", work="dies", advice="look away", is_quiet=True)
    with pytest.raises(MachineError, match=r"died \(SIGSEGV\)"):
        in_child_process(die, "")


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
