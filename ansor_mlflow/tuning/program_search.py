"""The search of one task: what all spaces have in common, and MetaSchedule's space, driven round by round."""

from __future__ import annotations

import gc
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ansor_mlflow.device import platform_of, return_freed_memory
from ansor_mlflow.errors import MachineError
from ansor_mlflow.lowering import TuningTask
from ansor_mlflow.records import RecordLog, RecordText
from ansor_mlflow.sketches import gpu_program
from ansor_mlflow.tuning.candidates import context_of, design_spaces, memory_database, replay_all

if TYPE_CHECKING:
    from tvm.s_tir import Schedule
    from tvm.s_tir.meta_schedule import TuneContext
    from tvm.s_tir.meta_schedule.cost_model import CostModel
    from tvm.s_tir.meta_schedule.runner import RunnerResult
    from tvm.s_tir.meta_schedule.search_strategy import MeasureCandidate, SearchStrategy
    from tvm.target import Target

_NUM_WARMUP_SAMPLES = 48
"""Measurements before the cost model is trusted; until then rounds are random. MetaSchedule's default is 100."""
_MAX_SECOND_CHANCES = 4
"""Programs of a task that are tried again after they failed."""
_POPULATION_PER_TRIAL = 3
_MIN_POPULATION = 32
_GENERATIONS = 2
"""Settings of MetaSchedule's evolutionary search, by measurement: see benchmarks/history.txt.

With rounds of 32 trials, evolution begins with 96 programs and breeds 2 generations. MetaSchedule's defaults are 512
and 4, nine times as many programs.
"""
_MIN_RANDOM = 16
"""Random programs without which MetaSchedule begins no evolution."""
_RANDOM_SHARE = 0.05
"""Share of a proposal that are random programs, which evolution did not choose. MetaSchedule's default, too."""
_MAX_EMPTY_EVOLUTIONS = 5
"""Evolutions without a new program after which a search space counts as exhausted."""
_MAX_KNOWN_PROGRAMS = 64
"""Random programs, all of them known, after which a search space counts as exhausted."""
_UNLIMITED = 2**30
"""Trials that MetaSchedule is told to expect: the budget is kept by our own loop."""


def make_cost_model(kind: str, num_threads: int, seed: int) -> CostModel:
    """The cost model of that name; for "none", too, a random one, since evolution needs some order."""
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

    With one thread, a seed gives the same candidates again. The cost model is None where nothing asks it.
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
        """At most `limit` new programs, best guess first; none when the space is exhausted."""
        candidates = self._new_programs(limit)
        if not candidates:
            # a worker may have died of something else, and a small space has nothing else to offer
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
        """Lets the cost model learn what was fast on a similar device; times of one device are compared."""
        mod = self._task.mod.with_attr("ansor.device", device)  # the cost model groups times by the module
        context = context_of(self._task, self._target, mod=mod, num_threads=self._num_threads)
        _, candidates, results = replay_all(records, self._task.mod, context)
        self._note(context, candidates, results)
        self._num_learned += len(candidates)

    def close(self) -> None:
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


