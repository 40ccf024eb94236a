"""The decisions of the register tile, the axes that it divides, and what schedules do to the loops of a tile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from tvm.s_tir import Schedule
    from tvm.s_tir.schedule import LoopRV, SBlockRV

    from ansor_mlflow.sketches.contraction import Contraction

PadAt = Literal["inline", "job", "row"]
MAX_VECTORS = 6
"""Vectors of channels of a tile in registers; libraries take vectors × columns of 4 × 6, 2 × 12 or 2 × 7."""
MAX_COPIES = 16
"""Tiles of columns in a row whose last one is narrower: each of them is a copy of the program."""
MIN_PARALLEL = 16384
"""Elements from which a second thread saves more than the microseconds that it takes to start."""
MAX_JOBS_PER_THREAD = 64
"""Jobs of a thread beyond which more of them share the work no more evenly, and only cost their starts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RegisterTile:
    """The decisions of the sketch, which its records name."""

    lanes: int
    """Elements of a vector, a power of two."""
    vectors: int
    columns: int
    rows: int
    channel_tiles: int
    """Tiles of channels, one after the other, in a job."""
    row_tiles: int
    column_tiles: int
    """Tiles of columns in a job; 0 for all of them."""
    pad_at: PadAt
    channels_outside: bool
    """Whether jobs that follow each other differ in their rows, and not in their channels."""
    parallel: bool
    """Whether threads share the jobs."""


@dataclass(frozen=True)
class TiledAxes:
    """The axes of a sum that are tiled: their extents, 1 where there is none."""

    outer: int
    """Product of the extents of the axes that are not tiled."""
    rows: int
    columns: int
    channels: int
    sums: tuple[int, ...]
    row_axis: int | None
    """Place of the rows among the block's iterators; None where there are none."""
    column_axis: int | None

    @staticmethod
    def of(contraction: Contraction) -> TiledAxes:
        """Rows and columns are the last two axes along which the weights are the same and there is more than one."""
        spatial = contraction.spatial
        row_axis, column_axis = (None, None, *(axis for axis in contraction.free_axes if spatial[axis] > 1))[-2:]
        return TiledAxes(
            outer=prod(extent for axis, extent in enumerate(spatial[:-1]) if axis not in (column_axis, row_axis)),
            rows=1 if row_axis is None else spatial[row_axis],
            columns=1 if column_axis is None else spatial[column_axis],
            channels=spatial[-1],
            sums=contraction.reduction,
            row_axis=row_axis,
            column_axis=column_axis,
        )

    def num_jobs(self, tile: RegisterTile) -> int:
        return self.num_channel_jobs(tile) * self.num_spatial_jobs(tile)

    def num_channel_jobs(self, tile: RegisterTile) -> int:
        """Number of jobs among which the channels are divided."""
        return ceil(self.channels / (tile.lanes * tile.vectors * tile.channel_tiles))

    def num_spatial_jobs(self, tile: RegisterTile) -> int:
        """Number of jobs among which all other axes are divided."""
        columns = self.columns // (tile.columns * tile.column_tiles) if tile.column_tiles else 1
        return self.outer * (self.rows // (tile.rows * tile.row_tiles)) * columns


def divisors(number: int, most: int | None = None) -> list[int]:
    """The divisors of a number that are not above `most`."""
    return [divisor for divisor in range(1, min(number, most or number) + 1) if number % divisor == 0]


def power_of_two(extent: int, most: int) -> int:
    """The largest power of two that divides an extent, and is not above `most`."""
    return min(extent & -extent, most)


def inside(sch: Schedule, block: SBlockRV, loop: LoopRV) -> list[LoopRV]:
    """The loops around a block that are inside of a loop."""
    loops = list(sch.get_loops(block))
    outside = next(number for number, other in enumerate(loops) if sch.get(other).same_as(sch.get(loop)))
    return loops[outside + 1 :]


def write_out(sch: Schedule, loops: Sequence[LoopRV], lanes: int | None = None) -> None:
    """Unrolls loops but for the last one, which is a vector, or several; loops of one iteration may be gone.

    Unrolled, each sum of a tile is a register of its own, and what its indices decide is known to the compiler.
    """
    if loops and lanes is not None and int(sch.get(loops[-1]).extent) != lanes:
        loops = [*loops[:-1], *sch.split(loops[-1], [None, lanes])]
    for loop in loops[:-1]:
        sch.unroll(loop)
    for loop in loops[-1:]:
        sch.vectorize(loop)


def vectorize_innermost(sch: Schedule, block: SBlockRV, most: int) -> None:
    """Makes vectors of a block's last loop, as wide as divides it up to `most`."""
    loop = sch.get_loops(block)[-1]
    sch.vectorize(sch.split(loop, [None, power_of_two(int(sch.get(loop).extent), most)])[1])
