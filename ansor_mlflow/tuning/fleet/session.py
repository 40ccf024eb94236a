"""One session with an RPC server, in a worker process that can be killed: a call of TVM's RPC has no time limit."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import numpy as np

from ansor_mlflow.errors import MachineError
from ansor_mlflow.foreign import read_json, typed
from ansor_mlflow.measuring import ProbeTime
from ansor_mlflow.processes import Outcome, WorkerPool
from ansor_mlflow.records import is_time
from ansor_mlflow.tuning.fleet.calibration import Calibration
from ansor_mlflow.tuning.fleet.lookout import FleetSettings, Lookout
from ansor_mlflow.tuning.fleet.remote import DESCRIBE, MEASURE, RUN_NETWORK, measure_request
from ansor_mlflow.tuning.fleet.tracker import Grant, HostPort
from ansor_mlflow.tuning.workers.timing import MeasureSettings, RunJob

_OPEN_S = 30.0
"""Time to connect with a server."""
_LOAD_S = 120.0
"""Time for a new process to load TVM, on a busy machine."""
_FLUSH = "cache_flush_cpu_non_first_arg"
_FASTEST_S = 1e-8
"""Calls that are said to be shorter are repeated as often as if they took this long."""


@dataclass(frozen=True)
class RemoteWork:
    """A program to be measured in the session of this process."""

    job: RunJob
    settings: MeasureSettings
    memory_bytes: int | None
    limit_s: float
    """Seconds after which the server is to end the session."""


@dataclass(frozen=True)
class CheckedServer:
    """What a server did with a program whose results are known."""

    description: str
    """See `ServerDescription.from_json`; empty for one of TVM's own."""
    calls_s: tuple[float, ...]
    """Seconds of each call of the program."""
    max_rel_error: float
    upload_s: float
    """Seconds to upload `upload_bytes`."""
    upload_bytes: int

    @property
    def calibration_s(self) -> float:
        """Median of the calls."""
        return median(self.calls_s)


@dataclass(frozen=True)
class Reply:
    """What a server said of a program."""

    run_s: tuple[float, ...] = ()
    """Seconds per call."""
    waited: float = 0.0
    """Share of the time that other programs took, where the server knows it."""
    probe: ProbeTime | None = None
    """Of the server's CPUs, where it probed them before."""
    failure: Literal["", "failed", "timed_out"] = ""
    """Of the program."""
    is_lost: bool = False
    """Whether nobody knows what became of the program: the session ended, or the times are none."""
    error: str = ""


@dataclass(frozen=True)
class _MeasuredThere:
    """What `MEASURE` returns."""

    run_s: tuple[float, ...]
    waited: float
    probe: ProbeTime | None = None


class Connection:
    """The session, and what it has of our functions."""

    def __init__(self, grant: Grant, session_timeout_s: float) -> None:
        from tvm import rpc

        self.session = rpc.connect(grant.server.host, grant.server.port, grant.password, session_timeout_s)
        self.functions = {name: self._function(name) for name in (DESCRIBE, MEASURE, RUN_NETWORK)}

    def _function(self, name: str) -> Any | None:
        try:
            return self.session.get_function(name)
        except Exception:  # noqa: BLE001 - TVM's own server has no such function, whatever its error says
            return None


_open: list[Connection] = []
"""The session of this process, as soon as it has one."""


def open_session(work: tuple[Grant, float]) -> None:
    """Connects this process with a server.

    Args:
        work: The server, and the seconds after which it ends the session.
    """
    _open.append(Connection(*work))


def this_connection() -> Connection:
    """The one that `open_session` made."""
    return _open[0]


def describe_server(work: tuple[Grant, float]) -> str:
    """Connects with a server as `open_session` does; returns what it says of itself, see `CheckedServer`."""
    open_session(work)
    describe = this_connection().functions[DESCRIBE]
    return str(describe()) if describe else ""


def ready_pool() -> WorkerPool:
    """A process for a session, started before a server is asked for: a server waits six seconds for who got it."""
    pool = WorkerPool(1)
    pool.map(_load, [None], _LOAD_S)
    return pool


def _load(_: None) -> None:
    import tvm.rpc  # noqa: F401


def ran_out(opened: Outcome[Any]) -> bool:
    """Whether a server refused a session because its lease had run out.

    TVM's server takes another match key when nobody came for six seconds, and tells the tracker so: `_accept_conn` of
    `tvm/rpc/server.py`.
    """
    return "cannot find server that matches key" in opened.error


def connect_with_any(fleet: FleetSettings, pool: WorkerPool) -> tuple[HostPort, str]:
    """Opens a session with the first free server of a key; returns it, and what it says of itself.

    Raises:
        MachineError: No server is free for too long, or one does not answer.
    """
    lookout = Lookout(fleet)
    until_s = time.monotonic() + fleet.wait_s
    while True:
        grant = lookout.wait()
        (opened,) = pool.map(describe_server, [(grant, fleet.session_s)], _OPEN_S)
        if opened.value is not None:
            return grant.server, opened.value
        if not ran_out(opened) or time.monotonic() > until_s:
            raise MachineError(f"server {grant.server} does not answer: {opened.error}; look at it, or restart it")


