"""TVM's tracker, the servers that it has, and how well each did."""

from __future__ import annotations

import json
import logging
import math
import socket
import struct
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from ansor_mlflow.errors import MachineError, UserInputError
from ansor_mlflow.foreign import read_json
from ansor_mlflow.trials import ServerState

_MAGIC = struct.pack("<i", 0x2F271)
_SUCCESS, _REQUEST, _SUMMARY = 0, 4, 6
_HOST_CHARS, _PORT_DIGITS = 253, 5
"""Length of a name in DNS, and of a port."""
_MAX_BYTES = 2**20
"""Bytes of a message; TVM's tracker takes no longer one either."""
_ANSWER_S = 5.0
"""Time for a tracker's whole answer."""


@dataclass(frozen=True, order=True)
class HostPort:
    """Where a process listens."""

    host: str
    port: int

    @staticmethod
    def parse(text: str, name: str) -> HostPort:
        """Reads `host:port`, or `[host]:port`, which the user gave for the parameter `name`."""
        host, colon, port = text.strip().rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        is_port = port.isdecimal() and len(port) <= _PORT_DIGITS and 0 < int(port) < 2**16
        if not colon or not 0 < len(host) <= _HOST_CHARS or not is_port:
            raise UserInputError(f"{name}={text!r}: it must be host:port, such as 127.0.0.1:9190")
        return HostPort(host, int(port))

    def is_listening(self, wait_s: float) -> bool:
        """Whether something takes connections there, or does so in time."""
        until_s = time.monotonic() + wait_s
        while (left_s := until_s - time.monotonic()) > 0:
            try:
                socket.create_connection((self.host, self.port), left_s).close()
                return True
            except OSError:
                time.sleep(0.1)
        return False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class KeyState:
    """The servers of one key."""

    servers: tuple[HostPort, ...] = ()
    """Those that are connected to the tracker, whether somebody has them or not."""
    num_free: int = 0
    num_waiting: int = 0
    """Requests that no server was found for."""


@dataclass(frozen=True)
class ServerLease:
    """A server that the tracker gave, for one session that begins soon: see `LeaseExpiredError`."""

    server: HostPort
    password: str
    """What the server expects to be told; TVM calls it the match key."""


def servers_by_key(tracker: HostPort) -> dict[str, KeyState]:
    """The servers that a tracker knows; keys that nobody serves or waits for are left out."""
    with _refusing(tracker):
        summary = _ask(tracker, [_SUMMARY], _ANSWER_S)
        try:
            servers: dict[str, list[HostPort]] = {}
            for info in summary["server_info"]:
                host, port = info["addr"]
                servers.setdefault(str(info["key"]).partition(":")[2], []).append(HostPort(str(host), int(port)))
            queues: Mapping[str, Mapping[str, int]] = summary["queue_info"]
            free = Counter({key: int(queue["free"]) for key, queue in queues.items()})
            waiting = Counter({key: int(queue["pending"]) for key, queue in queues.items()})
        except (KeyError, TypeError, AttributeError) as err:
            raise ValueError(summary) from err
    keys = sorted({*servers, *(+free), *(+waiting)})
    return {key: KeyState(tuple(sorted(servers.get(key, ()))), free[key], waiting[key]) for key in keys}


def request_server(tracker: HostPort, key: str, wait_s: float) -> ServerLease | None:
    """A server of a key; None where none became free in time."""
    with _refusing(tracker):
        try:
            found = _ask(tracker, [_REQUEST, key, "", 1], wait_s)
        except TimeoutError:
            return None
        match found:
            case [str(host), int(port), str(password)]:
                return ServerLease(HostPort(host, port), password)
        raise ValueError(found)


@contextmanager
def _refusing(tracker: HostPort) -> Iterator[None]:
    """Says in one line what is wrong with a tracker."""
    try:
        yield
    except OSError as err:
        raise MachineError(
            f"rpc_tracker={tracker}: no tracker can be reached ({err.strerror or err}); start one there with "
            "`ansor-mlflow fleet tracker`, or correct the address"
        ) from err
    except ValueError as err:
        raise MachineError(
            f"rpc_tracker={tracker}: what listens there is no RPC tracker of TVM's; give the address of one, "
            "see `ansor-mlflow fleet tracker`"
        ) from err