class TaskSearch(SpaceSearch):
    """Proposes programs of MetaSchedule's space, evolved or random.

    Evolution needs a cost model that can tell good from bad, and programs to start from. In a task's first round, and
    while the model has too few samples, candidates are random programs of the same space, which cost a tenth of the
    time.
    """

    def __init__(
        self,
        task: TuningTask,
        *,
        target: Target,
        strategy: str,
        num_trials_per_round: int,
        num_threads: int,
        seed: int,
        log: RecordLog,
        cost_model: CostModel,
    ) -> None:
        super().__init__(task, target, num_threads, seed, cost_model if strategy == "evolutionary" else None)
        self._strategy = strategy
        self._ranking = cost_model
        self._num_trials_per_round = num_trials_per_round
        self._log = log
        self._design_spaces: list[Schedule] | None = None
        self._draw = random.Random(seed)
        self._known: set[str] = set()
        """Hashes of the programs that were proposed, or are in records."""

    def remember(self, records: Sequence[RecordText]) -> None:
        self._seed += 104729 * len(records)  # or the same random programs would come first
        self._draw = random.Random(self._seed)
        super().remember(records)

    def close(self) -> None:
        super().close()
        if "_context" in vars(self):
            self._context.post_tuning()

    def _measured(self, candidates: Sequence[MeasureCandidate], results: Sequence[RunnerResult]) -> None:
        self._context.notify_runner_results(list(candidates), list(results))

    def _recalled(self, _: Sequence[RecordText], candidates: Sequence[MeasureCandidate]) -> None:
        from tvm.s_tir.meta_schedule.utils import shash2hex

        self._known.update(shash2hex(candidate.sch.mod) for candidate in candidates)

    def _note(self, *lesson: Any) -> None:
        super()._note(*lesson)
        self._teach()  # at once: the evolutions of other tasks ask the same model

    def _new_programs(self, limit: int) -> list[MeasureCandidate]:
        from tvm.s_tir.meta_schedule.utils import shash2hex

        limit = min(limit, self._num_trials_per_round)
        has_experience = bool(self._known or self._num_learned)
        is_random = self._strategy == "random" or not has_experience or is_untrained(self._ranking)
        first = [] if has_experience else self._chosen_without_record()
        limit -= len(first)
        for _ in range(_MAX_KNOWN_PROGRAMS // self._num_trials_per_round + 1 if is_random else _MAX_EMPTY_EVOLUTIONS):
            by_hash: dict[str, MeasureCandidate] = {}
            for candidate in (self._context.generate_measure_candidates() if is_random else self._evolve()) or ():
                by_hash.setdefault(shash2hex(candidate.sch.mod), candidate)
            if new := [item for item in by_hash.items() if item[0] not in self._known]:
                # the last programs of an evolution are random, and some of these are to be among the chosen ones
                num_random = 0 if is_random else min(int(limit * _RANDOM_SHARE), max(0, len(new) - limit))
                chosen = [*new[: limit - num_random], *new[len(new) - num_random :]]
                self._known.update(name for name, _ in chosen)
                return [*first, *(candidate for _, candidate in chosen)]
        return first

    def _chosen_without_record(self) -> list[MeasureCandidate]:
        """The program that a GPU runs where there is no record: the best one must not be slower."""
        from tvm.s_tir.meta_schedule.arg_info import ArgInfo
        from tvm.s_tir.meta_schedule.search_strategy import MeasureCandidate
        from tvm.s_tir.meta_schedule.utils import shash2hex

        if not platform_of(self._target).binds_threads:
            return []
        program = gpu_program(self._task.mod["main"], self._target)
        if program is None:
            return []
        self._known.add(shash2hex(program.mod))
        return [MeasureCandidate(program, ArgInfo.from_entry_func(self._task.mod, remove_preproc=True))]

    @cached_property
    def _context(self) -> TuneContext:
        """The search by random programs, which also makes the design space."""
        from tvm.s_tir.meta_schedule.search_strategy import ReplayTrace

        return self._begin(ReplayTrace(), self._seed, self._num_trials_per_round)

    def _evolve(self) -> Sequence[MeasureCandidate] | None:
        """All programs of a new evolution, best guess first and some random ones at the end.

        MetaSchedule keeps every program of an evolution in memory, so that it proposes none twice. Hashes are enough.
        """
        from tvm.s_tir.meta_schedule.search_strategy import EvolutionarySearch

        population = max(_MIN_POPULATION, _POPULATION_PER_TRIAL * self._num_trials_per_round)
        evolution = EvolutionarySearch(
            population_size=population, init_min_unmeasured=_MIN_RANDOM, genetic_num_iters=_GENERATIONS
        )
        context = self._begin(evolution, self._draw.randrange(1, 2**31 - 1), population * (_GENERATIONS + 1))
        candidates: Sequence[MeasureCandidate] | None = context.generate_measure_candidates()
        context.post_tuning()
        return candidates

    def _begin(self, strategy: SearchStrategy, seed: int, num_candidates: int) -> TuneContext:
        """Starts a search; all searches of a task share the design space."""
        context = context_of(
            self._task, self._target, num_threads=self._num_threads, search_strategy=strategy, rand_state=seed
        )
        if self._design_spaces is None:
            self._design_spaces = design_spaces(context, self._task)
        context.pre_tuning(
            max_trials=_UNLIMITED,
            num_trials_per_iter=num_candidates,
            design_spaces=self._design_spaces,
            database=memory_database(self._task.mod, self._log.best(self._task.info.workload_hash)),
            cost_model=self._ranking,
        )
        return context
