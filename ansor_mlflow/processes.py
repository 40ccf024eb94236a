"""Calls in other processes: one in a process of its own, or many in workers that outlive what they are given.

Both end with the process that started them, whatever ends it, and have a time limit.
"""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import multiprocessing.context
import multiprocessing.forkserver
import multiprocessing.spawn
import multiprocessing.synchronize
import os
import pickle
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from multiprocessing.pool import ExceptionWithTraceback  # type: ignore[attr-defined]
from pathlib import Path
from typing import IO, Any, Generic, Literal, TypeVar

from ansor_mlflow.errors import MachineError, shortened

In = TypeVar("In")
Out = TypeVar("Out")

TIME_LIMIT_S = 3600.0
"""Seconds that a call in a process of its own may take: far more than the slowest network needs, and far less than for
ever."""
DISTURBED = 0.1
"""Share of its time that a thread waited for a CPU from which a measurement is disturbed: it took 11 % too long."""
_MAX_ERROR_CHARS = 2000
_EXIT_S = 10  # seconds that a process which has answered may take to end
_OWN_CODE = str(Path(__file__).parents[1])
_CHILD = (
    "import sys; sys.path[:] = sys.argv[3:]; from ansor_mlflow.processes import _answer; "
    "del sys.path[0]; _answer(*sys.argv[1:3])"
)
"""Program of a process for one call: its path is that of this one, so that it finds the same code, and none in its
directory. This package comes from where this process has it, though: a model that MLflow loaded may have put the code
of another version in front of the path."""
_PR_SET_PDEATHSIG = 1
_PRELOAD = ["ansor_mlflow.workers.preload"]
_MAX_ATTEMPTS = 3
_POLL_S = 0.1
_MAX_OVERDUE_S = 90.0
"""Time after which Pebble cannot kill a worker, it seems: one that was killed while it answered keeps a lock."""
_MAX_IDLE_S = 120.0
"""Time without a call that runs or ends, though some are left, after which Pebble has lost them: a worker may die while
it reads a call, before it says that it took it. Far more than a worker takes to start."""
_OUT_OF_MEMORY_EXIT = 101  # exit code of a worker that reached its bound of memory and could still say so


def die_with_parent(parent: int | None = None) -> None:
    """Ends this process with the thread that started it; at once, if its process is known and died before this call."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent not in (None, os.getppid()):
        os._exit(1)


# -- one call in a process of its own ----------------------------------------------------------------------------------


def in_child_process(
    function: Callable[[In], Out],
    argument: In,
    *,
    work: str = "runs the network",
    advice: str = "free memory and CPUs, or compile the network again",
    is_quiet: bool = False,
    limit_s: float | None = None,
) -> Out:
    """Calls a function in a process that is started for it and ends after it, and never later than this one.

    The function is one of a module; of the program itself only where that is guarded by `__name__`. What it raises is
    raised here; a process that dies, or takes too long, is a `MachineError`, which says what it did (`work`) and what
    to do (`advice`); the limit is `TIME_LIMIT_S`, where none is given. A quiet one says nothing but the last line that
    it printed, where it dies.
    """
    with _memory_file() as given, _memory_file() as answer, _memory_file() as printed:
        _write_call(function, argument, given)
        output = printed if is_quiet else None
        limit_s = TIME_LIMIT_S if limit_s is None else limit_s
        command = [sys.executable, "-c", _CHILD, str(os.getpid()), str(answer.fileno()), _OWN_CODE, *sys.path]
        try:
            done = subprocess.run(
                command,
                stdin=given,
                stdout=output,
                stderr=output,
                pass_fds=[answer.fileno()],
                timeout=limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired as err:
            raise MachineError(
                f"the process that {work} took longer than {limit_s:g} s, which is the limit, and was ended; {advice}"
            ) from err
        if answer.seek(0, os.SEEK_END):
            answer.seek(0)
            result, error = pickle.load(answer)  # noqa: S301 - our own process wrote it
            if error is not None:
                raise error
            return result  # type: ignore[no-any-return]
        printed.seek(0)
        last = (printed.read().decode(errors="replace").strip().splitlines() or [""])[-1]
    raise MachineError(f"the process that {work} died ({last or _exit_text(done.returncode)}); {advice}")


def _memory_file() -> IO[bytes]:
    """An empty file that is nowhere on a disk, and has room for more than a pipe."""
    return os.fdopen(os.memfd_create("call"), "w+b")


def _write_call(function: Callable[[In], Any], argument: In, file: IO[bytes]) -> None:
    """Writes how to find the program's own functions, if one is used, and the call."""
    call = pickle.dumps((function, argument))
    program = multiprocessing.spawn.get_preparation_data("call") if b"__main__" in call else {}
    file.write(pickle.dumps({name: value for name, value in program.items() if name.startswith("init_main")}))
    file.write(call)
    file.seek(0)


