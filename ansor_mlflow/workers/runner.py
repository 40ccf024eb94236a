"""Measures built candidates, one at a time, in a worker process that does nothing else."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Protocol

from ansor_mlflow.device import measuring_cpus
from ansor_mlflow.measuring import MachineNoise, lost_share, time_probe
from ansor_mlflow.processes import Outcome, WorkerPool
from ansor_mlflow.trials import ServerState
from ansor_mlflow.workers.measure import MeasureSettings, RunJob, measure_program, timeout_s_of

_TASKS_PER_WORKER = 256
"""Libraries that a process measures: TVM keeps each of them in memory."""
_PROBE_TIMEOUT_S = 60.0
_MIN_REPEATED_S = 1.0
"""Time for measuring again that there is from the beginning: the first trials of a task are often the best."""
_MAX_REPEATED = 0.25
"""Time for measuring again what was disturbed, over that of all first measurements, at most."""


class Runner(Protocol):
    """Measures libraries that a `Builder` made."""

    is_remote: bool
    """Whether it measures on another machine, so that this one can search meanwhile."""
    noise: MachineNoise
    """How quiet the machine is on which it measures."""
    num_batches: int = 1
    """Calls of `run` that may be under way at a time, each in a thread of its own."""

    @property
    def num_devices(self) -> int:
        """Programs that it measures at a time."""
        return 1

    @property
    def servers(self) -> tuple[ServerState, ...]:
        """What became of the servers of a fleet."""
        return ()

    def run(self, jobs: Sequence[RunJob]) -> list[Outcome[tuple[float, ...]]]:
        """Returns, in the order of the jobs, seconds per call, one value for each repeat; a failure is an outcome.

        A program that is far slower than the best of its task may have one value only.
        """

    def close(self) -> None:
        """Frees processes; a `run` that waits for them in another thread fails."""


class LocalRunner(Runner):
    """A `Runner` on this host: one process, on CPUs that do not change."""

    is_remote = False

    def __init__(
        self, settings: MeasureSettings, *, memory_bytes: int | None = None, cpus: frozenset[int] | None = None
    ) -> None:
        self.noise = MachineNoise()
        self._settings = settings
        self._measured_s = 0.0
        self._repeated_s = 0.0
        self._pool = WorkerPool(
            1, max_tasks=_TASKS_PER_WORKER, memory_bytes=memory_bytes, cpus=cpus or measuring_cpus(settings.num_threads)
        )

    def run(self, jobs: Sequence[RunJob]) -> list[Outcome[tuple[float, ...]]]:
        """See `Runner.run`. What other programs disturbed is measured again, for a quarter of all time at most."""
        before, started_s = self._probe(), time.monotonic()
        best_s: dict[str, float] = {}
        outcomes = [self._measure(job, best_s) for job in jobs]
        self._measured_s += time.monotonic() - started_s
        lost = lost_share(before, self._probe())
        outcomes = [replace(outcome, disturbance=max(outcome.disturbance, lost)) for outcome in outcomes]
        return [
            self._repeat(job, outcome, best_s) if outcome.is_disturbed else outcome
            for job, outcome in zip(jobs, outcomes, strict=True)
        ]

    def _measure(self, job: RunJob, best_s: dict[str, float]) -> Outcome[tuple[float, ...]]:
        known_s = [seconds for seconds in (job.best_s, best_s.get(job.task)) if seconds is not None]
        work = replace(job, best_s=min(known_s, default=None))
        timeout_s = self.noise.slowdown * timeout_s_of(work, self._settings)
        (outcome,) = self._pool.map(measure_program, [(work, self._settings)], timeout_s)
        if outcome.value is None:
            return Outcome(failure=outcome.failure, error=outcome.error)
        run_s, waited = outcome.value
        best_s[job.task] = min([*known_s, fmean(run_s)])
        return Outcome(run_s, disturbance=waited)

    def _repeat(
        self, job: RunJob, outcome: Outcome[tuple[float, ...]], best_s: dict[str, float]
    ) -> Outcome[tuple[float, ...]]:
        """Measures again if there is time for it; returns the outcome that was disturbed less."""
        limit_s = max(_MIN_REPEATED_S, _MAX_REPEATED * self._measured_s)
        if self._repeated_s >= limit_s or outcome.failure not in ("", "timed_out"):
            return outcome
        started_s = time.monotonic()
        again = self._measure(job, best_s)
        self._repeated_s += time.monotonic() - started_s
        is_better = again.value is not None and (outcome.value is None or again.disturbance < outcome.disturbance)
        return again if is_better else outcome

    def _probe(self) -> float:
        """Times the probe where programs are measured; returns the slowdown."""
        (outcome,) = self._pool.map(time_probe, [self._settings.num_threads], _PROBE_TIMEOUT_S)
        return self.noise.slowdown if outcome.value is None else self.noise.add(outcome.value)

    def close(self) -> None:
        self._pool.close()
