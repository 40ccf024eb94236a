"""Trackers and servers that run until an interrupt."""

from __future__ import annotations

import ipaddress
import logging

from ansor_mlflow.errors import MachineError
from ansor_mlflow.options import ServerOptions, TrackerOptions
from ansor_mlflow.tuning import HostPort, TrackerClient, run_server, run_tracker

_log = logging.getLogger("ansor_mlflow")


def track(options: TrackerOptions) -> None:
    """Runs a tracker.

    Raises:
        MachineError: It cannot listen there.
    """
    _warn_of_strangers(options.host)
    run_tracker(
        options.host, options.port, lambda address: _log.info("the tracker listens at %s; Ctrl-C ends it", address)
    )


def serve(options: ServerOptions) -> None:
    """Runs a server of programs.

    Raises:
        UserInputError: The tracker is no address, or the key is not one word.
        MachineError: It cannot listen there, or no tracker is where it should be.
    """
    tracker = HostPort.parse(options.tracker, "tracker")
    _warn_of_strangers(options.host)
    try:
        TrackerClient(tracker).summary()
    except MachineError as err:
        _log.warning("%s; the server reports to it as soon as it is there", err)

    def say(address: HostPort) -> None:
        _log.info("the server listens at %s for %s, key %s; Ctrl-C ends it", address, tracker, options.key)

    run_server(options.host, options.port, tracker, options.key, say, known_as=options.known_as)
    raise MachineError("the server listens no more; the lines above say why: start it again")


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