def _answer(parent: str, file: str) -> None:
    """The process: writes what the function returned or raised."""
    die_with_parent(int(parent))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is told to the parent, which ends this process
    try:
        multiprocessing.spawn.prepare(pickle.load(sys.stdin.buffer))  # noqa: S301 - our own process wrote it
        function, argument = pickle.load(sys.stdin.buffer)  # noqa: S301
        answer = function(argument), None
    except Exception as err:  # noqa: BLE001 - it is raised in the parent
        answer = None, _sendable(err)
    with os.fdopen(int(file), "wb") as answers:
        try:
            answers.write(pickle.dumps(answer))
        except Exception as err:  # noqa: BLE001 - what cannot be pickled raises what it likes
            answers.write(pickle.dumps((None, _sendable(err))))
    signal.alarm(_EXIT_S)  # what is measured next is to have the machine for itself, whatever hangs at the exit


def _sendable(err: Exception) -> ExceptionWithTraceback:
    """An error with its traceback; its text alone, where it is of a kind that cannot be sent."""
    try:
        pickle.loads(pickle.dumps(err))  # noqa: S301 - it was made in this line
        return ExceptionWithTraceback(err, err.__traceback__)
    except Exception:  # noqa: BLE001 - its constructor is called
        return ExceptionWithTraceback(RuntimeError(f"{type(err).__name__}: {err}"), err.__traceback__)


# -- workers -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome(Generic[Out]):
    """What became of one call in a worker: a value, or why there is none."""

    value: Out | None = None
    failure: Literal["", "failed", "timed_out", "crashed"] = ""
    error: str = ""
    disturbance: float = 0.0  # of a measurement: the share of its time that other programs took

    @property
    def is_disturbed(self) -> bool:
        """Whether a measurement took so much longer for it that it says little."""
        return self.disturbance > DISTURBED


def start_fork_server() -> None:
    """Starts loading TVM for the workers, in the background; the first pool finds it done or waits for it."""
    _WorkerContext()  # names what is to be loaded
    sys.path.insert(0, _OWN_CODE)  # from where the server is to load it: see `_CHILD`
    try:
        multiprocessing.forkserver.ensure_running()
    except OSError as err:
        if "AF_UNIX path too long" not in str(err):
            raise
        raise MachineError(
            f"the path of the temporary directory {tempfile.gettempdir()} is too long for a socket; set TMPDIR to a "
            "shorter one"
        ) from err
    finally:
        sys.path.remove(_OWN_CODE)


class _WorkerContext(multiprocessing.context.ForkServerContext):
    """Starts the workers of a pool, and keeps the locks that they share for as long as the pool is there.

    Pebble removes them before it ends the workers, and one that is just being started would look for them in vain and
    say so with a traceback.
    """

    def __init__(self) -> None:
        super().__init__()
        self.set_forkserver_preload(_PRELOAD)
        self._locks: list[multiprocessing.synchronize.RLock] = []

    def RLock(self) -> multiprocessing.synchronize.RLock:  # noqa: N802 - the name that Pebble calls
        self._locks.append(super().RLock())
        return self._locks[-1]


