"""Measures built candidates, one at a time, in a worker process that does nothing else."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Protocol

from ansor_mlflow.device import measuring_cpus, set_num_threads
from ansor_mlflow.tuning.workers.arguments import ArgInfo, num_bytes, random_arguments
from ansor_mlflow.tuning.workers.pool import Outcome, WorkerPool

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


@dataclass(frozen=True, kw_only=True)
class MeasureSettings:
    """How a candidate is timed; see the parameters of the same names."""

    number: int
    repeat: int
    min_repeat_ms: int
    cache_flush: bool
    num_threads: int
    timeout_s: float


@dataclass(frozen=True)
class RunJob:
    """A library whose function "main" is to be timed on random arguments."""

    path: Path
    args_info: tuple[ArgInfo, ...]
    task: str = ""
    """Name of the task; programs of one task compute the same."""
    best_s: float | None = None
    """Seconds per call of the task's best program before this round; a far slower one is not measured in full."""


class Runner(Protocol):
    """Measures libraries that a `Builder` made."""

    is_remote: bool
    """Whether it measures on another machine, so that this one can search meanwhile."""

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
        self._settings = settings
        self._pool = WorkerPool(
            1, max_tasks=_TASKS_PER_WORKER, memory_bytes=memory_bytes, cpus=cpus or measuring_cpus(settings.num_threads)
        )

    def run(self, jobs: Sequence[RunJob]) -> list[Outcome[tuple[float, ...]]]:
        """See `Runner.run`."""
        best_s: dict[str, float] = {}
        outcomes = []
        for job in jobs:
            known_s = [seconds for seconds in (job.best_s, best_s.get(job.task)) if seconds is not None]
            work = replace(job, best_s=min(known_s, default=None))
            (outcome,) = self._pool.map(_measure, [(work, self._settings)], _timeout_s(work, self._settings))
            if outcome.value is not None:
                best_s[job.task] = min([*known_s, fmean(outcome.value)])
            outcomes.append(outcome)
        return outcomes

    def close(self) -> None:
        """See `Runner.close`."""
        self._pool.close()


def _timeout_s(job: RunJob, settings: MeasureSettings) -> float:
    """Time for one program: two calls at `_TOO_SLOW` times the best, or a full measurement of one that is faster."""
    if job.best_s is None:
        return settings.timeout_s
    setup_s = _SETUP_S + _FILL_S_PER_BYTE * num_bytes(job.args_info)
    slowest_s = _TOO_SLOW * job.best_s
    full_s = (2 + settings.repeat) * (settings.number * slowest_s + 2 * settings.min_repeat_ms / 1e3)
    return min(settings.timeout_s, setup_s + full_s)


def _measure(work: tuple[RunJob, MeasureSettings]) -> tuple[float, ...]:
    """Times one library. Runs in the worker."""
    import tvm

    job, settings = work
    used = set_num_threads(settings.num_threads)
    if used != settings.num_threads:
        raise RuntimeError(f"TVM runs on {used} threads in the measuring process, not on {settings.num_threads}")
    library = tvm.runtime.load_module(str(job.path))
    arguments = random_arguments(job.args_info)
    call_s = _call_s(library["main"], arguments)
    if job.best_s is not None and call_s > max(_TOO_SLOW * job.best_s, _WORTH_CUTTING_S):
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


def _shortest_ms(min_repeat_ms: int, call_s: float, best_s: float | None) -> int:
    """The shortest time for one measurement: the slower a program is than the best, the less its exact time matters."""
    if best_s is None:
        return min_repeat_ms
    return round(min_repeat_ms * min(1.0, _CLOSE * best_s / call_s))


def _call_s(function: Callable[..., object], arguments: Sequence[object]) -> float:
    """Seconds of the faster of two calls; the first one also pays for cold caches and for starting the threads."""
    elapsed_s = []
    for _ in range(2):
        started = time.perf_counter()
        function(*arguments)
        elapsed_s.append(time.perf_counter() - started)
    return min(elapsed_s)
