"""Measures candidates on every free server of a key at the same time."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from statistics import fmean

from ansor_mlflow.fleet.programs import MeasuredProgram, ReferenceKernel, measure_in_session, run_reference_kernel
from ansor_mlflow.fleet.remote import MeasureRequest
from ansor_mlflow.fleet.session import FleetSettings, LeaseExpiredError, ServerSession
from ansor_mlflow.fleet.tracker import Health, HostPort, ServerLease
from ansor_mlflow.measuring import MachineNoise
from ansor_mlflow.processes import Outcome
from ansor_mlflow.trials import ServerState
from ansor_mlflow.workers import MeasureSettings, RunJob, Runner, timeout_s_of

_GRACE_S = 10.0
"""Time for upload and answer, beyond that of the program; the server ends a program that hangs sooner."""
_IDLE_S = 5.0
"""Time without work after which a server is given back, for others to use."""
_REFERENCE_S = 30.0
"""Time between two runs of the reference kernel."""
_LISTENS_S = 3.0
"""Time in which a server listens again that a program has ended."""
_MAX_GONE = 5
"""Servers that may be gone after they were given a program, before it counts as crashed."""
_MAX_BATCHES = 32
_MAX_PROGRAMS = 256
"""Programs of a session; the server's process keeps each library in memory."""


@dataclass
class _PendingMeasurement:
    """A program on its way to a server, and back."""

    job: RunJob
    done: Future[Outcome[tuple[float, ...]]] = field(default_factory=Future)
    lost: list[tuple[HostPort, str]] = field(default_factory=list)
    """Servers that did not say what became of it, and how that was."""
    num_gone: int = 0
    """How many of them are gone."""