class WorkerPool:
    """A pool of processes that survives its tasks: one may loop for ever, crash or eat memory. To be closed.

    Workers are forked from a server that has loaded TVM once, so that a new one costs milliseconds instead of the
    seconds of that import. Timeouts are kept here and not by Pebble, whose clock is the time of day and jumps with it.
    After `max_tasks` a worker is replaced, because builds leak; one that needs more data memory than it may fails or
    dies, and is replaced, too.
    """

    def __init__(
        self,
        max_workers: int,
        *,
        max_tasks: int = 0,
        memory_bytes: int | None = None,
        cpus: frozenset[int] | None = None,
    ) -> None:
        from pebble import ProcessPool  # models are served without it

        start_fork_server()
        self._make_pool = partial(
            ProcessPool,
            max_workers=max_workers,
            max_tasks=max_tasks,
            initializer=_start_worker,
            initargs=(memory_bytes, cpus),
            context=_WorkerContext(),
        )
        self._pool = self._make_pool()
        self._is_closed = False
        self._lock = threading.Lock()

    def map(self, function: Callable[[In], Out], inputs: Sequence[In], timeout_s: float) -> list[Outcome[Out]]:
        """Calls a function that workers can import, once for each input; outcomes come in the order of the inputs.

        A worker that dies between two tasks, because the system killed it, breaks Pebble's whole pool. All inputs are
        then done again in a new pool.
        """
        for _ in range(_MAX_ATTEMPTS):
            try:
                return self._map(function, inputs, timeout_s)
            except BrokenProcessPool:
                self._replace_pool()
        raise MachineError(
            f"worker processes died before they took up work, {_MAX_ATTEMPTS} times in a row; in a script, call "
            'the tuner below `if __name__ == "__main__":`; free memory, and look at the lines above'
        )

    def _map(self, function: Callable[[In], Out], inputs: Sequence[In], timeout_s: float) -> list[Outcome[Out]]:
        call = partial(_work, function)
        try:
            futures = [self._pool.schedule(call, args=[item]) for item in inputs]
        except RuntimeError as err:
            raise BrokenProcessPool from err
        self._wait(futures, timeout_s)
        late: Outcome[Out] = Outcome(failure="timed_out", error=f"killed after {timeout_s:.3g} s")
        return [late if future.cancelled() else _outcome(future) for future in futures]

    def _wait(self, futures: Sequence[Future[Any]], timeout_s: float) -> None:
        """Waits until every call has ended; cancels those whose time is over, upon which Pebble kills the worker."""
        deadlines: dict[Future[Any], float] = {}
        num_left, busy_s = len(futures), time.monotonic()
        while not_done := wait(futures, _POLL_S).not_done:
            if not self._pool.active:  # a task that was scheduled while the pool broke would never be done
                raise BrokenProcessPool
            now_s = time.monotonic()
            if len(not_done) < num_left or any(future.running() for future in not_done):
                num_left, busy_s = len(not_done), now_s
            elif now_s - busy_s > _MAX_IDLE_S:
                raise BrokenProcessPool
            for future in not_done:
                if future.running():
                    deadlines.setdefault(future, now_s + timeout_s)
                overdue_s = now_s - deadlines.get(future, math.inf)
                if overdue_s > _MAX_OVERDUE_S:
                    raise BrokenProcessPool
                if overdue_s > 0:
                    future.cancel()

    def _replace_pool(self) -> None:
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the worker pool was closed")
            self._end_workers()
            self._pool = self._make_pool()

    def close(self) -> None:
        """Ends the workers, running tasks included; a `map` that waits for them in another thread fails."""
        with self._lock:
            self._is_closed = True
            self._end_workers()

    def _end_workers(self) -> None:
        self._pool.stop()
        self._pool.join()


def _outcome(future: Future[Any]) -> Outcome[Any]:
    from pebble import ProcessExpired

    try:
        return Outcome(value=future.result())
    except ProcessExpired as err:
        return Outcome(failure="crashed", error=f"the worker process died ({_exit_text(err.exitcode)})")
    except (CancelledError, BrokenProcessPool):
        raise
    except Exception as err:  # noqa: BLE001 - whatever a candidate raises is its result, not our failure
        return Outcome(failure="failed", error=shortened(f"{type(err).__name__}: {err}", _MAX_ERROR_CHARS))


def _exit_text(exitcode: int) -> str:
    if exitcode == _OUT_OF_MEMORY_EXIT:
        return "out of memory: it reached its bound, worker_memory_mib while tuning"
    if exitcode < 0:
        names = {member.value: member.name for member in signal.Signals}  # real-time signals have none
        return names.get(-exitcode, f"signal {-exitcode}")
    return f"exit code {exitcode}"


# -- in the worker -----------------------------------------------------------------------------------------------------


def _start_worker(memory_bytes: int | None, cpus: frozenset[int] | None) -> None:
    """Ties the worker's life to that of the fork server, which dies with the tuner, and sets its bounds.

    Ctrl-C is left to the tuner. SIGTERM ends the worker at once: a handler in Python, as Pebble's, would never be
    called while a kernel loops, and Pebble would wait for three seconds.
    """
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    bound_process(memory_bytes)
    if cpus is not None:
        os.sched_setaffinity(0, cpus)


def bound_process(memory_bytes: int | None) -> None:
    """Lets this process leave no core dumps, and take so much data memory at most."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_bytes is not None:
        hard_limit = resource.getrlimit(resource.RLIMIT_DATA)[1]
        bound = memory_bytes if hard_limit == resource.RLIM_INFINITY else min(memory_bytes, hard_limit)
        resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))


def _work(function: Callable[[In], Out], item: In) -> Out:
    """Calls a function; a worker without memory ends, so that a fresh one takes its place."""
    try:
        return function(item)
    except Exception as err:
        if isinstance(err, MemoryError) or "std::bad_alloc" in str(err):  # the latter is how TVM passes it on
            os._exit(_OUT_OF_MEMORY_EXIT)
        raise
