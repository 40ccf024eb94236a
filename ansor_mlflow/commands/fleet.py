"""The commands `fleet status` and `fleet test`: what a tracker knows, and whether its servers are fit to measure."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ansor_mlflow import fleet
from ansor_mlflow.errors import MachineError
from ansor_mlflow.foreign import Report, Reported, Table, duration
from ansor_mlflow.model import require_linker
from ansor_mlflow.parameters import FleetOptions, FleetTestOptions
from ansor_mlflow.tuning import start_fork_server
from ansor_mlflow.workers import LocalBuilder

_NUM_CALLS = 200
_UPLOAD_BYTES = 8 * 2**20
_SESSION_S = 60.0
_BUILD_S = 60.0


@dataclass(frozen=True)
class FleetStatus(Reported):
    """The servers of a tracker, and who waits for them."""

    tracker: str
    keys: dict[str, fleet.KeyState]

    def report(self) -> Report:
        if not self.keys:
            return Report(f"no server has reported to the tracker at {self.tracker}")
        rows = [
            (
                key,
                str(len(known.servers)),
                str(known.num_free),
                str(known.num_waiting),
                ", ".join(map(str, known.servers)),
            )
            for key, known in self.keys.items()
        ]
        table = Table(rows, ("~key", ">servers", ">free", ">waiting", "~where"))
        return Report(f"servers of the tracker at {self.tracker}", [table])


def fleet_status(options: FleetOptions) -> FleetStatus:
    """Asks a tracker."""
    tracker = fleet.HostPort.parse(options.tracker, "tracker")
    return FleetStatus(str(tracker), fleet.servers_by_key(tracker))


@dataclass(frozen=True)
class TestedServer:
    """What a server did with the reference kernel."""

    __test__ = False  # pytest would take the class for one of its own

    server: str
    error: str = ""
    has_own_code: bool = False
    """Whether programs are measured there as on this host; else as TVM's own server does."""
    calibration_ms: float | None = None
    """Median of a call."""
    noise: float | None = None
    """The ninth decile of the calls over their median, less 1."""
    upload_mib_per_s: float | None = None

    def __str__(self) -> str:
        if self.error:
            return f"{self.server}  {self.error}"
        whose = "" if self.has_own_code else ", TVM’s own server"
        time = f"{duration((self.calibration_ms or 0) / 1e3)} ± {self.noise or 0:.0%}"
        return f"{self.server}  right, {time}, {self.upload_mib_per_s or 0:.0f} MiB/s{whose}"


@dataclass(frozen=True)
class FleetTest(Reported):
    """What became of all servers of a key."""

    tracker: str
    key: str
    servers: tuple[TestedServer, ...]
    num_busy: int

    def report(self) -> Report:
        times = sorted(server.calibration_ms for server in self.servers if server.calibration_ms)
        parts = [f"{sum(not server.error for server in self.servers)} of {len(self.servers)} servers can measure"]
        if len(times) > 1:
            parts.append(f"the slowest takes {times[-1] / times[0]:.2f} times as long as the fastest")
        if self.num_busy:
            parts.append(f"{self.num_busy} were busy all the time")
        return Report("; ".join(parts))

    def require_pass(self) -> None:
        failed = [server for server in self.servers if server.error]
        if failed:
            raise MachineError(f"{len(failed)} of {len(self.servers)} servers cannot measure; the lines above say why")


def self_test(options: FleetTestOptions, tell: Callable[[TestedServer], None] = lambda _: None) -> FleetTest:
    """Runs the reference kernel on every server of a key that is free in time, and tells about each."""
    settings = fleet.FleetSettings(
        tracker=fleet.HostPort.parse(options.tracker, "tracker"),
        key=options.key,
        wait_s=options.wait_s,
        session_s=_SESSION_S,
    )
    until_s = time.monotonic() + options.wait_s
    start_fork_server()
    device = fleet.device_of_fleet(settings, options.target, "auto" if options.target == "auto" else 1)
    num_servers = len(fleet.servers_by_key(settings.tracker).get(options.key, fleet.KeyState()).servers)
    compiler = require_linker(device.fingerprint.machine, options.linker)
    builder = LocalBuilder(device.target, max_workers=1, timeout_s=_BUILD_S, compiler=compiler)
    tested: dict[fleet.HostPort, TestedServer] = {}
    with contextlib.ExitStack() as stack:
        stack.callback(builder.close)
        kernel = fleet.build_reference_kernel(builder, num_calls=_NUM_CALLS, upload_bytes=_UPLOAD_BYTES)
        while len(tested) < num_servers:
            # a session is kept until the end, so that the tracker gives the other servers
            session = stack.enter_context(contextlib.closing(fleet.ServerSession(settings)))
            try:
                lease = session.find()
            except MachineError:  # somebody else has them all the time
                break
            if lease.server not in tested:
                tested[lease.server] = _tested(lease, session, kernel)
                tell(tested[lease.server])
            elif time.monotonic() > until_s:
                break
    return FleetTest(str(settings.tracker), options.key, tuple(tested.values()), num_servers - len(tested))


def _tested(lease: fleet.ServerLease, session: fleet.ServerSession, kernel: fleet.ReferenceKernel) -> TestedServer:
    try:
        session.open(lease)
        times = fleet.run_reference_kernel(session, kernel)
    except MachineError as err:
        return TestedServer(str(lease.server), str(err))
    return TestedServer(
        server=str(lease.server),
        has_own_code=session.description is not None,
        calibration_ms=times.median_s * 1e3,
        noise=float(np.percentile(times.calls_s, 90)) / times.median_s - 1,
        upload_mib_per_s=times.upload_bytes / 2**20 / times.upload_s,
    )
