"""The search of one task: MetaSchedule's sketches, evolution and cost model, driven round by round."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ansor_mlflow.device import is_gpu
from ansor_mlflow.errors import MachineError, first_line
from ansor_mlflow.lowering import TuningTask
from ansor_mlflow.records import RecordLog, RecordText
from ansor_mlflow.sketches import gpu_program
from ansor_mlflow.tuning.search.candidates import memory_database, replay, replay_all
from ansor_mlflow.tuning.search.space import make_space_generator

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.s_tir import Schedule
    from tvm.s_tir.meta_schedule import TuneContext
    from tvm.s_tir.meta_schedule.cost_model import CostModel
    from tvm.s_tir.meta_schedule.runner import RunnerResult
    from tvm.s_tir.meta_schedule.search_strategy import MeasureCandidate, SearchStrategy
    from tvm.target import Target

_POPULATION_PER_TRIAL = 3
_MIN_POPULATION = 32
_GENERATIONS = 2
"""Settings of MetaSchedule's evolutionary search, by measurement: see docs/performance.md.

With rounds of 32 trials, evolution begins with 96 programs and breeds 2 generations. MetaSchedule's defaults are 512
and 4, nine times as many programs.
"""
_MIN_RANDOM = 16
"""Random programs without which MetaSchedule begins no evolution."""
_RANDOM_SHARE = 0.05
"""Share of a proposal that are random programs, which evolution did not choose. MetaSchedule's default, too."""
_NUM_WARMUP_SAMPLES = 48
"""Measurements before the cost model is trusted; until then rounds are random. MetaSchedule's default is 100."""
_MAX_EMPTY_EVOLUTIONS = 5
"""Evolutions without a new program after which a search space counts as exhausted."""
_MAX_KNOWN_PROGRAMS = 64
"""Random programs, all of them known, after which a search space counts as exhausted."""
_MAX_SECOND_CHANCES = 4
"""Programs of a task that are tried again after they failed."""
_log = logging.getLogger("ansor_mlflow")
_UNLIMITED = 2**30
"""Trials that MetaSchedule is told to expect: the budget is kept by our own loop."""


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


