"""The search of one task: MetaSchedule's sketches, evolution and cost model, driven round by round."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ansor_mlflow.lowering import TuningTask
from ansor_mlflow.records import RecordLog, RecordText
from ansor_mlflow.tuning.search.candidates import memory_database
from ansor_mlflow.tuning.search.program_search import SpaceSearch, is_untrained
from ansor_mlflow.tuning.search.space import context_of, design_spaces

if TYPE_CHECKING:
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
_MAX_EMPTY_EVOLUTIONS = 5
"""Evolutions without a new program after which a search space counts as exhausted."""
_MAX_KNOWN_PROGRAMS = 64
"""Random programs, all of them known, after which a search space counts as exhausted."""
_UNLIMITED = 2**30
"""Trials that MetaSchedule is told to expect: the budget is kept by our own loop."""


class TaskSearch(SpaceSearch):
    """Proposes programs of MetaSchedule's space.

    Evolution needs a cost model that can tell good from bad, and programs to start from. In a task's first round, and
    while the model has too few samples, candidates are random programs of the same space, which cost a tenth of the
    time.

    Args:
        strategy: "evolutionary" or "random".
        num_trials_per_round: Candidates of one proposal.
        log: Where the search finds measured schedules to start from.
        cost_model: Ranks candidates.
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
        """See `SpaceSearch`."""
        self._seed += 104729 * len(records)  # or the same random programs would come first
        self._draw = random.Random(self._seed)
        super().remember(records)

    def close(self) -> None:
        """See `SpaceSearch`."""
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
        """At most `limit` programs that are not measured yet."""
        limit = min(limit, self._num_trials_per_round)
        has_experience = bool(self._known or self._num_learned)
        is_random = self._strategy == "random" or not has_experience or is_untrained(self._ranking)
        for _ in range(_MAX_KNOWN_PROGRAMS // self._num_trials_per_round + 1 if is_random else _MAX_EMPTY_EVOLUTIONS):
            candidates = self._context.generate_measure_candidates() if is_random else self._evolve()
            if new := self._new_ones(candidates or ()):
                chosen = new[:limit] if is_random else _choose(new, limit)
                self._known.update(name for name, _ in chosen)
                return [candidate for _, candidate in chosen]
        return []

    def _new_ones(self, candidates: Sequence[MeasureCandidate]) -> list[tuple[str, MeasureCandidate]]:
        """The candidates that are neither measured nor twice among these, by their hashes."""
        from tvm.s_tir.meta_schedule.utils import shash2hex

        by_hash: dict[str, MeasureCandidate] = {}
        for candidate in candidates:
            by_hash.setdefault(shash2hex(candidate.sch.mod), candidate)
        return [item for item in by_hash.items() if item[0] not in self._known]

    @cached_property
    def _context(self) -> TuneContext:
        """The search by random programs, which also makes the design space."""
        from tvm.s_tir.meta_schedule.search_strategy import ReplayTrace

        return self._begin(ReplayTrace(), self._seed, self._num_trials_per_round)

    def _evolve(self) -> Sequence[MeasureCandidate]:
        """All programs of a new evolution, best guess first and some random ones at the end.

        MetaSchedule keeps every program of an evolution in memory, so that it proposes none twice. Hashes are enough.
        """
        from tvm.s_tir.meta_schedule.search_strategy import EvolutionarySearch

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
            self._design_spaces = design_spaces(context, self._task)
        context.pre_tuning(
            max_trials=_UNLIMITED,
            num_trials_per_iter=num_candidates,
            design_spaces=self._design_spaces,
            database=memory_database(self._task.mod, self._log.best(self._task.info.workload_hash)),
            cost_model=self._ranking,
        )
        return context


def _choose(programs: Sequence[tuple[str, MeasureCandidate]], limit: int) -> list[tuple[str, MeasureCandidate]]:
    """The first programs of an evolution and some of the last, which are random."""
    num_random = min(int(limit * _RANDOM_SHARE), max(0, len(programs) - limit))
    return [*programs[: limit - num_random], *programs[len(programs) - num_random :]]
