"""Measures built candidates, one at a time, in a worker process that does nothing else."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Protocol

from ansor_mlflow.device import measuring_cpus, set_num_threads
from ansor_mlflow.measuring import MachineNoise, lost_share, time_probe, watched
from ansor_mlflow.tuning.workers.arguments import ArgInfo, num_bytes, random_arguments
from ansor_mlflow.tuning.workers.pool import Outcome, WorkerPool
from ansor_mlflow.tuning.workers.surroundings import RestOfNetwork, Surroundings

if TYPE_CHECKING:
    import tvm

_TASKS_PER_WORKER = 256
"""Libraries that a process measures: TVM keeps each of them in memory."""
_TOO_SLOW = 5.0
"""A program that many times slower than the best of its task needs no exact time."""
_CLOSE = 1.5
"""A program that many times slower than the best is measured for `min_repeat_ms`; beyond, for less in proportion."""
_WORTH_CUTTING_S = 1e-3
"""A call that is shorter is always measured in full: Python's own time is a part of it."""
_SAFETY = 1.1
"""Calls beyond those that just reach `min_repeat_ms`, because a measurement that falls short starts again."""
_SETUP_S = 3.0
"""Time to load a library, on a busy machine."""
_FILL_S_PER_BYTE = 2e-8
"""Time to fill arguments with random numbers: 7e-9 measured for 16-bit floats, less for others."""
_PROBE_TIMEOUT_S = 60.0
_MIN_REPEATED_S = 1.0
"""Time for measuring again that there is from the beginning: the first trials of a task are often the best."""
_MAX_REPEATED = 0.25
"""Time for measuring again what was disturbed, over that of all first measurements, at most."""


@dataclass(frozen=True, kw_only=True)
class MeasureSettings:
    """How a candidate is timed; see the parameters of the same names."""

    number: int
    repeat: int
    min_repeat_ms: int
    cache_flush: bool
    num_threads: int
    timeout_s: float
    rest: RestOfNetwork | None = None
    """What passes between two calls of a kernel; None calls it again at once."""


@dataclass(frozen=True)
class RunJob:
    """A library whose function "main" is to be timed on random arguments."""

    path: Path
    args_info: tuple[ArgInfo, ...]
    task: str = ""
    """Name of the task; programs of one task compute the same."""
    constants: tuple[int, ...] = ()
    """Numbers of the arguments that are constants of the network."""
    best_s: float | None = None
    """Seconds per call of the task's best program before this round; a far slower one is not measured in full."""


class Runner(Protocol):
    """Measures libraries that a `Builder` made."""

    is_remote: bool
    """Whether it measures on another machine, so that this one can search meanwhile."""
    noise: MachineNoise
    """How quiet the machine is on which it measures."""

    def run(self, jobs: Sequence[RunJob]) -> list[Outcome[tuple[float, ...]]]:
        """Returns, in the order of the jobs, seconds per call, one value for each repeat; a failure is an outcome.

        A program that is far slower than the best of its task may have one value only.
        """

    def close(self) -> None:
        """Frees processes; a `run` that waits for them in another thread fails."""


class LocalRunner:
    """A `Runner` on this host: one process, on CPUs that do not change.

    Args:
        settings: How programs are timed.
        memory_bytes: Data memory that a program may take, its arguments included; None for no bound.
        cpus: CPUs to measure on; by default those that `measuring_cpus` chooses.
    """

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
        timeout_s = self.noise.slowdown * _timeout_s(work, self._settings)
        (outcome,) = self._pool.map(_measure, [(work, self._settings)], timeout_s)
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
        """See `Runner.close`."""
        self._pool.close()


def _timeout_s(job: RunJob, settings: MeasureSettings) -> float:
    """Time for one program: two calls at `_TOO_SLOW` times the best, or a full measurement of one that is faster."""
    if job.best_s is None:
        return settings.timeout_s
    passing_bytes, passing_s = (settings.rest.passing_bytes, settings.rest.passing_s) if settings.rest else (0, 0.0)
    setup_s = _SETUP_S + _FILL_S_PER_BYTE * (num_bytes(job.args_info) + passing_bytes)
    slowest_s = _TOO_SLOW * job.best_s + passing_s
    full_s = (2 + settings.repeat) * (settings.number * slowest_s + 2 * settings.min_repeat_ms / 1e3)
    return min(settings.timeout_s, setup_s + full_s)