def _ask(tracker: HostPort, message: list[Any], wait_s: float) -> Any:
    """The value that a tracker answers with, however slowly it comes."""
    with socket.create_connection((tracker.host, tracker.port), _ANSWER_S) as connection:
        connection.sendall(_MAGIC)
        try:
            greeting = _received(connection, len(_MAGIC), time.monotonic() + _ANSWER_S)
        except TimeoutError as err:  # what expects more to be said, such as a web server
            raise ValueError("no greeting") from err
        if greeting != _MAGIC:
            raise ValueError(greeting)
        text = json.dumps(message).encode()
        connection.sendall(struct.pack("<i", len(text)) + text)
        until_s = time.monotonic() + wait_s
        (size,) = struct.unpack("<i", _received(connection, 4, until_s))
        if not 0 < size <= _MAX_BYTES:
            raise ValueError(f"a message of {size} bytes")
        answer = read_json(_received(connection, size, until_s))
    match answer:
        case [int(code), value] if code == _SUCCESS:
            return value
    raise ValueError(answer)


def _received(connection: socket.socket, num_bytes: int, until_s: float) -> bytes:
    """So many bytes, by a time of the clock `time.monotonic`."""
    found = b""
    while len(found) < num_bytes:
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        connection.settimeout(left_s)
        if not (part := connection.recv(num_bytes - len(found))):
            raise ConnectionResetError("the connection was closed")
        found += part
    return found


_MAX_FAILURES = 2
"""Failures in a row after which a server is set aside."""
_ASIDE_S = 60.0
"""For how long at first; each time twice as long."""
_MAX_ASIDE_S = 900.0
_DISAGREES = 1.15
"""Time of the reference kernel over that of the fastest server from which a server is no device of the same kind."""
_NUM_TIMES = 5
"""The last times of the reference kernel whose median counts."""
_log = logging.getLogger("ansor_mlflow")


@dataclass
class _Record:
    num_measured: int = 0
    num_failures: int = 0
    num_in_row: int = 0
    num_aside: int = 0
    aside_until_s: float = -math.inf
    busy_s: float = 0.0
    known_s: float = 0.0
    """Seconds for which it was available before `since_s`."""
    since_s: float | None = None
    """When it became available; None while it is set aside."""
    reference_s: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_TIMES))
    disagrees: bool = False


class Health:
    """Remembers what servers did, by a clock of seconds. Not safe for use from several threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._records: defaultdict[HostPort, _Record] = defaultdict(_Record)

    def found(self, server: HostPort) -> None:
        record = self._records[server]
        record.since_s = self._clock() if record.since_s is None else record.since_s

    def measured(self, server: HostPort, busy_s: float) -> None:
        """It measured a program, which took it so long."""
        record = self._records[server]
        record.num_measured += 1
        record.num_in_row = 0
        record.busy_s += busy_s

    def failed(self, server: HostPort, reason: str) -> None:
        """It did not answer, or with what cannot be."""
        record = self._records[server]
        record.num_failures += 1
        record.num_in_row += 1
        if record.num_in_row < _MAX_FAILURES:
            _log.warning("server %s: %s", server, reason)
            return
        aside_s = min(_MAX_ASIDE_S, _ASIDE_S * 2**record.num_aside)
        record.num_aside += 1
        record.num_in_row = 0
        record.aside_until_s = self._clock() + aside_s
        record.known_s = self._known_s(record)
        record.since_s = None
        told = "server %s is set aside for %.0f s after %d failures in a row, the last: %s"
        _log.warning(told, server, aside_s, _MAX_FAILURES, reason)

    def is_set_aside(self, server: HostPort) -> bool:
        return self._clock() < self._records[server].aside_until_s

    def compared(self, server: HostPort, seconds: float) -> None:
        """The reference kernel took so long. Names servers that are far slower than the fastest, once."""
        record = self._records[server]
        record.reference_s.append(seconds)
        if len(record.reference_s) < 2:
            return
        taken = {s: median(r.reference_s) for s, r in self._records.items() if len(r.reference_s) >= 2}
        fastest = min(taken, key=lambda other: taken[other])
        ratio = taken[server] / taken[fastest]
        if ratio > _DISAGREES and not record.disagrees:
            _log.warning(
                "server %s takes %.2f times as long as %s for the same program: it is busy, throttled or another kind "
                "of device, and its times are not comparable",
                *(server, ratio, fastest),
            )
        record.disagrees = ratio > _DISAGREES

    def states(self) -> tuple[ServerState, ...]:
        return tuple(
            ServerState(
                name=f"{server.host}_{server.port}".replace(":", "_"),
                num_trials=record.num_measured,
                num_failures=record.num_failures,
                num_set_aside=record.num_aside,
                busy_s=record.busy_s,
                known_s=self._known_s(record),
                calibration_s=median(record.reference_s) if record.reference_s else None,
            )
            for server, record in sorted(self._records.items())
        )

    def _known_s(self, record: _Record) -> float:
        return record.known_s + (0.0 if record.since_s is None else self._clock() - record.since_s)
