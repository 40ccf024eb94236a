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

from ansor_mlflow.measuring import MachineNoise
from ansor_mlflow.processes import Outcome, WorkerPool
from ansor_mlflow.trials import ServerState
from ansor_mlflow.tuning.fleet.calibration import Calibration
from ansor_mlflow.tuning.fleet.health import Health
from ansor_mlflow.tuning.fleet.lookout import FleetSettings, Lookout
from ansor_mlflow.tuning.fleet.remote import ServerDescription
from ansor_mlflow.tuning.fleet.session import (
    CheckedServer,
    RemoteWork,
    Reply,
    check_server,
    measure_in_session,
    open_session,
    ran_out,
    ready_pool,
)
from ansor_mlflow.tuning.fleet.tracker import Grant, HostPort
from ansor_mlflow.tuning.workers.runner import Runner
from ansor_mlflow.tuning.workers.timing import MeasureSettings, RunJob, timeout_s_of

_OPEN_S = 30.0
"""Time to connect with a server, and to run the known program there."""
_GRACE_S = 10.0
"""Time for upload and answer, beyond that of the program; the server ends a program that hangs sooner."""
_IDLE_S = 5.0
"""Time without work after which a server is given back, for others to use."""
_CALIBRATE_S = 30.0
"""Time between two runs of the known program."""
_LISTENS_S = 2.0
_MAX_GONE = 5
"""Servers that may be gone after they were given a program, before it counts as crashed."""
_MAX_BATCHES = 32
_MAX_PROGRAMS = 256
"""Programs of a session; the server's process keeps each library in memory."""


@dataclass
class _Errand:
    """A program on its way to a server, and back."""

    job: RunJob
    done: Future[Outcome[tuple[float, ...]]] = field(default_factory=Future)
    lost: list[tuple[HostPort, str]] = field(default_factory=list)
    """Servers that did not say what became of it, and how that was."""
    num_gone: int = 0
    """How many of them are gone."""

    def was_lost_on(self, server: HostPort) -> bool:
        """Whether that server is one of them."""
        return any(server == other for other, _ in self.lost)