def _measure(work: tuple[RunJob, MeasureSettings]) -> tuple[tuple[float, ...], float]:
    """Times one library. Runs in the worker.

    Returns:
        Seconds per call, and the share of the time that the worker waited for a CPU.
    """
    import tvm

    job, settings = work
    used = set_num_threads(settings.num_threads)
    if used != settings.num_threads:
        raise RuntimeError(f"TVM runs on {used} threads in the measuring process, not on {settings.num_threads}")
    library = tvm.runtime.load_module(str(job.path))
    arguments = random_arguments(job.args_info)
    around = None if settings.rest is None else _surroundings(settings.rest, settings.num_threads)
    with watched() as waiting:
        if around is None:
            run_s = _time_alone(library, arguments, job, settings)
        else:
            run_s = _time_in_network(library, arguments, job, settings, around)
    return run_s, waiting.share


def _time_in_network(
    library: tvm.runtime.Module,
    arguments: Sequence[Any],
    job: RunJob,
    settings: MeasureSettings,
    surroundings: Surroundings,
) -> tuple[float, ...]:
    """Times single calls, between which the rest of the network passes by. Python adds half a microsecond to each."""
    activations = surroundings.memory_of([a for place, a in enumerate(arguments) if place not in job.constants])
    function = library["main"]

    def call_s() -> float:
        surroundings.run(activations)
        started = time.perf_counter()
        function(*arguments)
        return time.perf_counter() - started

    fastest_s = min(call_s() for _ in range(2))
    if _is_too_slow(fastest_s, job.best_s):
        return (fastest_s,)
    shortest_s = _shortest_ms(settings.min_repeat_ms, fastest_s, job.best_s) / 1e3
    return tuple(_median_s(call_s, settings.number, shortest_s) for _ in range(settings.repeat))


@cache
def _surroundings(rest: RestOfNetwork, num_threads: int) -> Surroundings:
    """Those of the network that this worker measures for."""
    return Surroundings(rest, num_threads)


def _median_s(call_s: Callable[[], float], number: int, shortest_s: float) -> float:
    """Median of so many calls at least, and for so long: what disturbs one of them does not count."""
    until = time.perf_counter() + shortest_s
    samples = [call_s() for _ in range(number)]
    while time.perf_counter() < until:
        samples.append(call_s())
    return median(samples)


def _time_alone(
    library: tvm.runtime.Module, arguments: Sequence[Any], job: RunJob, settings: MeasureSettings
) -> tuple[float, ...]:
    """Times calls one after the other, all on the same arguments."""
    import tvm

    call_s = _call_s(library["main"], arguments)
    if _is_too_slow(call_s, job.best_s):
        return (call_s,)
    shortest_ms = _shortest_ms(settings.min_repeat_ms, call_s, job.best_s)
    # TVM calls three times and guesses from these cold calls how many are enough; it often starts again
    enough = math.ceil(_SAFETY * shortest_ms / 1e3 / call_s)
    timer = library.time_evaluator(
        "main",
        tvm.cpu(0),
        number=max(settings.number, enough),
        repeat=settings.repeat,
        min_repeat_ms=shortest_ms,
        f_preproc="cache_flush_cpu_non_first_arg" if settings.cache_flush else "",
    )
    return tuple(float(seconds) for seconds in timer(*arguments).results)


def _is_too_slow(call_s: float, best_s: float | None) -> bool:
    """Whether a program is so far from the best that its exact time does not matter."""
    return best_s is not None and call_s > max(_TOO_SLOW * best_s, _WORTH_CUTTING_S)


def _shortest_ms(min_repeat_ms: int, call_s: float, best_s: float | None) -> int:
    """The shortest time for one measurement: the slower a program is than the best, the less its exact time matters."""
    if best_s is None:
        return min_repeat_ms
    return round(min_repeat_ms * min(1.0, _CLOSE * best_s / call_s))


def _call_s(function: Callable[..., object], arguments: Sequence[object]) -> float:
    """Seconds of the faster of two calls; the first one also pays for cold caches and for starting the threads."""
    seconds = []
    for _ in range(2):
        started = time.perf_counter()
        function(*arguments)
        seconds.append(time.perf_counter() - started)
    return min(seconds)
