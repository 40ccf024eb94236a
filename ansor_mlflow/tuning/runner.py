"""Measures built candidates, one at a time, in a worker process that does nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ansor_mlflow.targets import set_num_threads
from ansor_mlflow.tuning.workers import Outcome, WorkerPool

ArgInfo = tuple[str, str, tuple[int, ...]]
"""How TVM describes an argument: ("TENSOR", dtype, shape)."""


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


class Runner(Protocol):
    """Measures libraries that a `Builder` made."""

    def run(self, jobs: Sequence[RunJob]) -> list[Outcome[tuple[float, ...]]]:
        """Returns, in the order of the jobs, seconds per call, one value for each repeat; a failure is an outcome."""

    def close(self) -> None:
        """Frees processes."""


class LocalRunner:
    """A `Runner` on this host."""

    def __init__(self, settings: MeasureSettings) -> None:
        self._settings = settings
        self._pool = WorkerPool(1)

    def run(self, jobs: Sequence[RunJob]) -> list[Outcome[tuple[float, ...]]]:
        """See `Runner.run`."""
        work = [(job, self._settings) for job in jobs]
        return self._pool.map(_measure, work, self._settings.timeout_s)

    def close(self) -> None:
        """See `Runner.close`."""
        self._pool.close()


def _measure(work: tuple[RunJob, MeasureSettings]) -> tuple[float, ...]:
    """Times one library. Runs in the worker."""
    import tvm

    job, settings = work
    used = set_num_threads(settings.num_threads)
    if used != settings.num_threads:
        raise RuntimeError(f"TVM runs on {used} threads in the measuring process, not on {settings.num_threads}")
    device = tvm.cpu(0)
    library = tvm.runtime.load_module(str(job.path))
    timer = library.time_evaluator(
        "main",
        device,
        number=settings.number,
        repeat=settings.repeat,
        min_repeat_ms=settings.min_repeat_ms,
        f_preproc="cache_flush_cpu_non_first_arg" if settings.cache_flush else "",
    )
    return tuple(float(seconds) for seconds in timer(*_random_arguments(job.args_info, device)).results)


def _random_arguments(args_info: tuple[ArgInfo, ...], device: Any) -> list[Any]:
    """Tensors of random numbers: zeros would let denormals and branches distort the time.

    Indices, which ONNX has in 32 and 64 bits, are zero: TVM fills integers with any bits, and kernels do not check
    the indices that they read with.
    """
    import numpy as np
    import tvm

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
