"""The search of a task among the programs of our sketches, and in which space a task is searched."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

from ansor_mlflow.lowering import TuningTask
from ansor_mlflow.parameters import SearchOptions
from ansor_mlflow.records import FAILED_RUN_S, RecordLog, RecordText
from ansor_mlflow.sketches import Programs, Tile, find_programs
from ansor_mlflow.tuning.program_search import SpaceSearch, TaskSearch, is_untrained

if TYPE_CHECKING:
    from tvm.s_tir.meta_schedule.cost_model import CostModel
    from tvm.s_tir.meta_schedule.runner import RunnerResult
    from tvm.s_tir.meta_schedule.search_strategy import MeasureCandidate
    from tvm.target import Target

MIN_LEARNED = 8
"""Measurements of a task after which the cost model orders its programs."""
_MAX_UNTAUGHT = 4
"""Programs of a proposal without the cost model: the sketch's order is good, and what was measured makes it better."""
_RANKED_PER_TRIAL = 3
"""Programs that the cost model chooses a trial from."""


class SketchSearch(SpaceSearch):
    """Proposes the programs of a sketch.

    First come those that the sketch's own estimate puts first, of each kind one. Then half of a round's programs are of
    the kinds that were fastest, half of new ones, and a cost model that has learned enough chooses among them. Without
    one, programs come in random order.
    """

    def __init__(
        self,
        task: TuningTask,
        target: Target,
        num_threads: int,
        seed: int,
        cost_model: CostModel | None,
        programs: Programs,
    ) -> None:
        super().__init__(task, target, num_threads, seed, cost_model)
        self._programs = programs
        self._waiting = list(programs.tiles)
        if cost_model is None:
            random.Random(seed).shuffle(self._waiting)
        self._tiles: dict[str, Tile] = {}
        """Of what was proposed, by the hash of the program."""
        self._seconds: dict[Tile, float] = {}

    def _new_programs(self, limit: int) -> list[MeasureCandidate]:
        model = None
        if self._cost_model is not None and self._num_learned >= MIN_LEARNED:
            self._teach()  # only now: a training takes as long as a few trials
            model = None if is_untrained(self._cost_model) else self._cost_model
        if model is None:
            limit = min(limit, _MAX_UNTAUGHT)
        found = self._programs_in_order(limit * _RANKED_PER_TRIAL if model else limit)
        if model and found:
            scores = model.predict(self._context, [candidate for _, _, candidate in found])
            order = sorted(range(len(found)), key=lambda place: -float(scores[place]))
            found = [found[place] for place in order[:limit]]
        for tile, name, _ in found:
            self._waiting.remove(tile)
            self._tiles[name] = tile
        return [candidate for _, _, candidate in found]

    def _measured(self, candidates: Sequence[MeasureCandidate], results: Sequence[RunnerResult]) -> None:
        from tvm.s_tir.meta_schedule.utils import shash2hex

        for candidate, result in zip(candidates, results, strict=True):
            tile = self._tiles.get(shash2hex(candidate.sch.mod))
            if tile is not None and result.run_secs is not None:
                self._seconds[tile] = median(map(float, result.run_secs))

    def _recalled(self, records: Sequence[RecordText], candidates: Sequence[MeasureCandidate]) -> None:
        for record, candidate in zip(records, candidates, strict=True):
            tile = self._programs.tile_of(candidate.sch)
            if tile in self._waiting:
                self._waiting.remove(tile)
                if record.run_s < FAILED_RUN_S:
                    self._seconds[tile] = record.run_s

    def _programs_in_order(self, limit: int) -> list[tuple[Tile, str, MeasureCandidate]]:
        """At most `limit` programs that were not proposed yet, with their decisions and hashes."""
        from tvm.s_tir.meta_schedule.arg_info import ArgInfo
        from tvm.s_tir.meta_schedule.search_strategy import MeasureCandidate
        from tvm.s_tir.meta_schedule.utils import shash2hex

        found: list[tuple[Tile, str, MeasureCandidate]] = []
        refused = []
        arguments = ArgInfo.from_prim_func(self._task.mod["main"])
        for tile in self._in_order():
            if len(found) == limit:
                break
            sch = self._programs.program(tile)
            if sch is None:
                refused.append(tile)
                continue
            found.append((tile, shash2hex(sch.mod), MeasureCandidate(sch, arguments)))
        for tile in refused:
            self._waiting.remove(tile)
        return found

    def _in_order(self) -> Iterator[Tile]:
        """What was not proposed yet: in turns of a kind that is new, and of the kinds that were fastest."""
        if self._cost_model is None:
            yield from list(self._waiting)
            return
        best: dict[object, float] = {}
        for tile, seconds in self._seconds.items():
            kind = self._programs.kind(tile)
            best[kind] = min(seconds, best.get(kind, seconds))
        new: dict[object, Tile] = {}
        known: list[Tile] = []
        others: list[Tile] = []
        for tile in self._waiting:
            kind = self._programs.kind(tile)
            if kind in best:
                known.append(tile)
            elif kind in new:
                others.append(tile)
            else:
                new[kind] = tile
        known.sort(key=lambda tile: best[self._programs.kind(tile)])
        tried = iter(known)
        for tile in list(new.values()):
            yield tile
            yield from (other for other in [next(tried, None)] if other is not None)
        yield from tried
        yield from others


