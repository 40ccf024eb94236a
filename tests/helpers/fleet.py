"""Trackers and servers on loopback: real processes that can be killed, stopped and started again."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from helpers.commands import ANSOR_MLFLOW, ROOT, TESTS

from ansor_mlflow.fleet import HostPort, servers_by_key

KEY = "here"
BOARD = ROOT / ".board"
"""Debian for aarch64, with TVM."""
_START_S = 120.0
_LISTENS = re.compile(r"listens at (\S+?);? ")


@dataclass
class FleetProcess:
    process: subprocess.Popen[str]
    log: Path
    address: HostPort

    def kill(self) -> None:
        """Kills it with SIGKILL; its sessions die with it."""
        self.process.kill()
        self.process.wait()

    def hang(self) -> None:
        """Stops it and its sessions, so that they answer no more, but keep their connections."""
        for process in (psutil.Process(self.process.pid), *self._descendants()):
            process.suspend()

    def sessions(self) -> list[int]:
        """The processes of its sessions: children of the one that listens."""
        with contextlib.suppress(psutil.NoSuchProcess):
            listening = psutil.Process(self.process.pid).children()
            return [session.pid for process in listening for session in process.children()]
        return []

    def is_measuring(self) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return any(psutil.Process(session).cpu_percent(0.02) > 50 for session in self.sessions())
        return False

    def _descendants(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def end(self) -> None:
        """Ends it, stopped or not."""
        descendants = self._descendants()
        self.kill()
        for process in descendants:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


@dataclass
class Fleet:
    directory: Path
    tracker: FleetProcess
    servers: list[FleetProcess] = field(default_factory=list)

    @property
    def flags(self) -> dict[str, str]:
        return {"rpc_tracker": str(self.tracker.address), "rpc_key": KEY}

    def add_server(self, command: Sequence[str] = (ANSOR_MLFLOW, "fleet", "server"), key: str = KEY) -> FleetProcess:
        """Starts a server of our own, or another one that takes the same flags, and waits until it has reported."""
        arguments = ["--tracker", str(self.tracker.address), "--key", key, "--port", "0"]
        server = _started([*command, *arguments], self.directory / f"server-{len(self.servers)}.log")
        self.servers.append(server)
        wait_for(lambda: server.address in _servers(self.tracker.address, key))
        return server

    def add_tvm_server(self, key: str = KEY) -> FleetProcess:
        with _free_port() as port:
            address = HostPort("127.0.0.1", port)
        where = ["--host", address.host, "--port", str(port), "--port-end", str(port + 1)]
        command = [sys.executable, "-m", "tvm.exec.rpc_server", *where, "--tracker", str(self.tracker.address)]
        return self._add([*command, "--key", key], address, key)

    def add_board(self) -> FleetProcess:
        """Starts TVM's server on an emulated board, which `make_board.sh` has made."""
        emulator = shutil.which("qemu-aarch64-static")
        assert emulator, "the emulator is missing: apt install qemu-user-static"
        assert BOARD.is_dir(), f"{BOARD} is missing: make .board"
        with _free_port() as port:
            address = HostPort("127.0.0.1", port)
        (python,) = (BOARD / "root" / "usr" / "bin").glob("python3.*")
        program = [str(python), str(TESTS / "helpers" / "board_server.py"), str(port)]
        where = [self.tracker.address.host, str(self.tracker.address.port), KEY]
        return self._add(
            [emulator, "-L", str(BOARD / "root"), *program, *where], address, KEY, PYTHONPATH=str(BOARD / "site")
        )

    def _add(self, command: Sequence[str], address: HostPort, key: str, **environment: str) -> FleetProcess:
        log = self.directory / f"server-{len(self.servers)}.log"
        with log.open("w") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=file, text=True, start_new_session=True, env={**os.environ, **environment}
            )
        server = FleetProcess(process, log, address)
        self.servers.append(server)
        wait_for(lambda: address in _servers(self.tracker.address, key) or process.poll() is not None)
        assert process.poll() is None, log.read_text()
        return server

    def restart_tracker(self) -> None:
        """Starts the tracker again, at the same port."""
        self.tracker.kill()
        self.tracker = _tracker(self.directory, self.tracker.address.port)

    def end(self) -> None:
        """Ends all of them."""
        for process in (*self.servers, self.tracker):
            process.end()
            with contextlib.suppress(ProcessLookupError):  # what TVM's own server has started outlives it
                os.killpg(process.process.pid, signal.SIGKILL)


@contextlib.contextmanager
def running_fleet(directory: Path, num_servers: int = 1) -> Iterator[Fleet]:
    """A tracker with so many servers of `KEY`."""
    fleet = Fleet(directory, _tracker(directory, 0))
    try:
        for _ in range(num_servers):
            fleet.add_server()
        yield fleet
    finally:
        fleet.end()


def lying_server() -> list[str]:
    """The command of a server that computes something else than it is told to."""
    return [sys.executable, str(TESTS / "helpers" / "lying_server.py")]


def wait_for(condition: Callable[[], bool], timeout_s: float = _START_S) -> None:
    until_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until_s, "it does not come true"
        time.sleep(0.05)


def _tracker(directory: Path, port: int) -> FleetProcess:
    return _started([ANSOR_MLFLOW, "fleet", "tracker", "--port", str(port)], directory / "tracker.log")


def _started(command: Sequence[str], log: Path) -> FleetProcess:
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, text=True, start_new_session=True)
    wait_for(lambda: _LISTENS.search(log.read_text()) is not None or process.poll() is not None)
    found = _LISTENS.search(log.read_text())
    assert found, log.read_text()
    return FleetProcess(process, log, HostPort.parse(found[1], "address"))


def _servers(tracker: HostPort, key: str) -> tuple[HostPort, ...]:
    keys = servers_by_key(tracker)
    return keys[key].servers if key in keys else ()


@contextlib.contextmanager
def _free_port() -> Iterator[int]:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as found:
        yield int(found.getsockname()[1])
