"""Worker and child processes survive whatever a task does, end with their parent, and leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import pebble
import psutil
import pytest
from helpers.worker_tasks import hang, loop_in_c, pid_of_worker, wait_for_pid

from ansor_mlflow import processes
from ansor_mlflow.errors import MachineError, UserInputError
from ansor_mlflow.processes import Outcome, WorkerPool, in_child_process

TIMEOUT_S = 120.0


def square(number: int) -> int:
    return number * number


def sleep_then_square(number: int) -> int:
    time.sleep(0.3 - 0.1 * number)
    return number * number


def misbehave(how: str) -> str:
    if how == "raise":
        raise ValueError("two\nlines")
    if how == "raise_at_length":
        raise RuntimeError("x" * 10_000)
    if how == "exit":
        os._exit(3)
    if how == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "real_time_signal":
        os.kill(os.getpid(), 40)
    while how == "loop":
        pass
    return how


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with contextlib.closing(WorkerPool(2)) as pool:
        yield pool


def test_values_come_in_the_order_of_the_inputs(pool: WorkerPool) -> None:
    assert pool.map(sleep_then_square, [0, 1, 2], TIMEOUT_S) == [Outcome(0), Outcome(1), Outcome(4)]


@pytest.mark.parametrize(
    ("how", "failure", "error"),
    [
        ("raise", "failed", "ValueError: two\nlines"),
        ("raise_at_length", "failed", f"RuntimeError: {'x' * 1986}…"),
        ("exit", "crashed", "the worker process died (exit code 3)"),
        ("segfault", "crashed", "the worker process died (SIGSEGV)"),
        ("real_time_signal", "crashed", "the worker process died (signal 40)"),
    ],
)
def test_a_failure_is_the_outcome_of_its_task_alone(
    pool: WorkerPool, how: str, failure: Literal["failed", "crashed"], error: str
) -> None:
    good_before, bad, good_after = pool.map(misbehave, ["fine", how, "fine"], TIMEOUT_S)
    assert bad == Outcome(failure=failure, error=error)
    assert good_before == good_after == Outcome("fine")
    assert pool.map(square, [3], TIMEOUT_S) == [Outcome(9)]


def test_a_worker_is_replaced_after_its_share_of_tasks() -> None:
    with contextlib.closing(WorkerPool(1, max_tasks=2)) as pool:
        pids = [outcome.value for outcome in pool.map(pid_of_worker, range(6), TIMEOUT_S)]
    assert len(set(pids)) == 3


def test_closing_ends_the_workers() -> None:
    pool = WorkerPool(2)
    workers = {psutil.Process(outcome.value) for outcome in pool.map(pid_of_worker, range(4), TIMEOUT_S)}
    pool.close()
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive


CLOSE_WHILE_WORKERS_START = """
import random, time
from ansor_mlflow.processes import WorkerPool

if __name__ == "__mp_main__":  # in a worker, which imports this before it reads what it is for
    time.sleep(random.SystemRandom().uniform(0, 0.3))
if __name__ == "__main__":
    for _ in range(6):
        pool = WorkerPool(8)
        pool.map(abs, [1], 120)
        pool.close()
"""


@pytest.mark.nightly
def test_workers_that_are_just_being_started_end_without_a_word(tmp_path: Path) -> None:
    """The first of eight does the work, and when it is done others are about to read what they are for."""
    script = tmp_path / "close.py"
    script.write_text(CLOSE_WHILE_WORKERS_START)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=280, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_closing_ends_a_map_in_another_thread(tmp_path: Path) -> None:
    """As a second Ctrl-C does, which waits for nothing."""
    pool = WorkerPool(1)
    with ThreadPoolExecutor(1) as executor:
        running = executor.submit(pool.map, hang, [tmp_path / "pid"], TIMEOUT_S)
        pid = wait_for_pid(tmp_path / "pid")
        pool.close()
        with pytest.raises(RuntimeError, match="the worker pool was closed"):
            running.result(timeout=60)
    assert not psutil.pid_exists(pid)


def test_a_kernel_that_loops_is_killed_without_delay(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It never returns to Python, so that no handler of a signal would be called, for which Pebble would wait."""
    monkeypatch.setattr(pebble.CONSTS, "term_timeout", 200)
    assert pool.map(square, [1, 2], TIMEOUT_S) == [Outcome(1), Outcome(4)]
    started = time.monotonic()
    assert pool.map(loop_in_c, [0], 0.2) == [Outcome(failure="timed_out", error="killed after 0.2 s")]
    assert time.monotonic() - started < 60


def test_workers_killed_between_two_tasks_are_replaced() -> None:
    with contextlib.closing(WorkerPool(2)) as pool:
        for _ in range(2):
            for pid in {outcome.value for outcome in pool.map(pid_of_worker, range(4), TIMEOUT_S)}:
                psutil.Process(pid).kill()
            time.sleep(0.5)
            assert pool.map(square, [2, 3], TIMEOUT_S) == [Outcome(4), Outcome(9)]


def test_a_call_that_pebble_lost_is_done_again(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that dies while it reads a call leaves it waiting for ever."""
    assert pool.map(square, [1], TIMEOUT_S) == [Outcome(1)]
    monkeypatch.setattr(processes, "_MAX_IDLE_S", 3.0)
    schedule = pool._pool.schedule
    monkeypatch.setattr(
        pool._pool, "schedule", lambda call, args: Future() if args == [2] else schedule(call, args=args)
    )
    assert pool.map(square, [1, 2], TIMEOUT_S) == [Outcome(1), Outcome(4)]


def test_workers_are_forked_without_pytorch(tmp_path: Path) -> None:
    """TVM imports it where it is there, and asks it for GPUs, after which CUDA serves no process that is forked."""
    tmp_path.joinpath("torch.py").write_text("raise SystemExit('PyTorch was imported')")
    command = [sys.executable, "-c", "import ansor_mlflow.workers.preload"]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


_AFTER_A_MODEL_OF_ANOTHER_VERSION = """
import os, sys
from ansor_mlflow.processes import WorkerPool, in_child_process

sys.path.insert(0, sys.argv[1])  # MLflow does this with the code of a model
print(in_child_process(os.path.basename, "a/child", is_quiet=True))
pool = WorkerPool(1)
print(pool.map(os.path.basename, ["a/worker"], 60)[0].value)
pool.close()
"""


def test_processes_run_the_code_of_their_parent_and_not_that_of_a_model_it_loaded(tmp_path: Path) -> None:
    other = tmp_path / "code" / "ansor_mlflow"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("raise SystemExit('another version')")
    done = subprocess.run(
        [sys.executable, "-c", _AFTER_A_MODEL_OF_ANOTHER_VERSION, str(other.parent)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.stdout, done.stderr) == ("child\nworker\n", "")


def test_a_temporary_directory_whose_path_is_too_long(tmp_path: Path) -> None:
    """For the socket of the server that workers are forked from. Newer releases of Python find it a shorter one."""
    directory = tmp_path / ("long" * 25)
    directory.mkdir()
    start = "from ansor_mlflow.tuning import start_fork_server as start; start()"
    environment = {**os.environ, "TMPDIR": str(directory)}
    done = subprocess.run(
        [sys.executable, "-c", start], env=environment, capture_output=True, text=True, check=False, timeout=240
    )
    message = f"MachineError: the path of the temporary directory {directory} is too long for a socket; set TMPDIR to a"
    assert done.returncode == 0 or message in done.stderr


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
