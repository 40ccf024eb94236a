"""A client of TVM's RPC tracker that never waits longer than it is told.

TVM's own waits for ever where no server is free, and for a minute where no tracker is. The protocol is that of
`tvm/rpc/tracker.py`: a magic number both ways, then messages of JSON, each after its length in four bytes.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any

from ansor_mlflow.errors import MachineError, UserInputError
from ansor_mlflow.foreign import read_json

_MAGIC = 0x2F271
_SUCCESS, _REQUEST, _SUMMARY = 0, 4, 6
_HOST_CHARS, _PORT_DIGITS = 253, 5
"""Length of a name in DNS, and of a port."""
_MAX_BYTES = 2**20
"""Of a message; TVM's tracker takes no longer one either."""
_ANSWER_S = 5.0
"""Time for a tracker's whole answer."""


@dataclass(frozen=True, order=True)
class HostPort:
    """Where a process listens."""

    host: str
    port: int

    @staticmethod
    def parse(text: str, name: str) -> HostPort:
        """Reads `host:port`, or `[host]:port`.

        Args:
            text: What the user gave.
            name: For what, as the error says it.

        Raises:
            UserInputError: It is none.
        """
        host, colon, port = text.strip().rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        is_port = port.isdecimal() and len(port) <= _PORT_DIGITS and 0 < int(port) < 2**16
        if not colon or not 0 < len(host) <= _HOST_CHARS or not is_port:
            raise UserInputError(f"{name}={text!r}: it must be host:port, such as 127.0.0.1:9190")
        return HostPort(host, int(port))

    def is_listening(self, wait_s: float) -> bool:
        """Whether something takes connections there."""
        try:
            socket.create_connection((self.host, self.port), wait_s).close()
        except OSError:
            return False
        return True

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
class Grant:
    """A server that the tracker gave, for one session."""

    server: HostPort
    password: str
    """What the server expects to be told; TVM calls it the match key."""