class RpcRunner(Runner):
    """A `Runner` on the servers of a key. To be closed. `run` may be called from several threads.

    Args:
        settings: How programs are timed.
        fleet: Where.
        calibration: A known program, built for the devices.
        memory_bytes: Data memory that a program may take, its arguments included; None for no bound.
    """

    num_batches = _MAX_BATCHES

    def __init__(
        self,
        settings: MeasureSettings,
        fleet: FleetSettings,
        calibration: Calibration,
        *,
        memory_bytes: int | None = None,
    ) -> None:
        self.noise = MachineNoise()
        self.is_remote = True
        self._settings = settings
        self._fleet = fleet
        self._calibration = calibration
        self._memory_bytes = memory_bytes
        self._lookout = Lookout(fleet)
        self._spare: WorkerPool | None = None
        """A process for the next session."""
        self._health = Health()
        self._changed = threading.Condition()
        self._queue: deque[_Errand] = deque()
        self._held: dict[HostPort, WorkerPool] = {}
        """The servers that it has, with the process of the session."""
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
        """What became of each server until now."""
        with self._changed:
            return self._health.states()

    def run(self, jobs: Sequence[RunJob]) -> list[Outcome[tuple[float, ...]]]:
        """See `Runner.run`.

        Raises:
            MachineError: No server was free for too long.
        """
        waiting = [_Errand(job) for job in jobs]
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
            pools = list(self._held.values())
        self._give_up(RuntimeError("the fleet was closed"))
        for pool in pools:
            pool.close()
        self._scout.join()
        if self._spare is not None:
            self._spare.close()
        with self._changed:
            self._changed.wait_for(lambda: not self._held)

    # -- servers -------------------------------------------------------------------------------------------------------

    def _find_servers(self) -> None:
        """Asks for servers as long as there is work that waits."""
        while self._waits_for_work():
            try:
                self._spare = self._spare or ready_pool()
                grant = self._lookout.look()
            except Exception as err:  # noqa: BLE001 - whatever it is, `run` raises it
                self._give_up(err)
                continue
            if grant is not None and self._take(grant, self._spare):
                self._spare = None
            with self._changed:
                if self._held:
                    self._lookout.found()

    def _waits_for_work(self) -> bool:
        """Sleeps until a program waits for a server; returns False when the runner is closed."""
        with self._changed:
            if not self._queue or self._is_closed:  # nobody waits for a server until there is work again
                self._lookout.withdraw()
                self._lookout.found()
            self._changed.wait_for(lambda: self._is_closed or self._queue)
            return not self._is_closed

    def _take(self, grant: Grant, pool: WorkerPool) -> bool:
        """Begins a session. A server that is set aside is not connected with: it reports to the tracker again."""
        with self._changed:
            if self._is_closed or grant.server in self._held or self._health.is_set_aside(grant.server):
                return False
            self._held[grant.server] = pool
            self._health.found(grant.server)
        threading.Thread(target=self._serve, args=(grant, pool), name=f"server {grant.server}", daemon=True).start()
        return True

    def _give_up(self, err: Exception) -> None:
        """Ends the wait of all programs that no server has."""
        with self._changed:
            waiting = list(self._queue)
            self._queue.clear()
        for program in waiting:
            program.done.set_exception(err)

    # -- one server, in a thread of its own ----------------------------------------------------------------------------

    def _serve(self, grant: Grant, pool: WorkerPool) -> None:
        """Measures on a server until there is no work, its session is over, or it fails."""
        try:
            with contextlib.closing(pool):
                self._serve_session(grant, pool)
        except Exception as err:  # noqa: BLE001 - whatever fails here is the end of one session, not of the tuning
            with self._changed:
                if not self._is_closed:
                    self._health.failed(grant.server, str(err))
        finally:
            with self._changed:
                self._held.pop(grant.server, None)
                self._changed.notify_all()

    def _serve_session(self, grant: Grant, pool: WorkerPool) -> None:
        server, began_s = grant.server, time.monotonic()
        (opened,) = pool.map(open_session, [(grant, self._fleet.session_s)], _OPEN_S)
        if ran_out(opened):
            return  # it has told the tracker so, which is asked again
        if opened.failure:
            raise RuntimeError(f"no session can be opened: {opened.error}")
        calibrated_s = self._calibrate(server, pool)
        for _ in range(_MAX_PROGRAMS):
            program = self._next_program(server)
            if program is None:
                return
            if not self._measure(program, server, pool):
                return
            if time.monotonic() - calibrated_s > _CALIBRATE_S:
                calibrated_s = self._calibrate(server, pool)
            if time.monotonic() - began_s + self._settings.timeout_s + _GRACE_S > self._fleet.session_s:
                return

    def _calibrate(self, server: HostPort, pool: WorkerPool) -> float:
        """Runs the known program; returns when."""
        checked: Outcome[CheckedServer]
        (checked,) = pool.map(check_server, [self._calibration], _OPEN_S)
        if checked.value is None:
            raise RuntimeError(f"a known program cannot be run: {checked.error}")
        if reason := Health.why_wrong(checked.value.max_rel_error):
            raise RuntimeError(reason)
        description = checked.value.description
        with self._changed:
            # one server on this host is a local device, which search and builds would disturb
            is_here = bool(description) and ServerDescription.from_json(description).is_here
            self.is_remote = not is_here or len(self._held) > 1
            self._health.calibrated(server, checked.value.calibration_s)
        return time.monotonic()

    def _next_program(self, server: HostPort) -> _Errand | None:
        """What to measure next; one that was lost here goes to another server where there is one."""

        def find() -> _Errand | None:
            return next((program for program in self._queue if self._may_measure(program, server)), None)

        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or find() is not None, _IDLE_S)
            program = None if self._is_closed else find()
            if program is not None:
                self._queue.remove(program)
            return program

    def _may_measure(self, program: _Errand, server: HostPort) -> bool:
        """Whether a program was not lost on a server, or on all that there are."""
        return not program.was_lost_on(server) or all(program.was_lost_on(other) for other in self._held)

    def _measure(self, program: _Errand, server: HostPort, pool: WorkerPool) -> bool:
        """Measures a program; returns whether the session goes on."""
        work = self._work_of(program.job)
        started_s = time.monotonic()
        reply: Outcome[Reply]
        try:
            (reply,) = pool.map(measure_in_session, [work], work.limit_s + _GRACE_S)
        except Exception as err:
            self._lost(program, server, Outcome(failure="crashed", error=str(err)))
            raise
        elapsed_s = time.monotonic() - started_s
        found = reply.value
        if found is not None and found.is_lost and elapsed_s >= work.limit_s:
            found = Reply(failure="timed_out", error=f"ended by the server after {work.limit_s:.3g} s")
        if found is None or found.is_lost:
            is_late = reply.failure == "timed_out"
            error = reply.error if found is None else found.error
            self._lost(program, server, Outcome(failure="timed_out" if is_late else "crashed", error=error))
            return False
        with self._changed:
            self._health.measured(server, elapsed_s)
            if found.probe is not None:
                self.noise.add(found.probe)
            for other, reason in program.lost:
                if other != server:
                    self._health.failed(other, reason)
            if found.run_s:
                best_s = self._best_s.get(program.job.task, found.run_s[0])
                self._best_s[program.job.task] = min(best_s, fmean(found.run_s))
        outcome: Outcome[tuple[float, ...]]
        if found.failure:
            outcome = Outcome(failure=found.failure, error=found.error)
        else:
            outcome = Outcome(found.run_s, disturbance=found.waited)
        program.done.set_result(outcome)
        return found.failure != "timed_out"

    def _work_of(self, job: RunJob) -> RemoteWork:
        with self._changed:
            known_s = [s for s in (job.best_s, self._best_s.get(job.task)) if s is not None]
        job = replace(job, best_s=min(known_s, default=None))
        # as `LocalRunner` has it; but a session is no longer than `session_s`, at which the server ends it
        limit_s = min(self.noise.slowdown * timeout_s_of(job, self._settings), self._fleet.session_s / 2)
        return RemoteWork(job, self._settings, self._memory_bytes, limit_s)

    def _lost(self, program: _Errand, server: HostPort, outcome: Outcome[tuple[float, ...]]) -> None:
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
