"""TVM's RPC tracker and server, started so that they stay up.

As TVM starts it, a server is gone for good once a program has crashed in one of its sessions: the thread that listens
ends with the session, and the process lives on without it. Sessions are therefore served by code of our own.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import socket
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ansor_mlflow.errors import MachineError, UserInputError
from ansor_mlflow.processes import die_with_parent
from ansor_mlflow.tuning.fleet.remote import register_functions
from ansor_mlflow.tuning.fleet.tracker import HostPort

_log = logging.getLogger("RPCServer")
"""TVM's own, so that its lines and ours look the same."""


def run_tracker(host: str, port: int, on_ready: Callable[[HostPort], None]) -> None:
    """Runs TVM's tracker in this process, until an interrupt.

    Args:
        host: Where it listens.
        port: 0 for any port that is free.
        on_ready: Told where, as soon as it does.

    Raises:
        MachineError: It cannot listen there.
    """
    from tvm.rpc.tracker import PopenTrackerServerState

    _run(lambda free: PopenTrackerServerState(host, free, free + 1), host, port, on_ready)


def run_server(
    host: str, port: int, tracker: HostPort, key: str, on_ready: Callable[[HostPort], None], *, known_as: str = ""
) -> None:
    """Runs a server of programs in this process, until an interrupt; its sessions are processes that end with it.

    Args:
        host: Where it listens.
        port: 0 for any port that is free.
        tracker: Where it reports to.
        key: Its kind of device.
        on_ready: Told where it listens, as soon as it does.
        known_as: Host that the tracker tells others, where that is another one than the tracker sees.

    Raises:
        MachineError: It cannot listen there.
        UserInputError: The key has blanks, which TVM's protocol cannot carry.
    """
    if not key or key.split() != [key]:
        raise UserInputError(f"key={key!r}: it must be one word, such as pi4")
    from tvm.rpc.server import PopenRPCServerState

    _prepare_process()
    address = (tracker.host, tracker.port)

    def start(free: int) -> Any:
        return PopenRPCServerState(host, free, free + 1, tracker_addr=address, key=key, custom_addr=known_as or None)

    _run(start, host, port, on_ready)


def _run(start: Callable[[int], Any], host: str, port: int, on_ready: Callable[[HostPort], None]) -> None:
    """Starts what TVM runs in a thread, and waits for it."""
    try:
        state = start(port or _free_port(host))
    except (OSError, ValueError) as err:  # the latter is how TVM says that a port is taken
        raise MachineError(f"nothing can listen at {HostPort(host, port)} ({err}); give another host or port") from err
    on_ready(HostPort(host, int(state.port)))
    state.thread.join()


def _prepare_process() -> None:
    """Makes this process serve sessions in our way."""
    from tvm.rpc import base, server

    register_functions()
    server._serving = _serve_session
    base.connect_with_retry = partial(base.connect_with_retry, timeout=math.inf)  # a tracker may be away for a night
    server._listen_loop = _ending_process(server._listen_loop)


def _serve_session(sock: socket.socket, addr: Any, opts: Mapping[str, float], load_library: Any) -> None:
    """Serves one client, in a process of its own."""
    from tvm.support import utils

    directory = utils.tempdir()
    process = multiprocessing.get_context("fork").Process(target=_session, args=(sock, load_library, directory))
    process.start()
    sock.close()  # or the client would not see that the process died
    process.join(opts.get("timeout"))
    if process.is_alive():
        process.kill()
        process.join()
        _log.warning("a session of %s was ended after %g s", addr, opts["timeout"])
    elif process.exitcode:
        _log.warning("a session of %s died with exit code %d", addr, process.exitcode)
    directory.remove()


def _session(sock: socket.socket, load_library: Any, directory: Any) -> None:
    from tvm.rpc import server

    die_with_parent()
    os.chdir(directory.relpath("."))
    server._serve_loop(sock, load_library, directory)


def _ending_process(listen: Callable[..., None]) -> Callable[..., None]:
    """A server that listens no more is to be restarted by whoever started it, so its process ends."""

    def listen_and_end(*args: Any) -> None:
        try:
            listen(*args)
        except BaseException:  # noqa: BLE001 - a thread that ends is the end of the server, whatever ended it
            _log.exception("the server listens no more")
        os._exit(1)

    return listen_and_end


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as found:
        return int(found.getsockname()[1])
