"""Which algorithm computes each layer: the one with the fastest record, as far as the library may grow."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from ansor_mlflow.lowering.network import LoweredNetwork, TuningTask
from ansor_mlflow.sketches import find_programs

if TYPE_CHECKING:
    from tvm.s_tir.meta_schedule.database import Database
    from tvm.target import Target

_CYCLES_PER_S = 3e9
"""Cycles of a CPU in a second, about: estimates without records are weighed against each other and recorded times."""


@dataclass(frozen=True)
class ChosenAlgorithm:
    """An algorithm for a layer."""

    task: TuningTask
    seconds: float
    """Latency of a call: the median of the fastest record, else what the sketch estimates."""
    is_recorded: bool

    @property
    def growth_bytes(self) -> int:
        """Bytes by which the weights of all calls are larger than by the direct algorithm."""
        return 0 if self.task.algorithm is None else self.task.info.weight * self.task.algorithm.growth_bytes


def choose_algorithms(
    lowered: LoweredNetwork, database: Database, target: Target, max_bytes: int | None = None
) -> list[ChosenAlgorithm]:
    """One algorithm for each layer. One without a record is taken only where no other has one.

    Where all constants together are larger than `max_bytes`, the layers that lose the least time for each byte are
    computed in algorithms with smaller weights.
    """
    layers: dict[str, list[TuningTask]] = {}
    for task in lowered.tasks:
        layers.setdefault(task.info.layer_hash, []).append(task)
    ranked = [_ranked(algorithms, database, target) for algorithms in layers.values()]
    if max_bytes is not None:
        spare = max_bytes - lowered.constant_bytes
        while sum(algorithms[0].growth_bytes for algorithms in ranked) > max(0, spare) and (
            steps := list(_steps(ranked))
        ):
            _, layer, number = min(steps)
            ranked[layer] = ranked[layer][number:]
    return [algorithms[0] for algorithms in ranked]


def _ranked(algorithms: Sequence[TuningTask], database: Database, target: Target) -> list[ChosenAlgorithm]:
    """The algorithms of a layer, the fastest first; those without a record only where no other has one."""
    found = []
    for task in algorithms:
        record = database.query_tuning_record(task.mod, target, task.info.name)
        if record is not None:
            found.append(ChosenAlgorithm(task, median(map(float, record.run_secs)), is_recorded=True))
    if not found and len(algorithms) == 1:
        return [ChosenAlgorithm(algorithms[0], 0.0, is_recorded=False)]
    if not found:
        found = [ChosenAlgorithm(task, _estimated_s(task, target), is_recorded=False) for task in algorithms]
    return sorted(found, key=lambda algorithm: algorithm.seconds)


def _estimated_s(task: TuningTask, target: Target) -> float:
    programs = find_programs(task.mod, target)
    return programs.estimated_cycles / _CYCLES_PER_S if programs else math.inf


def _steps(ranked: Sequence[Sequence[ChosenAlgorithm]]) -> Iterator[tuple[float, int, int]]:
    """Yields what may be done to make weights smaller: the seconds lost for each byte, the layer, and the algorithm."""
    for layer, (first, *others) in enumerate(ranked):
        for number, other in enumerate(others, start=1):
            if (saved := first.growth_bytes - other.growth_bytes) > 0:
                yield (other.seconds - first.seconds) * first.task.info.weight / saved, layer, number
