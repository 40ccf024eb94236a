"""Which search a task gets: among the programs of our sketches, in MetaSchedule's space, or in both."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from ansor_mlflow.lowering import TuningTask
from ansor_mlflow.parameters import TuneOptions
from ansor_mlflow.records import RecordLog, RecordText
from ansor_mlflow.sketches import find_programs
from ansor_mlflow.tuning.search.program_search import SpaceSearch
from ansor_mlflow.tuning.search.sketch_search import SketchSearch
from ansor_mlflow.tuning.search.task_search import TaskSearch

if TYPE_CHECKING:
    from tvm.s_tir.meta_schedule.cost_model import CostModel
    from tvm.s_tir.meta_schedule.runner import RunnerResult
    from tvm.s_tir.meta_schedule.search_strategy import MeasureCandidate
    from tvm.target import Target


class SearchInBoth:
    """Proposes programs of both spaces in each round, of the first one no more than half."""

    def __init__(self, first: SpaceSearch, second: SpaceSearch) -> None:
        self._searches = (first, second)
        self._from_first: set[int] = set()

    def propose(self, limit: int) -> list[MeasureCandidate]:
        """See `SpaceSearch`."""
        first, second = self._searches
        mine = first.propose(-(-limit // 2))
        others = second.propose(limit - len(mine)) if len(mine) < limit else []
        if len(mine) + len(others) < limit:
            mine = [*mine, *first.propose(limit - len(mine) - len(others))]
        self._from_first = {id(candidate) for candidate in mine}
        return [*mine, *others]

    def learn(self, candidates: Sequence[MeasureCandidate], results: Sequence[RunnerResult]) -> None:
        """See `SpaceSearch`."""
        pairs = list(zip(candidates, results, strict=True))
        for search, is_first in zip(self._searches, (True, False), strict=True):
            own = [pair for pair in pairs if (id(pair[0]) in self._from_first) is is_first]
            if own:
                search.learn([candidate for candidate, _ in own], [result for _, result in own])

    def remember(self, records: Sequence[RecordText]) -> None:
        """See `SpaceSearch`."""
        for search in self._searches:
            search.remember(records)

    def transfer(self, records: Sequence[RecordText], device: str) -> None:
        """See `SpaceSearch`."""
        for search in self._searches:
            search.transfer(records, device)

    def close(self) -> None:
        """See `SpaceSearch`."""
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
    options: TuneOptions,
    num_threads: int,
    seed: int,
    log: RecordLog,
    cost_model: CostModel,
) -> ProgramSearch:
    """The search of a task in the space that the options name.

    With "sketches" it is in MetaSchedule's where no sketch fits, and in both where the sketch's programs are not fast.
    """
    programs = None if options.space == "metaschedule" else find_programs(task.mod, target)
    taught = cost_model if options.strategy == "evolutionary" else None
    in_sketches = programs and SketchSearch(task, target, num_threads, seed, taught, programs)
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
    if not programs or not in_sketches:
        return in_metaschedule()
    in_both = options.space == "both" or not programs.are_enough
    return SearchInBoth(in_sketches, in_metaschedule()) if in_both else in_sketches
