"""A sketch for one operator: a rectifier over a whole tensor, in vectors, by all threads."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from ansor_mlflow.sketches import Machine


@dataclass(frozen=True)
class ReluTile:
    """The decisions of a program; their text stands in each record."""

    elements: int
    """Elements in a vector operation."""


def _lanes(machine: Machine) -> int:
    return machine.vector_bytes // 4


class ReluSketch:
    """The programs of a function with a rectifier alone."""

    name = "relu"

    def __init__(self, mod: Any, block: str, extents: list[int], machine: Machine) -> None:
        self._mod, self._block, self._extents, self._machine = mod, block, extents, machine

    @classmethod
    def find(cls, mod: Any, machine: Machine) -> ReluSketch | None:
        """The sketch for a task's function; None where it is something else."""
        from tvm.s_tir import Schedule
        from tvm.tirx import FloatImm, Max

        sch = Schedule(mod)
        first, *others = sch.get_child_blocks(sch.get_sblock("root"))
        value = getattr(sch.get(first).body, "value", None)  # what the block stores
        if others or not isinstance(value, Max) or not isinstance(value.b, FloatImm) or value.b.value != 0:
            return None
        extents = [int(sch.get(loop).extent) for loop in sch.get_loops(first)]
        return cls(mod, sch.get(first).name_hint, extents, machine) if prod(extents) % _lanes(machine) == 0 else None

    def tiles(self) -> list[ReluTile]:
        """Vectors of one to four registers, the one that is taken without a trial first."""
        sizes = [_lanes(self._machine) * number for number in (2, 1, 4)]
        return [ReluTile(size) for size in sizes if prod(self._extents) % size == 0]

    def kind(self, tile: ReluTile) -> object:
        """What matters most for the speed: of these programs nothing but the tile itself."""
        return tile

    def cycles(self, tile: ReluTile) -> float:
        """Estimated cycles of a call: memory decides, so the programs are about as fast."""
        return prod(self._extents) / _lanes(self._machine) + tile.elements

    def is_fast(self, tile: ReluTile) -> bool:
        """Whether no other space needs to be searched: whole registers move as fast as memory does."""
        return tile.elements >= _lanes(self._machine)

    def schedule(self, tile: ReluTile) -> Any:
        """The program of a decision."""
        from tvm.s_tir import Schedule

        sch = Schedule(self._mod)
        fused = sch.fuse(*sch.get_loops(sch.get_sblock(self._block)))
        outer, inner = sch.split(fused, [None, tile.elements])
        sch.parallel(outer)
        sch.vectorize(inner)
        return sch
