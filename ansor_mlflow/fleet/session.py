"""Sessions with RPC servers, each in a worker process that can be killed: a call of TVM's RPC has no time limit."""

from __future__ import annotations

import contextlib
import json
import logging
import platform
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from ansor_mlflow.device import (
    Device,
    DeviceFingerprint,
    attributes_of,
    cpu_features,
    fingerprint,
    missing_instructions,
    platform_of,
    resolve_target,
)
from ansor_mlflow.errors import MachineError, UserInputError
from ansor_mlflow.fleet.remote import DESCRIBE, MEASURE, RUN_NETWORK, ServerDescription
from ansor_mlflow.fleet.tracker import HostPort, KeyState, ServerLease, request_server, servers_by_key
from ansor_mlflow.foreign import read_json
from ansor_mlflow.parameters import MeasureOptions, RpcOptions
from ansor_mlflow.processes import Outcome, WorkerPool

In = TypeVar("In")
Out = TypeVar("Out")

_LOAD_S = 120.0
"""Time for a new process to load TVM, on a busy machine."""
_MESSAGE_S = 10.0
"""Time without a server after which the log says what the tracker has."""
_GRACE_S = 15.0
"""Time that a tracker may take to be reached, beyond that for its answer."""
_OPEN_S = 30.0
"""Time to connect with a server."""
_EXPIRED = "cannot find server that matches key"
"""What TVM says where the password of a lease is wrong."""
_log = logging.getLogger("ansor_mlflow")


@dataclass(frozen=True, kw_only=True)
class FleetSettings:
    """Where devices are found, and how long they are waited for; see the parameters of the same names."""

    tracker: HostPort
    key: str
    wait_s: float
    session_s: float
    num_retries: int = 0


def fleet_settings(options: RpcOptions) -> FleetSettings | None:
    """The fleet that a step measures on; None where it is this host. Its sessions are long enough for a program."""
    if not options.rpc_tracker:
        if options.rpc_key:
            raise UserInputError(f"rpc_key={options.rpc_key!r}, but no rpc_tracker; give its address, host:port")
        return None
    if options.rpc_key.split() != [options.rpc_key]:
        raise UserInputError(f"rpc_key={options.rpc_key!r}: give the key of the servers at {options.rpc_tracker}")
    fleet = FleetSettings(
        tracker=HostPort.parse(options.rpc_tracker, "rpc_tracker"),
        key=options.rpc_key,
        wait_s=options.rpc_wait_s,
        session_s=options.rpc_session_s,
    )
    if not isinstance(options, MeasureOptions):
        return fleet
    if options.rpc_session_s < 2 * options.measure_timeout_s:
        raise UserInputError(
            f"rpc_session_s={options.rpc_session_s:g}: it must be at least twice measure_timeout_s, "
            f"{options.measure_timeout_s:g}"
        )
    return replace(fleet, num_retries=options.rpc_retries)


class LeaseExpiredError(MachineError):
    """A server was not connected with in time, so that the tracker has it again.

    TVM's server takes another password when nobody came for six seconds: `_accept_conn` of `tvm/rpc/server.py`.
    """


class ServerSession:
    """A worker process that asks for a server of a fleet, and has a session with it. To be closed."""

    def __init__(self, fleet: FleetSettings) -> None:
        self.fleet = fleet
        self.server = HostPort("", 0)
        """Where it is, once it is open."""
        self.description: ServerDescription | None = None
        """What the server says of itself; None of one of TVM's own."""
        self._pool = WorkerPool(1)
        self.call(_load, None, _LOAD_S)  # before there is a lease, which soon expires

    @property
    def device(self) -> DeviceFingerprint | None:
        """What the server runs on; None where it does not say."""
        return None if self.description is None else self.description.fingerprint

    def find(self, is_alone: Callable[[], bool] = lambda: True) -> ServerLease:
        """Waits for a free server, with a word in the log when none comes.

        The wait has an end, and is told of, only where no other server works meanwhile: `is_alone`.
        """
        fleet, since_s, was_told = self.fleet, time.monotonic(), False
        while True:
            left_s = min(_MESSAGE_S, max(0.1, since_s + fleet.wait_s - time.monotonic()))
            asked = self.call(_request, (fleet, left_s), left_s + _GRACE_S)
            if isinstance(asked.value, ServerLease):
                return asked.value
            problem = asked.value or asked.error
            if problem:
                time.sleep(1.0)
            if not is_alone():
                since_s = time.monotonic()
            alone_s = time.monotonic() - since_s
            if alone_s >= fleet.wait_s:
                raise MachineError(
                    problem
                    or f"no server was free for {fleet.wait_s:g} s (rpc_wait_s): {_what_there_is(fleet)}; start one "
                    f"with `ansor-mlflow fleet server --tracker {shlex.quote(str(fleet.tracker))} --key "
                    f"{shlex.quote(fleet.key)}`"
                )
            if alone_s >= _MESSAGE_S and not was_told:
                was_told = True
                _log.warning("%s; waiting for %.0f s more", problem or _what_there_is(fleet), fleet.wait_s - alone_s)

    def open(self, lease: ServerLease) -> None:
        """Connects with a server; a `LeaseExpiredError` where it is too late."""
        self.server = lease.server
        opened = self.call(_connect, (lease, self.fleet.session_s), _OPEN_S)
        if opened.value is None:
            kind = LeaseExpiredError if _EXPIRED in opened.error else MachineError
            raise kind(f"server {lease.server} does not answer: {opened.error}; look at it, or restart it")
        if opened.value:
            self.description = ServerDescription.from_json(opened.value)

    def call(self, function: Callable[[In], Out], work: In, limit_s: float) -> Outcome[Out]:
        """Calls a function in the process of the session, which has `this_connection`."""
        (outcome,) = self._pool.map(function, [work], limit_s)
        return outcome

    def close(self) -> None:
        self._pool.close()