class SearchInBoth:
    """Proposes programs of both spaces in each round, of the first one no more than half."""

    def __init__(self, first: SpaceSearch, second: SpaceSearch) -> None:
        self._searches = (first, second)
        self._from_first: set[int] = set()

    def propose(self, limit: int) -> list[MeasureCandidate]:
        first, second = self._searches
        mine = first.propose(-(-limit // 2))
        others = second.propose(limit - len(mine)) if len(mine) < limit else []
        if len(mine) + len(others) < limit:
            mine = [*mine, *first.propose(limit - len(mine) - len(others))]
        self._from_first = {id(candidate) for candidate in mine}
        return [*mine, *others]

    def learn(self, candidates: Sequence[MeasureCandidate], results: Sequence[RunnerResult]) -> None:
        pairs = list(zip(candidates, results, strict=True))
        for search, is_first in zip(self._searches, (True, False), strict=True):
            own = [pair for pair in pairs if (id(pair[0]) in self._from_first) is is_first]
            if own:
                search.learn([candidate for candidate, _ in own], [result for _, result in own])

    def remember(self, records: Sequence[RecordText]) -> None:
        for search in self._searches:
            search.remember(records)

    def transfer(self, records: Sequence[RecordText], device: str) -> None:
        for search in self._searches:
            search.transfer(records, device)

    def close(self) -> None:
        for search in self._searches:
            search.close()


ProgramSearch = SpaceSearch | SearchInBoth


def sketched_workloads(tasks: Sequence[TuningTask], target: Target, space: str) -> frozenset[str]:
    """Structural hashes of the tasks that are searched among the programs of a sketch, and nowhere else."""
    if space != "sketches":
        return frozenset()
    found = [(task.info.workload_hash, find_programs(task.mod, target)) for task in tasks]
    return frozenset(hash_ for hash_, programs in found if programs and programs.are_enough)


def make_search(
    task: TuningTask,
    *,
    target: Target,
    options: SearchOptions,
    num_threads: int,
    seed: int,
    log: RecordLog,
    cost_model: CostModel,
) -> ProgramSearch:
    """The search of a task in the space that the options name.

    With "sketches" it is in MetaSchedule's where no sketch fits, and in both where the sketch's programs are not fast.
    """
    in_metaschedule = partial(
        TaskSearch,
        task,
        target=target,
        strategy=options.strategy,
        num_trials_per_round=options.num_trials_per_round,
        num_threads=num_threads,
        seed=seed,
        log=log,
        cost_model=cost_model,
    )
    programs = None if options.space == "metaschedule" else find_programs(task.mod, target)
    if not programs:
        return in_metaschedule()
    taught = cost_model if options.strategy == "evolutionary" else None
    in_sketches = SketchSearch(task, target, num_threads, seed, taught, programs)
    in_both = options.space == "both" or not programs.are_enough
    return SearchInBoth(in_sketches, in_metaschedule()) if in_both else in_sketches
