"""Measures built candidates, one at a time, in a worker process that does nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from ansor_mlflow.threads import measuring_cpus, set_num_threads
from ansor_mlflow.tuning.workers import Outcome, WorkerPool

_TOO_SLOW = 10.0
"""A program that many times slower than the best of its task needs no exact time."""
_SETUP_S = 3.0
"""Time to load a library and fill its arguments, on a busy machine."""

ArgInfo = tuple[str, str, tuple[int, ...]]
"""How TVM describes an argument: ("TENSOR", dtype, shape)."""


def arg_info(info: Any) -> ArgInfo:
    """Reads MetaSchedule's description of an argument."""
    kind, dtype, shape = info.as_json()
    return str(kind), str(dtype), tuple(int(extent) for extent in shape)


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
    best_s: float | None = None
    """Seconds per call of the best program so far that computes the same; a far slower one is not measured in full."""


class Runner(Protocol):
    """Measures libraries that a `Builder` made."""

    is_remote: bool
    """Whether it measures on another machine, so that this one can search meanwhile."""

    def run(self, jobs: Sequence[RunJob]) -> list[Outcome[tuple[float, ...]]]:
        """Returns, in the order of the jobs, seconds per call, one value for each repeat; a failure is an outcome.

        A program that is far slower than `RunJob.best_s` may have one value only.
        """

    def close(self) -> None:
        """Frees processes; a `run` that waits for them in another thread fails."""


class LocalRunner:
    """A `Runner` on this host: one process, on CPUs that do not change.

    Args:
        settings: How programs are timed.
        memory_bytes: Data memory that a program may take, its arguments included; None for no bound.
    """

    is_remote = False

    def __init__(self, settings: MeasureSettings, *, memory_bytes: int | None = None) -> None:
        self._settings = settings
        self._pool = WorkerPool(1, memory_bytes=memory_bytes, cpus=measuring_cpus(settings.num_threads))

    def run(self, jobs: Sequence[RunJob]) -> list[Outcome[tuple[float, ...]]]:
        """See `Runner.run`."""
        work = [(job, self._settings) for job in jobs]
        return self._pool.map(_measure, work, [_timeout_s(job, self._settings) for job in jobs])

    def close(self) -> None:
        """See `Runner.close`."""
        self._pool.close()


def _timeout_s(job: RunJob, settings: MeasureSettings) -> float:
    """Time for one program: two calls at `_TOO_SLOW` times the best, or a full measurement of one that is faster."""
    if job.best_s is None:
        return settings.timeout_s
    slowest_s = _TOO_SLOW * job.best_s
    full_s = (2 + settings.repeat) * (settings.number * slowest_s + 2 * settings.min_repeat_ms / 1e3)
    return min(settings.timeout_s, _SETUP_S + full_s)


def _measure(work: tuple[RunJob, MeasureSettings]) -> tuple[float, ...]:
    """Times one library. Runs in the worker."""
    import tvm

    job, settings = work
    used = set_num_threads(settings.num_threads)
    if used != settings.num_threads:
        raise RuntimeError(f"TVM runs on {used} threads in the measuring process, not on {settings.num_threads}")
    library = tvm.runtime.load_module(str(job.path))
    arguments = _random_arguments(job.args_info)
    slow_s = _time_if_too_slow(library["main"], arguments, job.best_s)
    if slow_s is not None:
        return (slow_s,)
    timer = library.time_evaluator(
        "main",
        tvm.cpu(0),
        number=settings.number,
        repeat=settings.repeat,
        min_repeat_ms=settings.min_repeat_ms,
        f_preproc="cache_flush_cpu_non_first_arg" if settings.cache_flush else "",
    )
    return tuple(float(seconds) for seconds in timer(*arguments).results)


def _time_if_too_slow(function: Callable[..., object], arguments: list[Any], best_s: float | None) -> float | None:
    """Seconds of a call if two calls are both far slower than the best program, so that no measurement is needed."""
    if best_s is None:
        return None
    for _ in range(2):  # the first one also pays for cold caches and for starting the threads
        started = time.perf_counter()
        function(*arguments)
        elapsed_s = time.perf_counter() - started
        if elapsed_s < _TOO_SLOW * best_s:
            return None
    return elapsed_s


@lru_cache(maxsize=1)
def _random_arguments(args_info: tuple[ArgInfo, ...]) -> list[Any]:
    """Tensors of random numbers: zeros would let denormals and branches distort the time.

    The programs of a task have the same arguments, which take longer to fill than a fast program to measure.

    Indices, which ONNX has in 32 and 64 bits, are zero: TVM fills integers with any bits, and kernels do not check
    the indices that they read with.
    """
    import numpy as np
    import tvm

    device = tvm.cpu(0)
    fill = tvm.get_global_func("tvm.contrib.random.random_fill_for_measure")
    arguments = []
    for _, dtype, shape in args_info:
        if dtype in ("int32", "int64"):
            tensor = tvm.runtime.tensor(np.zeros(shape, dtype), device)
        else:
            tensor = tvm.runtime.empty(shape=shape, dtype=dtype, device=device)
            fill(tensor)
        arguments.append(tensor)
    return arguments