def check_server(calibration: Calibration) -> CheckedServer:
    """Runs a program whose results are known in the session of this process."""
    import tvm

    connection = this_connection()
    session = connection.session
    describe = connection.functions[DESCRIBE]
    blob = bytearray(calibration.path.read_bytes())
    blob += bytes(max(0, calibration.upload_bytes - len(blob)))  # zeros after the end of a library do no harm
    started_s = time.perf_counter()
    session.upload(blob, calibration.path.name)
    upload_s = time.perf_counter() - started_s
    module, device = session.load_module(calibration.path.name), session.cpu(0)
    session.remove(calibration.path.name)  # the next upload must not write into a library that is in use
    data, expected = calibration.example()
    given, found = tvm.runtime.tensor(data, device), tvm.runtime.tensor(np.zeros_like(data), device)
    module["main"](given, found)
    error = np.abs(found.numpy() - expected).max() / np.abs(expected).max()
    timer = module.time_evaluator("main", device, number=1, repeat=calibration.num_calls)
    return CheckedServer(
        description=str(describe()) if describe else "",
        calls_s=tuple(float(seconds) for seconds in timer(given, found).results),
        max_rel_error=float(error),
        upload_s=upload_s,
        upload_bytes=len(blob),
    )


def measure_in_session(work: RemoteWork) -> Reply:
    """Measures a program on the server of this process's session."""
    from tvm.error import RPCError

    connection = this_connection()
    name = work.job.path.name
    try:
        connection.session.upload(str(work.job.path))
        reply = _measured(connection, name, work)
        connection.session.remove(name)
    except RPCError as err:  # the server lives and says so
        return Reply(failure="failed", error=_without_stack(err))
    except Exception as err:  # noqa: BLE001 - TVM has no kind of its own for a connection that is gone
        return Reply(is_lost=True, error=f"the session ended ({_without_stack(err)})")
    if not reply.run_s or not all(map(is_time, reply.run_s)):
        said = ", ".join(f"{seconds:g} s" for seconds in reply.run_s[:5]) or "no time"
        return Reply(is_lost=True, error=f"it says that a call takes {said}")
    return reply


def _measured(connection: Connection, name: str, work: RemoteWork) -> Reply:
    measure = connection.functions[MEASURE]
    if measure is None:
        return Reply(run_s=_measured_by_tvm(connection.session, name, work))
    request = measure_request(name, work.job, work.settings, work.memory_bytes, work.limit_s)
    found = typed(_MeasuredThere, read_json(str(measure(request))))
    if found.probe and not (is_time(found.probe.elapsed_s) and is_time(found.probe.cpu_s)):
        raise ValueError(f"it says that a probe took {found.probe}")
    return Reply(run_s=found.run_s, waited=found.waited, probe=found.probe)


def _without_stack(err: Exception) -> str:
    """What an error says; TVM puts the caller's stack behind it."""
    text = str(err).removeprefix("RPCError: ").removeprefix("Error caught from RPC call:").strip()
    return text.partition("\n")[0] or type(err).__name__


def _measured_by_tvm(session: Any, name: str, work: RemoteWork) -> tuple[float, ...]:
    """Measures with what every TVM runtime has. As the network runs them: with all but the first input cold."""
    settings, device = work.settings, session.cpu(0)
    session.get_function("runtime.config_threadpool")(1, settings.num_threads)
    module = session.load_module(name)
    arguments = [_argument(session, device, dtype, shape) for _, dtype, shape in work.job.args_info]
    is_cold = settings.cache_flush or settings.rest is not None

    def timed(number: int, repeat: int, min_repeat_ms: int) -> list[float]:
        timer = module.time_evaluator(
            "main",
            device,
            number=number,
            repeat=repeat,
            min_repeat_ms=min_repeat_ms,
            f_preproc=_FLUSH if is_cold else "",
        )
        return [float(seconds) for seconds in timer(*arguments).results]

    if not is_cold:
        return tuple(timed(settings.number, settings.repeat, settings.min_repeat_ms))
    (first_s,) = timed(1, 1, 0)  # only the first of several calls would be cold
    num_calls = max(settings.number, math.ceil(settings.min_repeat_ms / 1e3 / max(first_s, _FASTEST_S)))
    return tuple(median(timed(1, min(num_calls, 1000), 0)) for _ in range(settings.repeat))


def _argument(session: Any, device: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    """Random numbers, made there; indices are zero, as `random_arguments` has them."""
    import tvm

    if dtype in ("int32", "int64"):
        return tvm.runtime.tensor(np.zeros(shape, dtype), device)
    tensor = tvm.runtime.empty(shape, dtype, device)
    session.get_function("tvm.contrib.random.random_fill_for_measure")(tensor)
    return tensor