class RpcRunner(Runner):
    """A `Runner` on the servers of a key. To be closed. `run` may be called from several threads.

    `memory_bytes` is the data memory that a program may take, its arguments included; None for no bound.
    """

    num_batches = _MAX_BATCHES

    def __init__(
        self,
        settings: MeasureSettings,
        fleet: FleetSettings,
        kernel: ReferenceKernel,
        *,
        memory_bytes: int | None = None,
    ) -> None:
        self.noise = MachineNoise()
        self.is_remote = True
        self._settings = settings
        self._fleet = fleet
        self._kernel = kernel
        self._memory_bytes = memory_bytes
        self._health = Health()
        self._changed = threading.Condition()
        self._queue: deque[_PendingMeasurement] = deque()
        self._held: dict[HostPort, ServerSession] = {}
        self._spare: ServerSession | None = None
        """The session that looks for a server."""
        self._best_s: dict[str, float] = {}
        self._is_closed = False
        self._scout = threading.Thread(target=self._find_servers, name="fleet", daemon=True)
        self._scout.start()

    @property
    def num_devices(self) -> int:
        """Servers that it has now, or one."""
        with self._changed:
            return max(1, len(self._held))

    @property
    def servers(self) -> tuple[ServerState, ...]:
        with self._changed:
            return self._health.states()

    def run(self, jobs: Sequence[RunJob]) -> list[Outcome[tuple[float, ...]]]:
        """See `Runner.run`."""
        waiting = [_PendingMeasurement(job) for job in jobs]
        with self._changed:
            if self._is_closed:
                raise RuntimeError("the fleet was closed")
            self._queue.extend(waiting)
            self._changed.notify_all()
        return [program.done.result() for program in waiting]

    def close(self) -> None:
        """See `Runner.close`. Programs that are being measured are given up, too."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            sessions = [*self._held.values(), *([self._spare] if self._spare else [])]
        self._give_up(RuntimeError("the fleet was closed"))
        for session in sessions:
            session.close()
        self._scout.join()
        with self._changed:
            self._changed.wait_for(lambda: not self._held)

    # -- servers -------------------------------------------------------------------------------------------------------

    def _find_servers(self) -> None:
        """Asks for servers as long as there is work that waits."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._queue)
                if self._is_closed:
                    return
            try:
                session = self._spare_session()
                lease = session.find(self._is_alone)
            except Exception as err:  # noqa: BLE001 - whatever it is, `run` raises it
                self._give_up(err)
                continue
            with self._changed:
                # one that is set aside is not connected with: it reports to the tracker again
                if self._is_closed or lease.server in self._held or self._health.is_set_aside(lease.server):
                    continue
                self._held[lease.server] = session
                self._spare = None
            args = (lease, session)
            threading.Thread(target=self._serve, args=args, name=f"server {lease.server}", daemon=True).start()

    def _is_alone(self) -> bool:
        with self._changed:
            return bool(self._queue) and not self._held

    def _spare_session(self) -> ServerSession:
        session = self._spare or ServerSession(self._fleet)
        with self._changed:
            self._spare = session
            if not self._is_closed:
                return session
        session.close()
        raise RuntimeError("the fleet was closed")

    def _give_up(self, err: Exception) -> None:
        with self._changed:
            waiting = list(self._queue)
            self._queue.clear()
        for program in waiting:
            program.done.set_exception(err)

    # -- one server, in a thread of its own ----------------------------------------------------------------------------

    def _serve(self, lease: ServerLease, session: ServerSession) -> None:
        """Measures on a server until there is no work, its session is over, or it fails."""
        try:
            with contextlib.closing(session):
                session.open(lease)
                self._serve_session(session)
        except LeaseExpiredError:
            pass  # the server has told the tracker so, which is asked again
        except Exception as err:  # noqa: BLE001 - whatever fails here is the end of one session, not of the tuning
            with self._changed:
                if not self._is_closed:
                    self._health.failed(lease.server, str(err))
        finally:
            with self._changed:
                self._held.pop(lease.server, None)
                self._changed.notify_all()

    def _serve_session(self, session: ServerSession) -> None:
        began_s = time.monotonic()
        with self._changed:
            self._health.found(session.server)
        compared_s = self._compare(session)
        for _ in range(_MAX_PROGRAMS):
            program = self._next_program(session.server)
            if program is None or not self._measure(program, session):
                return
            if time.monotonic() - compared_s > _REFERENCE_S:
                compared_s = self._compare(session)
            if time.monotonic() - began_s + self._longest_s + _GRACE_S > self._fleet.session_s:
                return

    def _compare(self, session: ServerSession) -> float:
        """Runs the reference kernel; returns when."""
        times = run_reference_kernel(session, self._kernel)
        with self._changed:
            # one server on this host is a local device, which search and builds would disturb
            is_here = session.description is not None and session.description.is_here
            self.is_remote = not is_here or len(self._held) > 1
            self._health.compared(session.server, times.median_s)
        return time.monotonic()

    def _next_program(self, server: HostPort) -> _PendingMeasurement | None:
        """What to measure next; one that was lost here goes to another server where there is one."""

        def find() -> _PendingMeasurement | None:
            for program in self._queue:
                lost_on = {other for other, _ in program.lost}
                if server not in lost_on or self._held.keys() <= lost_on:
                    return program
            return None

        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or find() is not None, _IDLE_S)
            program = None if self._is_closed else find()
            if program is not None:
                self._queue.remove(program)
            return program

    def _measure(self, program: _PendingMeasurement, session: ServerSession) -> bool:
        """Measures a program; returns whether the session goes on."""
        with self._changed:
            known_s = [s for s in (program.job.best_s, self._best_s.get(program.job.task)) if s is not None]
        job = replace(program.job, best_s=min(known_s, default=None))
        # what disturbs a server's host slows down more than the kernel, as `LocalRunner` knows, too
        limit_s = min(self.noise.slowdown * timeout_s_of(job, self._settings), self._longest_s)
        work = MeasureRequest(job=job, settings=self._settings, memory_bytes=self._memory_bytes, limit_s=limit_s)
        started_s = time.monotonic()
        try:
            called = session.call(measure_in_session, work, work.limit_s + _GRACE_S)
        except Exception as err:
            self._lost(program, session.server, Outcome(failure="crashed", error=str(err)))
            raise
        elapsed_s = time.monotonic() - started_s
        found = called.value
        if found is not None and found.failure == "crashed" and elapsed_s >= work.limit_s:
            found = Outcome(failure="timed_out", error=f"ended by the server after {work.limit_s:.3g} s")
        if found is None or found.failure == "crashed":
            error = called.error if found is None else found.error
            is_late = called.failure == "timed_out"
            self._lost(program, session.server, Outcome(failure="timed_out" if is_late else "crashed", error=error))
            return False
        self._answered(program, session.server, found, elapsed_s)
        return found.failure != "timed_out"

    def _answered(
        self, program: _PendingMeasurement, server: HostPort, found: Outcome[MeasuredProgram], elapsed_s: float
    ) -> None:
        """A server said what became of a program: servers that lost it before are to blame."""
        measured = found.value
        with self._changed:
            self._health.measured(server, elapsed_s)
            for other, reason in program.lost:
                if other != server:
                    self._health.failed(other, reason)
            if measured is not None:
                if measured.probe is not None:
                    self.noise.add(measured.probe)
                best_s = self._best_s.get(program.job.task, measured.run_s[0])
                self._best_s[program.job.task] = min(best_s, fmean(measured.run_s))
        if measured is None:
            program.done.set_result(Outcome(failure=found.failure, error=found.error))
        else:
            program.done.set_result(Outcome(measured.run_s, disturbance=measured.waited))

    @property
    def _longest_s(self) -> float:
        """Time that a program may take on a server which is busy: a session has room for it."""
        return min(self.noise.slowdown * self._settings.timeout_s, self._fleet.session_s / 2)

    def _lost(self, program: _PendingMeasurement, server: HostPort, outcome: Outcome[tuple[float, ...]]) -> None:
        """A server did not say what became of a program: another one tries. What all of them lose ends them itself.

        A server that is gone is not the program's fault, which ends no more than its session.
        """
        is_gone = not server.is_listening(_LISTENS_S)
        program.lost.append((server, outcome.error))
        program.num_gone += is_gone
        with self._changed:
            may_retry = len(program.lost) - program.num_gone <= self._fleet.num_retries and program.num_gone < _MAX_GONE
            if may_retry and not self._is_closed:
                self._queue.appendleft(program)
                self._changed.notify_all()
                return
            if len({other for other, _ in program.lost}) == 1:
                self._health.failed(server, outcome.error)
        program.done.set_result(outcome)
