"""What the searches of a task have in common: what failed is tried again, and a cost model is taught."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from ansor_mlflow.device import return_freed_memory
from ansor_mlflow.errors import MachineError
from ansor_mlflow.lowering import TuningTask
from ansor_mlflow.records import RecordText
from ansor_mlflow.tuning.search.candidates import replay_all
from ansor_mlflow.tuning.search.space import context_of

if TYPE_CHECKING:
    from tvm.s_tir.meta_schedule import TuneContext
    from tvm.s_tir.meta_schedule.cost_model import CostModel
    from tvm.s_tir.meta_schedule.runner import RunnerResult
    from tvm.s_tir.meta_schedule.search_strategy import MeasureCandidate
    from tvm.target import Target

_NUM_WARMUP_SAMPLES = 48
"""Measurements before the cost model is trusted; until then rounds are random. MetaSchedule's default is 100."""
_MAX_SECOND_CHANCES = 4
"""Programs of a task that are tried again after they failed."""


def make_cost_model(kind: str, num_threads: int, seed: int) -> CostModel:
    """The cost model of that name; for "none", too, a random one, since evolution needs some order.

    Raises:
        MachineError: `kind` is "mlp" and PyTorch is missing.
    """
    from tvm.s_tir.meta_schedule import cost_model

    if kind == "xgb":
        config = cost_model.xgb_model.XGBConfig(nthread=num_threads)
        # Adaptive training would leave out what was learned last, to save a training of 0.2 s.
        return cost_model.XGBModel(config=config, num_warmup_samples=_NUM_WARMUP_SAMPLES, adaptive_training=False)
    if kind == "mlp":
        try:
            from tvm.s_tir.meta_schedule.cost_model.mlp_model import MLPModel
        except ImportError as err:
            raise MachineError("cost_model=mlp needs PyTorch: pip install torch, or use cost_model=xgb") from err
        return MLPModel()
    return cost_model.RandomModel(seed=seed)  # left to itself, the search makes one without a seed


def is_untrained(cost_model: CostModel) -> bool:
    """Whether the model still ranks at random because it has too few samples."""
    return int(getattr(cost_model, "data_size", 0)) < int(getattr(cost_model, "num_warmup_samples", 0))


def release_memory() -> None:
    """Frees unreachable objects that refer to each other, and what the C library keeps of freed memory.

    XGBoost defines a class for every array that it returns, hundreds in a training, and a class refers to itself.
    Python looks for such objects among old ones only when there is a quarter more of them than there was the last time.
    The C library keeps memory of every thread that searched, for that thread.
    """
    gc.collect()
    return_freed_memory()


class SpaceSearch(ABC):
    """Proposes programs of one space for a task, and learns from their measurement.

    Args:
        task: What is tuned.
        target: Device that is tuned for.
        num_threads: Threads of the search; with one, a seed gives the same candidates again.
        seed: Seed of the search.
        cost_model: Is taught what was measured; None where nothing asks it.
    """

    def __init__(
        self, task: TuningTask, target: Target, num_threads: int, seed: int, cost_model: CostModel | None
    ) -> None:
        self._task = task
        self._target = target
        self._num_threads = num_threads
        self._seed = seed
        self._cost_model = cost_model
        self._lessons: list[tuple[TuneContext, list[MeasureCandidate], list[RunnerResult]]] = []
        """What the cost model was not taught yet."""
        self._num_learned = 0
        self._failed: list[MeasureCandidate] = []
        self._num_second_chances = 0

    def propose(self, limit: int) -> list[MeasureCandidate]:
        """At most `limit` new programs, best guess first; none when the space is exhausted.

        Before that, a few programs that failed are tried again: a worker may have died of something else, and a small
        space has nothing else to offer.
        """
        candidates = self._new_programs(limit)
        if not candidates:
            limit = min(limit, _MAX_SECOND_CHANCES - self._num_second_chances)
            candidates, self._failed = self._failed[:limit], self._failed[limit:]
            self._num_second_chances += len(candidates)
        return candidates

    def learn(self, candidates: Sequence[MeasureCandidate], results: Sequence[RunnerResult]) -> None:
        """Takes the results of what was proposed."""
        self._note(self._context, candidates, results)
        failed = [c for c, result in zip(candidates, results, strict=True) if result.run_secs is None]
        self._failed = [*self._failed, *failed][:_MAX_SECOND_CHANCES]
        self._num_learned += len(candidates) - len(failed)
        self._measured(candidates, results)

    def remember(self, records: Sequence[RecordText]) -> None:
        """Takes what was measured on such a device: none of it is proposed again, and the cost model learns from it."""
        applying, candidates, results = replay_all(records, self._task.mod, self._context)
        self._note(self._context, candidates, results)
        self._num_learned += len(candidates)
        self._recalled(applying, candidates)

    def transfer(self, records: Sequence[RecordText], device: str) -> None:
        """Lets the cost model learn what was fast on a similar device, and what was slow.

        Args:
            records: What was measured there.
            device: Tells it from other devices: times are compared only with those of the same one.
        """
        mod = self._task.mod.with_attr("ansor.device", device)  # the cost model groups times by the module
        context = context_of(self._task, self._target, mod=mod, num_threads=self._num_threads)
        _, candidates, results = replay_all(records, self._task.mod, context)
        self._note(context, candidates, results)
        self._num_learned += len(candidates)

    def close(self) -> None:
        """Frees the state of the search."""
        self._lessons = []

    @cached_property
    def _context(self) -> TuneContext:
        """Describes the task to the cost model."""
        return context_of(self._task, self._target, num_threads=self._num_threads)

    @abstractmethod
    def _new_programs(self, limit: int) -> list[MeasureCandidate]:
        """At most `limit` programs that were not proposed yet."""

    @abstractmethod
    def _measured(self, candidates: Sequence[MeasureCandidate], results: Sequence[RunnerResult]) -> None:
        """Moves the search on."""

    @abstractmethod
    def _recalled(self, records: Sequence[RecordText], candidates: Sequence[MeasureCandidate]) -> None:
        """Takes note of records and their candidates, of which none is to be proposed."""

    def _note(
        self, context: TuneContext, candidates: Sequence[MeasureCandidate], results: Sequence[RunnerResult]
    ) -> None:
        """Keeps what the cost model is to be taught, if there is one."""
        if self._cost_model is not None and candidates:
            self._lessons.append((context, list(candidates), list(results)))

    def _teach(self) -> None:
        """Teaches the cost model what it does not know yet."""
        while self._cost_model is not None and self._lessons:
            self._cost_model.update(*self._lessons.pop(0))
