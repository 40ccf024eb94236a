"""TVM's RPC tracker and server, started so that they stay up."""

from __future__ import annotations

import ipaddress
import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from itertools import count

from ansor_mlflow.errors import MachineError, UserInputError, one_line
from ansor_mlflow.fleet.remote import register_functions
from ansor_mlflow.fleet.tracker import HostPort, servers_by_key
from ansor_mlflow.processes import die_with_parent

_LEAST_S = 1.0
"""Time between two starts of a server, at least."""
_log = logging.getLogger("ansor_mlflow")


def run_tracker(host: str, port: int) -> None:
    """Runs TVM's tracker in this process, until an interrupt."""
    from tvm.rpc.tracker import PopenTrackerServerState

    _warn_of_strangers(host)
    address = _free_address(host, port)
    state = PopenTrackerServerState(address.host, address.port, address.port + 1)
    _log.info("the tracker listens at %s; Ctrl-C ends it", address)
    state.thread.join()


def run_server(host: str, port: int, tracker: HostPort, key: str, *, known_as: str = "") -> None:
    """Runs TVM's server with our functions in a process of its own, until an interrupt.

    It is started again when it ends: its thread that listens ends as soon as a program has crashed in a session. With
    `known_as` the tracker tells others that host, and not the one that it sees; the port 0 is any one that is free.
    """
    if not key or key.split() != [key]:
        raise UserInputError(f"key={key!r}: it must be one word, such as pi4")
    import tvm.rpc.server  # noqa: F401 - loaded once, here, and not at every start

    _warn_of_strangers(host)
    try:
        servers_by_key(tracker)
    except MachineError as err:
        _log.warning("%s; the server reports to it as soon as it is there", err)
    address = _free_address(host, port)
    register_functions()
    for number in count():
        started_s = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="sessions-", ignore_cleanup_errors=True) as scratch:
            told = f"the server listens at {address} for {tracker}, key {key}; Ctrl-C ends it" if number == 0 else ""
            args = (os.getpid(), address, tracker, key, known_as, scratch, told)
            process = multiprocessing.get_context("fork").Process(target=_serve, args=args)
            process.start()
            try:
                process.join()
            finally:
                process.kill()
                process.join()
        time.sleep(max(0.0, started_s + _LEAST_S - time.monotonic()))


def _serve(parent: int, address: HostPort, tracker: HostPort, key: str, known_as: str, scratch: str, told: str) -> None:
    """Runs TVM's server until its thread that listens ends, and this process with it, so that connections are closed.

    Sessions are processes that are forked from this one, and end with it.
    """
    from tvm.rpc.server import PopenRPCServerState

    die_with_parent(parent)
    os.register_at_fork(after_in_child=die_with_parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is told to the parent
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a handler in Python would not be called while a kernel loops
    multiprocessing.set_start_method("fork", force=True)
    tempfile.tempdir = scratch  # a session that crashes leaves its directory
    threading.excepthook = lambda ended: _log.warning(
        "%s; the server is started again", one_line(ended.exc_value or RuntimeError("the server ended"))
    )
    try:
        at, to = (address.host, address.port, address.port + 1), (tracker.host, tracker.port)
        state = PopenRPCServerState(*at, tracker_addr=to, key=key, custom_addr=known_as or None)
    except (OSError, ValueError) as err:  # the latter is how TVM says that a port is taken
        _log.warning("nothing can listen at %s (%s); it is tried again", address, one_line(err))
    else:
        if told:
            _log.info("%s", told)
        state.thread.join()
    sys.stderr.flush()
    os._exit(1)


def _free_address(host: str, port: int) -> HostPort:
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as found:
            return HostPort(host, int(found.getsockname()[1]))
    except OSError as err:
        raise MachineError(f"nothing can listen at {HostPort(host, port)} ({err}); give another host or port") from err


def _warn_of_strangers(host: str) -> None:
    """TVM's RPC runs whatever it is sent."""
    try:
        is_own = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_own = host == "localhost"
    if not is_own:
        _log.warning(
            "TVM's RPC asks nobody who they are: whoever reaches %s can run any program here. Let only your own "
            "network reach it, or listen at 127.0.0.1 and tunnel: ssh -R 9190:127.0.0.1:9190 HOST",
            host,
        )