class TaskSearch:
    """Proposes candidates for one task and learns from their measurement.

    Evolution needs a cost model that can tell good from bad, and programs to start from. In a task's first round, and
    while the model has too few samples, candidates are random programs of the same space, which cost a tenth of the
    time.

    Args:
        task: What is tuned.
        target: Device that is tuned for.
        strategy: "evolutionary" or "random".
        num_trials_per_round: Candidates of one proposal.
        num_threads: Threads of the search; with one, a seed gives the same candidates again.
        seed: Seed of the search.
        log: Where the search finds measured schedules to start from.
        cost_model: Ranks candidates and is trained by `learn`.
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
        self._task = task
        self._target = target
        self._num_threads = num_threads
        self._seed = seed
        self._strategy = strategy
        self._cost_model = cost_model
        self._num_trials_per_round = num_trials_per_round
        self._log = log
        self._design_spaces: list[Schedule] | None = None
        self._random: TuneContext | None = None
        self._draw = random.Random(seed)
        self._measured: set[str] = set()
        self._failed: list[MeasureCandidate] = []
        self._num_second_chances = 0
        self._has_experience = False

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
        """Trains the cost model and moves the search on."""
        context = self._random_search()
        if self._strategy == "evolutionary":
            self._cost_model.update(context, list(candidates), list(results))
        context.notify_runner_results(list(candidates), list(results))
        failed = [c for c, result in zip(candidates, results, strict=True) if result.run_secs is None]
        self._failed = [*self._failed, *failed][:_MAX_SECOND_CHANCES]

    def remember(self, records: Sequence[RecordText]) -> None:
        """Takes what was measured on such a device: none of it is proposed again, and the cost model learns from it."""
        from tvm.s_tir.meta_schedule.utils import shash2hex

        self._seed += 104729 * len(records)  # or the same random programs would come first
        self._draw = random.Random(self._seed)
        candidates = self._learn_from(records, self._random_search())
        self._measured.update(shash2hex(candidate.sch.mod) for candidate in candidates)

    def transfer(self, records: Sequence[RecordText], device: str) -> None:
        """Lets the cost model learn what was fast on a similar device, and what was slow.

        Args:
            records: What was measured there.
            device: Tells it from other devices: times are compared only with those of the same one.
        """
        mod = self._task.mod.with_attr("ansor.device", device)  # the cost model groups times by the module
        self._learn_from(records, context_of(self._task, self._target, mod=mod, num_threads=self._num_threads))
        self._has_experience = True

    def _learn_from(self, records: Sequence[RecordText], context: TuneContext) -> list[MeasureCandidate]:
        """Trains the cost model with records; returns the candidates of those that apply."""
        _, candidates, results = replay_all(records, self._task.mod, context)
        if candidates and self._strategy == "evolutionary":
            self._cost_model.update(context, candidates, results)
        return candidates

    def close(self) -> None:
        """Frees the state of the search."""
        if self._random is not None:
            self._random.post_tuning()

    def _new_programs(self, limit: int) -> list[MeasureCandidate]:
        """At most `limit` programs that are not measured yet."""
        limit = min(limit, self._num_trials_per_round)
        has_experience = self._has_experience or bool(self._measured)
        is_random = self._strategy == "random" or not has_experience or is_untrained(self._cost_model)
        for _ in range(_MAX_KNOWN_PROGRAMS // self._num_trials_per_round + 1 if is_random else _MAX_EMPTY_EVOLUTIONS):
            candidates = self._random_search().generate_measure_candidates() if is_random else self._evolve()
            if new := self._new_ones(candidates or ()):
                chosen = new[:limit] if is_random else _choose(new, limit)
                self._measured.update(name for name, _ in chosen)
                return [candidate for _, candidate in chosen]
        return []

    def _new_ones(self, candidates: Sequence[MeasureCandidate]) -> list[tuple[str, MeasureCandidate]]:
        """The candidates that are neither measured nor twice among these, by their hashes."""
        from tvm.s_tir.meta_schedule.utils import shash2hex

        by_hash: dict[str, MeasureCandidate] = {}
        for candidate in candidates:
            by_hash.setdefault(shash2hex(candidate.sch.mod), candidate)
        return [item for item in by_hash.items() if item[0] not in self._measured]

    def _random_search(self) -> TuneContext:
        """The search by random programs, which also makes the design space."""
        if self._random is None:
            from tvm.s_tir.meta_schedule.search_strategy import ReplayTrace

            self._random = self._begin(ReplayTrace(), self._seed, self._num_trials_per_round)
        return self._random

    def _evolve(self) -> Sequence[MeasureCandidate]:
        """All programs of a new evolution, best guess first and some random ones at the end.

        MetaSchedule keeps every program of an evolution in memory, so that it proposes none twice. Hashes are enough.
        """
        from tvm.s_tir.meta_schedule.search_strategy import EvolutionarySearch

        self._random_search()
        population = max(_MIN_POPULATION, _POPULATION_PER_TRIAL * self._num_trials_per_round)
        evolution = EvolutionarySearch(
            population_size=population, init_min_unmeasured=_MIN_RANDOM, genetic_num_iters=_GENERATIONS
        )
        context = self._begin(evolution, self._draw.randrange(1, 2**31 - 1), population * (_GENERATIONS + 1))
        candidates = context.generate_measure_candidates()
        context.post_tuning()
        return list(candidates or ())

    def _begin(self, strategy: SearchStrategy, seed: int, num_candidates: int) -> TuneContext:
        """Starts a search; all searches of a task share the design space."""
        context = context_of(
            self._task, self._target, num_threads=self._num_threads, search_strategy=strategy, rand_state=seed
        )
        if self._design_spaces is None:
            self._design_spaces = _design_spaces(context, self._task)
        context.pre_tuning(
            max_trials=_UNLIMITED,
            num_trials_per_iter=num_candidates,
            design_spaces=self._design_spaces,
            database=memory_database(self._task.mod, self._log.best(self._task.info.workload_hash)),
            cost_model=self._cost_model,
        )
        return context


def applies(record: RecordText, task: TuningTask, target: Target) -> bool:
    """Whether a record's schedule is one of the task on the target."""
    return candidate_of(record, task, target) is not None


def candidate_of(record: RecordText, task: TuningTask, target: Target) -> MeasureCandidate | None:
    """The program that a record was made of; None where its schedule is none of the task on the target."""
    return replay(record, task.mod, context_of(task, target))


def context_of(task: TuningTask, target: Target, *, mod: IRModule | None = None, **search: Any) -> TuneContext:
    """What MetaSchedule's parts know of a task; `mod` in place of its module, and whatever else a search needs."""
    from tvm.s_tir.meta_schedule import TuneContext

    return TuneContext(
        mod=mod or task.mod,
        target=target,
        space_generator=make_space_generator(task.mod, target),
        task_name=task.info.name,
        logger=_silent_logger(),
        **search,
    )


def _design_spaces(context: TuneContext, task: TuningTask) -> list[Schedule]:
    """The spaces of a task; where TVM has no rules for it, the function alone, or, for a GPU, the program of DLight."""
    from tvm.s_tir import Schedule

    try:
        return list(context.generate_design_space())
    except RuntimeError as err:
        program = gpu_program(task.mod["main"], context.target) if is_gpu(context.target) else None
        instead = "it is measured as it is" if program is None else "DLight's is measured"
        _log.warning("%s: TVM's rules make no program of it (%s); %s", task.info.name, first_line(err), instead)
        return [program or Schedule(task.mod)]


def _choose(programs: Sequence[tuple[str, MeasureCandidate]], limit: int) -> list[tuple[str, MeasureCandidate]]:
    """The first programs of an evolution and some of the last, which are random."""
    num_random = min(int(limit * _RANDOM_SHARE), max(0, len(programs) - limit))
    return [*programs[: limit - num_random], *programs[len(programs) - num_random :]]


def _silent_logger() -> Any:
    """MetaSchedule logs every step of a search; what matters of it reaches our observers."""
    import logging

    logger = logging.getLogger("ansor_mlflow.metaschedule")
    logger.setLevel(logging.ERROR)
    return logger