class TrackerClient:
    """Asks a tracker.

    Args:
        address: Where it listens.
    """

    def __init__(self, address: HostPort) -> None:
        self.address = address

    def summary(self) -> dict[str, KeyState]:
        """The servers by key; keys that nobody serves or waits for are left out.

        Raises:
            MachineError: There is no tracker.
        """
        with self._asking() as connection:
            _send(connection, [_SUMMARY])
            found = _receive(connection, time.monotonic() + _ANSWER_S)
            try:
                return _key_states(_value(found))
            except (KeyError, TypeError, AttributeError) as err:
                raise ValueError(found) from err

    def request(self, key: str, wait_s: float) -> Grant | None:
        """A server of a key; None where none became free in time.

        Raises:
            MachineError: There is no tracker.
        """
        with closing(self.ask(key)) as request:
            return request.poll(wait_s)

    def ask(self, key: str) -> ServerRequest:
        """Asks for a server of a key; who asked first gets one first.

        Raises:
            MachineError: There is no tracker.
        """
        with ExitStack() as stack:
            connection = stack.enter_context(self._asking())
            _send(connection, [_REQUEST, key, "", 1])
            return ServerRequest(self, connection, stack.pop_all())

    @contextmanager
    def _asking(self) -> Iterator[socket.socket]:
        """A connection that a tracker has greeted."""
        with self.refusing(), socket.create_connection((self.address.host, self.address.port), _ANSWER_S) as connection:
            connection.sendall(struct.pack("<i", _MAGIC))
            try:
                greeting = _receive_bytes(connection, 4, time.monotonic() + _ANSWER_S)
            except TimeoutError as err:  # what expects more to be said, such as a web server
                raise ValueError("no greeting") from err
            if greeting != struct.pack("<i", _MAGIC):
                raise ValueError(greeting)
            yield connection

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Says in one line what is wrong with a tracker."""
        try:
            yield
        except OSError as err:
            raise MachineError(
                f"rpc_tracker={self.address}: no tracker can be reached ({err.strerror or err}); start one there with "
                "`ansor-mlflow fleet tracker`, or correct the address"
            ) from err
        except ValueError as err:
            raise MachineError(
                f"rpc_tracker={self.address}: what listens there is no RPC tracker of TVM's; give the address of one, "
                "see `ansor-mlflow fleet tracker`"
            ) from err


class ServerRequest:
    """A request for a server, which keeps its place in the tracker's queue. To be closed.

    Args:
        tracker: Who was asked.
        connection: Where the answer comes.
        resources: Closes the connection.
    """

    def __init__(self, tracker: TrackerClient, connection: socket.socket, resources: ExitStack) -> None:
        self._tracker = tracker
        self._connection = connection
        self._resources = resources
        self._received = b""

    def poll(self, wait_s: float) -> Grant | None:
        """The server; None where none became free in time.

        Raises:
            MachineError: The tracker is gone.
        """
        with self._tracker.refusing():
            until_s = time.monotonic() + wait_s
            try:
                while (message := _first_message(self._received)) is None:
                    self._received += _received(self._connection, _MAX_BYTES, until_s)
            except TimeoutError:
                return None
            match _value(message):
                case [str(host), int(port), str(password)]:
                    return Grant(HostPort(host, port), password)
            raise ValueError(message)

    def close(self) -> None:
        """Withdraws it: the tracker sees that the connection is closed, and keeps its server."""
        self._resources.close()


def _value(answer: Any) -> Any:
    """What a tracker answers with.

    Raises:
        ValueError: It is no answer of one.
    """
    match answer:
        case [int(code), value] if code == _SUCCESS:
            return value
    raise ValueError(answer)


def _key_states(summary: Mapping[str, Any]) -> dict[str, KeyState]:
    servers: dict[str, list[HostPort]] = {}
    for info in summary["server_info"]:
        host, port = info["addr"]
        servers.setdefault(str(info["key"]).partition(":")[2], []).append(HostPort(str(host), int(port)))
    queues: Mapping[str, Mapping[str, int]] = summary["queue_info"]
    free = Counter({key: int(queue["free"]) for key, queue in queues.items()})
    waiting = Counter({key: int(queue["pending"]) for key, queue in queues.items()})
    keys = sorted({*servers, *(+free), *(+waiting)})
    return {key: KeyState(tuple(sorted(servers.get(key, ()))), free[key], waiting[key]) for key in keys}


def _send(connection: socket.socket, message: Any) -> None:
    text = json.dumps(message).encode()
    connection.sendall(struct.pack("<i", len(text)) + text)


def _receive(connection: socket.socket, until_s: float) -> Any:
    """A message that is there in time, however slowly it comes.

    Raises:
        OSError: The connection was closed, or nothing came in time.
        ValueError: What came is none.
    """
    found = b""
    while (message := _first_message(found)) is None:
        found += _received(connection, _MAX_BYTES, until_s)
    return message


def _first_message(received: bytes) -> Any | None:
    """A message, once all of it is there.

    Raises:
        ValueError: It is none.
    """
    if len(received) < 4:
        return None
    (size,) = struct.unpack("<i", received[:4])
    if not 0 < size <= _MAX_BYTES:
        raise ValueError(f"a message of {size} bytes")
    return read_json(received[4 : 4 + size]) if len(received) >= 4 + size else None


def _receive_bytes(connection: socket.socket, num_bytes: int, until_s: float) -> bytes:
    found = b""
    while len(found) < num_bytes:
        found += _received(connection, num_bytes - len(found), until_s)
    return found


def _received(connection: socket.socket, most_bytes: int, until_s: float) -> bytes:
    """What has come; waits for something, but no longer than until a time of the clock `time.monotonic`."""
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    connection.settimeout(left_s)
    if not (part := connection.recv(most_bytes)):
        raise ConnectionResetError("the connection was closed")
    return part
