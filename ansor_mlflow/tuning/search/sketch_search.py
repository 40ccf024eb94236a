"""The search of a task among the programs of our own sketches."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING

from ansor_mlflow.lowering import TuningTask
from ansor_mlflow.records import FAILED_RUN_S, RecordText
from ansor_mlflow.sketches import Programs, Tile
from ansor_mlflow.tuning.search.candidates import replay_all

if TYPE_CHECKING:
    from tvm.s_tir.meta_schedule import TuneContext
    from tvm.s_tir.meta_schedule.cost_model import CostModel
    from tvm.s_tir.meta_schedule.runner import RunnerResult
    from tvm.s_tir.meta_schedule.search_strategy import MeasureCandidate

MIN_LEARNED = 8
"""Measurements of a task after which the cost model orders its programs."""
_MAX_UNTAUGHT = 4
"""Programs of a proposal without the cost model: the sketch's order is good, and what was measured makes it better."""
_RANKED_PER_TRIAL = 3
"""Programs that the cost model chooses a trial from."""
_MAX_SECOND_CHANCES = 4
"""Programs that are tried again after they failed."""


class SketchSearch:
    """Proposes the programs of a sketch, and learns from their measurement.

    First come those that the sketch's own estimate puts first, of each kind one. Then half of a round's programs are of
    the kinds that were fastest, half of new ones, and a cost model that has learned enough chooses among them.

    Args:
        task: What is tuned.
        programs: Its programs.
        context: Describes the task to the cost model.
        cost_model: Ranks candidates, and is taught before that; None for programs in random order.
        is_trained: Whether the cost model has enough samples of all tasks.
        seed: Seed of the random order.
    """

    def __init__(
        self,
        task: TuningTask,
        programs: Programs,
        context: TuneContext,
        cost_model: CostModel | None,
        is_trained: Callable[[], bool],
        seed: int,
    ) -> None:
        self._task = task
        self._programs = programs
        self._context = context
        self._cost_model = cost_model
        self._is_trained = is_trained
        self._waiting = list(programs.tiles)
        if cost_model is None:
            random.Random(seed).shuffle(self._waiting)
        self._tiles: dict[str, Tile] = {}
        """Of what was proposed, by the hash of the program."""
        self._seconds: dict[Tile, float] = {}
        self._num_learned = 0
        self._lessons: list[tuple[TuneContext, list[MeasureCandidate], list[RunnerResult]]] = []
        """What the cost model was not taught yet: a training takes as long as a few trials."""
        self._failed: list[MeasureCandidate] = []
        self._num_second_chances = 0

    def propose(self, limit: int) -> list[MeasureCandidate]:
        """At most `limit` new programs, best guess first; none when all were measured.

        At the end a few programs that failed are tried again: a worker may have died of something else.
        """
        model = self._taught_model()
        if model is None:
            limit = min(limit, _MAX_UNTAUGHT)
        found = self._new_programs(limit * _RANKED_PER_TRIAL if model else limit)
        if model and found:
            scores = model.predict(self._context, [candidate for _, _, candidate in found])
            order = sorted(range(len(found)), key=lambda place: -float(scores[place]))
            found = [found[place] for place in order[:limit]]
        for tile, name, _ in found:
            self._waiting.remove(tile)
            self._tiles[name] = tile
        if found:
            return [candidate for _, _, candidate in found]
        limit = min(limit, _MAX_SECOND_CHANCES - self._num_second_chances)
        again, self._failed = self._failed[:limit], self._failed[limit:]
        self._num_second_chances += len(again)
        return again

    def learn(self, candidates: Sequence[MeasureCandidate], results: Sequence[RunnerResult]) -> None:
        """Takes note of what was fast."""
        from tvm.s_tir.meta_schedule.utils import shash2hex

        self._note(self._context, candidates, results)
        for candidate, result in zip(candidates, results, strict=True):
            if result.run_secs is None:
                self._failed = [*self._failed, candidate][:_MAX_SECOND_CHANCES]
                continue
            self._num_learned += 1
            if (tile := self._tiles.get(shash2hex(candidate.sch.mod))) is not None:
                self._seconds[tile] = median(map(float, result.run_secs))

    def remember(self, records: Sequence[RecordText]) -> None:
        """Takes what was measured on such a device: none of it is proposed again, and the cost model learns from it."""
        applying, candidates, results = replay_all(records, self._task.mod, self._context)
        self._note(self._context, candidates, results)
        self._num_learned += len(candidates)
        for record, candidate in zip(applying, candidates, strict=True):
            tile = self._programs.tile_of(candidate.sch)
            if tile in self._waiting:
                self._waiting.remove(tile)
                if record.run_s < FAILED_RUN_S:
                    self._seconds[tile] = record.run_s

    def transfer(self, records: Sequence[RecordText], device: str) -> None:
        """Lets the cost model learn what was fast on a similar device, and what was slow.

        Args:
            records: What was measured there.
            device: Tells it from other devices: times are compared only with those of the same one.
        """
        from tvm.s_tir.meta_schedule import TuneContext

        mod = self._task.mod.with_attr("ansor.device", device)  # the cost model groups times by the module
        context = TuneContext(mod=mod, target=self._context.target, space_generator=self._context.space_generator)
        _, candidates, results = replay_all(records, self._task.mod, context)
        self._note(context, candidates, results)
        self._num_learned += len(candidates)

    def close(self) -> None:
        """There is nothing to free."""

    def _note(
        self, context: TuneContext, candidates: Sequence[MeasureCandidate], results: Sequence[RunnerResult]
    ) -> None:
        """Keeps what the cost model is to be taught, if there is one."""
        if self._cost_model is not None and candidates:
            self._lessons.append((context, list(candidates), list(results)))

    def _taught_model(self) -> CostModel | None:
        """The cost model, with all that was measured; None before it has learned enough."""
        if self._cost_model is None or self._num_learned < MIN_LEARNED:
            return None
        for context, candidates, results in self._lessons:
            self._cost_model.update(context, candidates, results)
        self._lessons = []
        return self._cost_model if self._is_trained() else None

    def _new_programs(self, limit: int) -> list[tuple[Tile, str, MeasureCandidate]]:
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
        fresh, tried = list(new.values()), iter(known)
        for tile in fresh:
            yield tile
            yield from (other for other in [next(tried, None)] if other is not None)
        yield from tried
        yield from others
