"""Whether servers compute rightly, how fast and how evenly, and how fast they are reached."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ansor_mlflow.device import Device
from ansor_mlflow.errors import MachineError, UserInputError
from ansor_mlflow.model import require_linker
from ansor_mlflow.options import FleetTestOptions
from ansor_mlflow.settings import Linker
from ansor_mlflow.tuning import (
    Calibration,
    CheckedServer,
    FleetSettings,
    Grant,
    Health,
    HostPort,
    LocalBuilder,
    TrackerClient,
    WorkerPool,
    build_calibration,
    check_server,
    device_of_fleet,
    open_session,
    start_fork_server,
)

_NUM_CALLS = 200
_UPLOAD_BYTES = 8 * 2**20
_SESSION_S = 60.0
_BUILD_S = 60.0


@dataclass(frozen=True)
class TestedServer:
    """What a server did with a known program."""

    __test__ = False  # pytest would take the class for one of its own

    server: str
    error: str = ""
    """Why it cannot measure; empty where it can."""
    has_own_code: bool = False
    """Whether programs are measured there as on this host; else as TVM's own server does."""
    calibration_ms: float | None = None
    """Median of a call."""
    noise: float | None = None
    """By how much the ninth decile of the calls is longer than the median."""
    upload_mib_per_s: float | None = None


@dataclass(frozen=True)
class FleetTest:
    """What became of all servers of a key."""

    tracker: str
    key: str
    servers: tuple[TestedServer, ...]
    num_busy: int
    """Servers that somebody else had all the time."""

    def require_pass(self) -> None:
        """Checks that every server that was tried can measure.

        Raises:
            MachineError: One cannot, or none was tried.
        """
        failed = [server for server in self.servers if server.error]
        if failed:
            raise MachineError(f"{len(failed)} of {len(self.servers)} servers cannot measure; the lines above say why")


def self_test(options: FleetTestOptions, tell: Callable[[TestedServer], None] = lambda _: None) -> FleetTest:
    """Runs a known program on every server of a key that is free in time.

    Args:
        options: Which servers.
        tell: Told about each.

    Raises:
        UserInputError: That is no address, or no target.
        MachineError: There is no tracker, no server, or no compiler for them here.
    """
    fleet = FleetSettings(
        tracker=HostPort.parse(options.tracker, "tracker"),
        key=options.key,
        wait_s=options.wait_s,
        session_s=_SESSION_S,
        num_retries=0,
    )
    client, until_s = TrackerClient(fleet.tracker), time.monotonic() + options.wait_s
    start_fork_server()
    device = device_of_fleet(fleet, options.target, "auto" if options.target == "auto" else 1)
    known = client.summary()
    if options.key not in known or not known[options.key].servers:
        raise UserInputError(f"key={options.key!r}: the tracker at {fleet.tracker} has no such server now")
    tested: dict[HostPort, TestedServer] = {}
    with contextlib.closing(_builder_for(device, options.linker)) as builder:
        calibration = build_calibration(builder, num_calls=_NUM_CALLS, upload_bytes=_UPLOAD_BYTES)
        servers = known[options.key].servers
        with contextlib.ExitStack() as sessions:  # each is kept until the end, so that the tracker gives the others
            while len(tested) < len(servers) and time.monotonic() < until_s:
                grant = client.request(options.key, 1.0)
                if grant is not None and grant.server not in tested:
                    pool = sessions.enter_context(contextlib.closing(WorkerPool(1)))
                    tested[grant.server] = _tested(grant, pool, calibration)
                    tell(tested[grant.server])
    return FleetTest(str(fleet.tracker), options.key, tuple(tested.values()), max(0, len(servers) - len(tested)))


def _builder_for(device: Device, linker: Linker) -> LocalBuilder:
    compiler = require_linker(device.fingerprint.machine, linker)
    return LocalBuilder(device.target, max_workers=1, timeout_s=_BUILD_S, compiler=compiler)


def _tested(grant: Grant, pool: WorkerPool, calibration: Calibration) -> TestedServer:
    (opened,) = pool.map(open_session, [(grant, _SESSION_S)], _SESSION_S)
    if opened.failure:
        return TestedServer(str(grant.server), f"no session can be opened: {opened.error}")
    (checked,) = pool.map(check_server, [calibration], _SESSION_S)
    if checked.value is None:
        return TestedServer(str(grant.server), f"a known program cannot be run: {checked.error}")
    return _judged(str(grant.server), checked.value)


def _judged(server: str, found: CheckedServer) -> TestedServer:
    return TestedServer(
        server=server,
        error=Health.why_wrong(found.max_rel_error),
        has_own_code=bool(found.description),
        calibration_ms=found.calibration_s * 1e3,
        noise=float(np.percentile(found.calls_s, 90)) / found.calibration_s - 1,
        upload_mib_per_s=found.upload_bytes / 2**20 / found.upload_s,
    )
