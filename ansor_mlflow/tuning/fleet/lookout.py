"""Waits for a server of a key: with a word in the log when none comes, and an end."""

from __future__ import annotations

import logging
import shlex
import time
from dataclasses import dataclass, replace

from ansor_mlflow.errors import MachineError, UserInputError
from ansor_mlflow.options import RpcOptions, TuneOptions
from ansor_mlflow.tuning.fleet.tracker import Grant, HostPort, KeyState, ServerRequest, TrackerClient

_REQUEST_S = 1.0
"""Time between two looks at the clock."""
_MESSAGE_S = 10.0
"""Time without a server after which the log says what the tracker has."""
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
    """The fleet that a step measures on; None where it is this host.

    Raises:
        UserInputError: The tracker is no address, or its key is missing.
    """
    if not options.rpc_tracker:
        if options.rpc_key:
            raise UserInputError(f"rpc_key={options.rpc_key!r}, but no rpc_tracker; give its address, host:port")
        return None
    if options.rpc_key.split() != [options.rpc_key]:
        raise UserInputError(f"rpc_key={options.rpc_key!r}: give the key of the servers at {options.rpc_tracker}")
    return FleetSettings(
        tracker=HostPort.parse(options.rpc_tracker, "rpc_tracker"),
        key=options.rpc_key,
        wait_s=options.rpc_wait_s,
        session_s=options.rpc_session_s,
    )


def tuning_fleet(options: TuneOptions) -> FleetSettings | None:
    """The fleet that a tuning measures on; None where it is this host.

    Raises:
        UserInputError: As `fleet_settings`, or sessions are too short for a program.
    """
    fleet = fleet_settings(options)
    if fleet and options.rpc_session_s < 2 * options.measure_timeout_s:
        raise UserInputError(
            f"rpc_session_s={options.rpc_session_s:g}: it must be at least twice measure_timeout_s, "
            f"{options.measure_timeout_s:g}"
        )
    return fleet and replace(fleet, num_retries=options.rpc_retries)


class Lookout:
    """Asks a tracker for the servers of a key.

    Args:
        fleet: Which, and how long it may take.
    """

    def __init__(self, fleet: FleetSettings) -> None:
        self._fleet = fleet
        self._client = TrackerClient(fleet.tracker)
        self._request: ServerRequest | None = None
        self._lonely_since_s: float | None = None
        self._was_told = False

    def look(self) -> Grant | None:
        """Asks for a second; returns None where no server became free.

        Raises:
            MachineError: None has for as long as may be, since `found` was called.
        """
        problem: MachineError | None = None
        started_s = time.monotonic()
        self._lonely_since_s = started_s if self._lonely_since_s is None else self._lonely_since_s
        try:
            self._request = self._request or self._client.ask(self._fleet.key)
            if grant := self._request.poll(_REQUEST_S):
                self.withdraw()
                return grant
        except MachineError as err:
            problem = err
            self.withdraw()
            time.sleep(_REQUEST_S)
        lonely_s = time.monotonic() - self._lonely_since_s
        if lonely_s >= self._fleet.wait_s:
            self.withdraw()
            self.found()
            raise self._no_server(problem)
        if lonely_s >= _MESSAGE_S and not self._was_told:
            self._was_told = True
            _log.warning("%s; waiting for %.0f s more", problem or self._what_there_is(), self._fleet.wait_s - lonely_s)
        return None

    def wait(self) -> Grant:
        """Asks until there is a server.

        Raises:
            MachineError: None became free for as long as may be.
        """
        while (grant := self.look()) is None:
            pass
        self.found()
        return grant

    def withdraw(self) -> None:
        """Asks no more, until `look` is called again: a server that nobody takes would be kept from others."""
        if self._request is not None:
            self._request.close()
            self._request = None

    def found(self) -> None:
        """A server works: the time that others are waited for begins anew."""
        self._lonely_since_s = None
        self._was_told = False

    def _no_server(self, problem: MachineError | None) -> MachineError:
        return problem or MachineError(
            f"no server was free for {self._fleet.wait_s:g} s (rpc_wait_s): {self._what_there_is()}; start one with "
            f"`ansor-mlflow fleet server --tracker {shlex.quote(str(self._fleet.tracker))} "
            f"--key {shlex.quote(self._fleet.key)}`"
        )

    def _what_there_is(self) -> str:
        try:
            keys = self._client.summary()
        except MachineError as err:
            return str(err)
        own = keys.pop(self._fleet.key, KeyState())
        others = ", ".join(f"{key} ({len(state.servers)})" for key, state in keys.items() if state.servers)
        return (
            f"the tracker at {self._fleet.tracker} has {len(own.servers)} servers of key {self._fleet.key}, "
            f"{own.num_free} of them free, and of other keys {others or 'none'}"
        )
