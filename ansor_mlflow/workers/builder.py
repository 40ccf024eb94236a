"""Compiles candidate programs into shared libraries, in parallel worker processes."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ansor_mlflow.codegen import pass_config, tir_pipeline
from ansor_mlflow.files import ScratchDirectory
from ansor_mlflow.processes import Outcome, WorkerPool

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.target import Target

_TASKS_PER_WORKER = 64


class Builder(Protocol):
    """Turns scheduled modules into libraries that a `Runner` can load."""

    def build(self, mods: Sequence[IRModule]) -> list[Outcome[Path]]:
        """Builds every module; outcomes come in the same order, a failure is an outcome."""

    def close(self) -> None:
        """Frees processes and files."""


@dataclass(frozen=True)
class _CandidateJob:
    mod: IRModule
    target: Target
    path: Path
    as_in_models: bool
    compiler: tuple[str, ...]


class LocalBuilder:
    """A `Builder` on this host's CPUs.

    With `as_in_models` candidates are compiled as the libraries of models are, see `codegen`; else they are as TVM's
    own compiler makes them. `compiler` is the command that links for another architecture, see `require_linker`.
    """

    def __init__(
        self,
        target: Target,
        *,
        max_workers: int,
        timeout_s: float,
        memory_bytes: int | None = None,
        as_in_models: bool = False,
        compiler: tuple[str, ...] = (),
    ) -> None:
        self._target = target
        self._as_in_models = as_in_models
        self._compiler = compiler
        self._timeout_s = timeout_s
        self._scratch = ScratchDirectory()
        self._pool = WorkerPool(max_workers, max_tasks=_TASKS_PER_WORKER, memory_bytes=memory_bytes)
        self._numbers = count(1)

    def build(self, mods: Sequence[IRModule]) -> list[Outcome[Path]]:
        """See `Builder.build`. The libraries live until `close`, or until the caller removes them."""
        paths = [self._scratch.path / f"candidate-{next(self._numbers)}.so" for _ in mods]
        jobs = [
            _CandidateJob(mod, self._target, path, self._as_in_models, self._compiler)
            for mod, path in zip(mods, paths, strict=True)
        ]
        outcomes = self._pool.map(_build, jobs, self._timeout_s)
        if errors := [outcome.error for outcome in outcomes if outcome.failure]:
            self._scratch.require_space(errors)
        return outcomes

    def close(self) -> None:
        self._pool.close()
        self._scratch.close()


def as_metaschedule_builder(builder: Builder) -> Any:
    """A MetaSchedule `PyBuilder` over a `Builder`, which stays the caller's: pass it as `builder=`.

    MetaSchedule's own `LocalBuilder` starts new processes in every round, which import TVM for half a minute. Modules
    are built for the builder's target; the target of a `BuilderInput` and its parameters are not looked at.
    """
    from tvm.ir.utils import derived_object
    from tvm.s_tir.meta_schedule.builder import BuilderInput, BuilderResult, PyBuilder

    @derived_object
    class _Adapter(PyBuilder):  # type: ignore[misc]
        def build(self, build_inputs: list[BuilderInput]) -> list[BuilderResult]:
            results = []
            for outcome in builder.build([build_input.mod for build_input in build_inputs]):
                if outcome.value is None:
                    results.append(BuilderResult(None, f"{outcome.failure}: {outcome.error}"))
                    continue
                directory = outcome.value.with_suffix("")  # MetaSchedule's callbacks remove the whole directory
                directory.mkdir()
                results.append(BuilderResult(str(outcome.value.rename(directory / outcome.value.name)), None))
            return results

    return _Adapter()


# -- in the worker -----------------------------------------------------------------------------------------------------


def _build(job: Any) -> Path:
    from tvm.driver import build
    from tvm.ir.transform import PassContext
    from tvm.s_tir.transform import RemoveWeightLayoutRewriteBlock

    mod = RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(job.mod)
    # the runner makes the arguments by the candidate's own description: no code is needed that checks each of them
    config = {"tirx.disable_assert": True, **(pass_config(job.target) if job.as_in_models else {})}
    passes = tir_pipeline(job.target) if job.as_in_models else "default"
    # TVM's own directory of object files would outlive a build that is killed
    scratch = tempfile.TemporaryDirectory(dir=job.path.parent)
    with job.target, scratch as directory, PassContext(config=config):
        library = build(mod, target=job.target, pipeline=passes)
        link = partial(_link, compiler=job.compiler)
        library.export_library(str(job.path), fcompile=link, workspace_dir=directory)
    return Path(job.path)


def _link(library: str, objects: list[str], *, compiler: tuple[str, ...], **_: Any) -> None:
    """Links with the linker itself, where there is one: the compiler around it takes ten times as long.

    What a kernel needs of the C and the math library, the process that loads it has. For another architecture only its
    compiler can link.
    """
    from tvm.support import cc

    if compiler:
        cc.create_shared(library, objects, list(compiler[1:]), compiler[0])
        return
    linker = shutil.which("ld")
    command = [linker or "", "-shared", "-o", library, *objects]
    if linker is None or subprocess.run(command, capture_output=True, check=False).returncode:
        cc.create_shared(library, objects)


Built = tuple[Sequence[Outcome[Path]], float]
"""What became of the modules of a batch, and its share of the builder's time in seconds."""


class BuildQueue:
    """Gives a `Builder` all that waits for it, in a thread of its own. To be closed; the builder is not."""

    def __init__(self, builder: Builder) -> None:
        self._builder = builder
        self._changed = threading.Condition()
        self._orders: list[tuple[Sequence[IRModule], Future[Built]]] = []
        self._is_closed = False
        threading.Thread(target=self._work, name="builder", daemon=True).start()

    def build(self, mods: Sequence[IRModule]) -> Built:
        """Waits for what `Builder.build` returns of some modules. May be called from several threads."""
        built: Future[Built] = Future()
        with self._changed:
            if self._is_closed:
                raise RuntimeError("the builder was closed")
            self._orders.append((mods, built))
            self._changed.notify_all()
        return built.result()

    def close(self) -> None:
        """Builds no more; whoever waits for what was not begun gets an error."""
        with self._changed:
            self._is_closed = True
            orders, self._orders = self._orders, []
            self._changed.notify_all()
        for _, built in orders:
            built.set_exception(RuntimeError("the builder was closed"))

    def _work(self) -> None:
        while orders := self._next_orders():
            all_mods = [mod for mods, _ in orders for mod in mods]
            started_s = time.monotonic()
            try:
                outcomes = iter(self._builder.build(all_mods))
            except Exception as err:  # noqa: BLE001 - whoever waits for it raises it
                for _, built in orders:
                    built.set_exception(err)
                continue
            seconds = (time.monotonic() - started_s) / max(1, len(all_mods))
            for mods, built in orders:
                built.set_result(([next(outcomes) for _ in mods], seconds * len(mods)))

    def _next_orders(self) -> list[tuple[Sequence[IRModule], Future[Built]]]:
        """All that waits; empty when the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._orders)
            orders, self._orders = self._orders, []
            return [] if self._is_closed else orders