def open_session(fleet: FleetSettings) -> ServerSession:
    """A session with the first free server."""
    session = ServerSession(fleet)
    try:
        while True:
            with contextlib.suppress(LeaseExpiredError):
                session.open(session.find())
                return session
    except BaseException:
        session.close()
        raise


def _what_there_is(fleet: FleetSettings) -> str:
    try:
        keys = servers_by_key(fleet.tracker)
    except MachineError as err:
        return str(err)
    own = keys.pop(fleet.key, KeyState())
    others = ", ".join(f"{key} ({len(state.servers)})" for key, state in keys.items() if state.servers)
    return (
        f"the tracker at {fleet.tracker} has {len(own.servers)} servers of key {fleet.key}, "
        f"{own.num_free} of them free, and of other keys {others or 'none'}"
    )


def device_of_fleet(fleet: FleetSettings, target: str, num_threads: int | Literal["auto"]) -> Device:
    """The device behind a key: what the user says it is, or, with auto, what the first free server says."""
    if target != "auto" and not platform_of(resolve_target(target, 1)).in_process:
        raise UserInputError(
            f"target={target!r} is no CPU, and programs are measured on the CPUs of servers only; tune on a host with "
            "such a device, without rpc_tracker"
        )
    with contextlib.closing(open_session(fleet)) as session:
        server, found = session.server, session.device
    if found is None:
        if target == "auto" or num_threads == "auto":
            raise UserInputError(
                f"target={target}, num_threads={num_threads}: server {server} is one of TVM's own, which does not "
                "say what it is; give both, or start it with `ansor-mlflow fleet server`"
            )
        chosen = resolve_target(target, num_threads)
        return Device(chosen, replace(fingerprint(chosen, num_threads), cpu_model=""))
    number = found.num_threads if num_threads == "auto" else num_threads
    if number > found.num_threads:
        raise UserInputError(
            f"num_threads={num_threads}, but server {server} may use {found.num_threads} CPUs; give at most "
            f"{found.num_threads}, or auto"
        )
    if target == "auto":
        spec = {key: value for key, value in found.target.items() if key in ("kind", "mcpu", "mattr")}
        if found.machine != platform.machine():
            spec["mtriple"] = f"{found.machine}-linux-gnu"
    chosen = resolve_target(json.dumps(spec) if target == "auto" else target, number)
    features = cpu_features(chosen)
    if missing := missing_instructions(features, found.features):
        raise MachineError(
            f"target={target!r} needs instructions that server {server} ({found.target.get('mcpu')}) lacks: "
            f"{', '.join(missing[:5])}; use target=auto"
        )
    made_for = replace(found, target=attributes_of(chosen), features=features, num_threads=number)
    return Device(chosen, made_for)


# -- in the process of a session ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Connection:
    """A session of TVM's, with those of our functions that the server has."""

    session: Any
    functions: dict[str, Any]

    def ask(self, name: str, request: Any) -> Any:
        """The answer of one of our functions, as JSON has it."""
        return read_json(str(self.functions[name](json.dumps(request, default=str))))

    @contextlib.contextmanager
    def uploaded(self, files: Sequence[Path]) -> Iterator[None]:
        """Has files in the directory of the session; another file of a name does not overwrite one that is in use."""
        for file in files:
            self.session.upload(str(file))
        yield
        for file in files:
            self.session.remove(file.name)


_open: list[Connection] = []


def this_connection() -> Connection:
    """The connection of this process."""
    return _open[0]


def _load(_: None) -> None:
    import tvm.rpc  # noqa: F401


def _request(work: tuple[FleetSettings, float]) -> ServerLease | str:
    """A server that is free in so many seconds; else what is wrong with the tracker, which may be nothing."""
    fleet, wait_s = work
    try:
        return request_server(fleet.tracker, fleet.key, wait_s) or ""
    except MachineError as err:
        return str(err)


def _connect(work: tuple[ServerLease, float]) -> str:
    """Connects this process with a server; returns what the server says of itself."""
    from tvm import rpc

    lease, session_s = work
    session = rpc.connect(lease.server.host, lease.server.port, lease.password, session_s)
    functions = {}
    for name in (DESCRIBE, MEASURE, RUN_NETWORK):
        with contextlib.suppress(Exception):  # TVM's own server has no such function, whatever its error says
            functions[name] = session.get_function(name)
    _open.append(Connection(session, functions))
    return str(functions[DESCRIBE]()) if DESCRIBE in functions else ""
