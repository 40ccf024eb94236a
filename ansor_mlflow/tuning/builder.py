"""Compiles candidate programs into shared libraries, in parallel worker processes."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ansor_mlflow.tuning.workers import Outcome, WorkerPool

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.target import Target

_TASKS_PER_WORKER = 16


class Builder(Protocol):
    """Turns scheduled modules into libraries that a `Runner` can load."""

    def build(self, mods: Sequence[IRModule]) -> list[Outcome[Path]]:
        """Builds every module; outcomes come in the same order, a failure is an outcome."""

    def close(self) -> None:
        """Frees processes and files."""


@dataclass(frozen=True)
class _BuildJob:
    mod: IRModule
    target: Target
    path: Path


class LocalBuilder:
    """A `Builder` on this host's CPUs.

    Args:
        target: Target of the candidates.
        max_workers: Number of builds at a time.
        timeout_s: Seconds after which a build is given up.
    """

    def __init__(self, target: Target, *, max_workers: int, timeout_s: float) -> None:
        self._target = target
        self._timeout_s = timeout_s
        self._directory = tempfile.TemporaryDirectory(prefix="ansor_mlflow-build-")
        self._pool = WorkerPool(max_workers, max_tasks=_TASKS_PER_WORKER)
        self._num_built = 0

    def build(self, mods: Sequence[IRModule]) -> list[Outcome[Path]]:
        """See `Builder.build`. The libraries live until `close`, or until the caller removes them."""
        jobs = [_BuildJob(mod, self._target, self._next_path()) for mod in mods]
        return self._pool.map(_build, jobs, self._timeout_s)

    def close(self) -> None:
        """See `Builder.close`."""
        self._pool.close()
        self._directory.cleanup()

    def _next_path(self) -> Path:
        self._num_built += 1
        return Path(self._directory.name, f"candidate-{self._num_built}.so")


def _build(job: Any) -> Path:
    """Builds and links one candidate. Runs in a worker."""
    from tvm.driver import build
    from tvm.s_tir.transform import RemoveWeightLayoutRewriteBlock

    mod = RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(job.mod)
    build(mod, target=job.target).export_library(str(job.path))
    return Path(job.path)
