"""Convolutions and matrix multiplications whose sums stay in registers.

From the outside in:

    parallel over blocks of channels, rows and columns            jobs
      the padded input of a job, or of a row                      vectorised
      channel tiles, row tiles, column tiles of a job
        the sums: rows × columns × vectors of channels            in registers
        for everything that is summed                             nothing in here is stored
          for rows, columns, vectors: unrolled
            a vector of channels                                  one element of the input, one vector of packed weights
        written back with bias, addition and activation       unless that is long: then after the job

"Channels" are the last axis of the output, "columns" and "rows" those before it along which the weights are the same.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil, prod
from typing import TYPE_CHECKING, Literal

from ansor_mlflow.sketches.contraction import Contraction, Operand
from ansor_mlflow.sketches.machine import Machine

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.s_tir import Schedule
    from tvm.s_tir.schedule import LoopRV

PadAt = Literal["inline", "job", "row"]

_MAX_COLUMNS, _MAX_ROWS, _MAX_VECTORS = 30, 8, 6
_MAX_JOBS_PER_THREAD = 64
_L1_BYTES, _L2_BYTES = 24 * 1024, 384 * 1024
"""What of the caches the weights of a tile may fill; of the smallest caches that servers have."""

_LINE_BYTES, _WAY_BYTES, _MAX_LINES = 64, 4096, 6
"""Lines of the first cache, and of how many of a set, of eight, the input can be sure."""

_FMA_LATENCY = 4
_JOB_CYCLES, _LAUNCH_CYCLES = 400, 6000
_MAX_SERIAL = 4
"""A kernel that takes fewer launches' time than this may be as fast on one thread."""
_BYTES_PER_CYCLE = {"l2": 32.0, "memory": 8.0, "copy": 12.0}
"""What a core reads of weights, and what it copies while it pads."""
_MAX_COPIES = 16
"""Tiles of columns of a row, where the last one is narrower: each of them is a copy of the program."""
_MAX_TILES = 512
"""Tiles that may get a trial."""
_SMALL_WORK = 500_000
"""Multiply-adds that take a few microseconds however they are done."""
_MAX_EPILOGUE = 8
"""Operators after a sum that are computed while it is written; a GELU is seven. More of them, in every copy of the
unrolled tile, would take the compiler minutes."""
_NUM_MICRO = 48
"""Tiles in registers whose jobs are looked at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RegisterTile:
    """The decisions of the sketch."""

    lanes: int
    """Elements of a vector, a power of two."""
    vectors: int
    columns: int
    rows: int
    channel_tiles: int
    """Tiles of channels, one after the other, in a job."""
    row_tiles: int
    column_tiles: int
    """0 for all."""
    pad_at: PadAt
    channels_outside: bool
    """Whether jobs that follow each other differ in their rows, and not in their channels."""
    parallel: bool
    """Whether threads share the jobs."""


@dataclass(frozen=True)
class _Axes:
    """Extents of the axes that are tiled, 1 where there is none."""

    outer: int
    rows: int
    columns: int
    channels: int
    sums: tuple[int, ...]


class RegisterTiling:
    """The sketch for one function."""

    name = "register tile"

    def __init__(self, mod: IRModule, contraction: Contraction, machine: Machine) -> None:
        self._mod = mod
        self._contraction = contraction
        self._machine = machine
        free = contraction.free_axes
        last = contraction.vector_axis - 1
        self._column_axis = last if last in free else None
        self._row_axis = last - 1 if last - 1 in free and last in free else None
        spatial = contraction.spatial
        self._axes = _Axes(
            outer=prod(n for axis, n in enumerate(spatial[:-1]) if axis not in (self._column_axis, self._row_axis)),
            rows=1 if self._row_axis is None else spatial[self._row_axis],
            columns=1 if self._column_axis is None else spatial[self._column_axis],
            channels=spatial[-1],
            sums=contraction.reduction,
        )
        self._cycles_of_micro = cache(self._count_cycles)

    def tiles(self) -> list[RegisterTile]:
        """All tiles that are worth a trial, the one that is taken without any first."""
        micro = sorted(self._micro_tiles(), key=self._cycles_of_micro)[:_NUM_MICRO]
        found = [tile for first in micro for tile in self._jobs(first)]
        small = [tile for tile in found if tile.parallel and self.cycles(tile) < _MAX_SERIAL * _LAUNCH_CYCLES]
        return sorted([*found, *(replace(tile, parallel=False) for tile in small)], key=self.cycles)[:_MAX_TILES]

    def _micro_tiles(self) -> Iterator[tuple[int, int, int, int]]:
        """Lanes, vectors, columns and rows of sums that fit into the registers."""
        axes, registers = self._axes, self._machine.num_registers
        for lanes in self._lanes():
            for vectors, columns in itertools.product(range(1, _MAX_VECTORS + 1), range(1, _MAX_COLUMNS + 1)):
                for rows in _divisors(axes.rows, _MAX_ROWS):
                    fits = vectors * columns * rows + vectors + 1 <= registers
                    is_even = axes.columns % columns == 0 or axes.columns // columns < _MAX_COPIES
                    in_group = self._contraction.group % (vectors * lanes) == 0
                    if fits and is_even and in_group and columns <= axes.columns:
                        yield lanes, vectors, columns, rows

    def _lanes(self) -> list[int]:
        """Widths of vectors that divide the channels of a group, the two widest."""
        widest = _power_of_two(self._contraction.group, self._machine.lanes(self._contraction.num_bytes))
        return [widest] if widest == 1 else [widest, widest // 2]

    def _count_cycles(self, micro: tuple[int, int, int, int]) -> float:
        """Cycles of all sums for a tile in registers, on one thread."""
        lanes, vectors, columns, rows = micro
        axes = self._axes
        num_tiles = ceil(axes.channels / (lanes * vectors)) * (axes.rows // rows)
        full, rest = divmod(axes.columns, columns)
        per_row = full * self._cycles_of_tile(lanes, vectors, columns, rows)
        if rest:
            per_row += self._cycles_of_tile(lanes, vectors, rest, rows)
        return axes.outer * num_tiles * per_row

    def _cycles_of_tile(self, lanes: int, vectors: int, columns: int, rows: int) -> float:
        """Cycles of the sums of one tile: as many as its multiply-adds take, its loads, or waiting for them."""
        width = max(0.5, lanes * self._contraction.num_bytes / 64)  # two narrow vectors in a cycle, or a wide one
        sums = vectors * columns * rows
        shared = 0.0 if self._contraction.shared is None else vectors * width
        broadcast = self._contraction.broadcast
        if broadcast is None:
            loads = shared + sums * width
        else:
            loads = shared + columns * rows * self._cycles_of_element(broadcast, columns, rows)
        step = max(sums * width, loads, _FMA_LATENCY) + 0.05 * loads
        return prod(self._axes.sums) * step + 4 * sums

    def _cycles_of_element(self, data: Operand, columns: int, rows: int) -> float:
        """Cycles to load an element of the input: more where those of a tile displace each other in the first cache."""
        size = self._contraction.num_bytes
        column_bytes = 0 if self._column_axis is None else data.stride(self._column_axis) * size
        row_bytes = 0 if self._row_axis is None else data.stride(self._row_axis) * size
        places = itertools.product(range(rows), range(columns))
        sets = Counter((row * row_bytes + column * column_bytes) % _WAY_BYTES // _LINE_BYTES for row, column in places)
        return 0.5 if max(sets.values()) <= _MAX_LINES else 1.5

    def _jobs(self, micro: tuple[int, int, int, int]) -> Iterator[RegisterTile]:
        """The ways to share a tile in registers among jobs."""
        lanes, vectors, columns, rows = micro
        axes = self._axes
        channel_tiles = _divisors(ceil(axes.channels / (lanes * vectors)))
        column_tiles = _divisors(axes.columns // columns) if axes.rows == 1 and axes.columns % columns == 0 else [0]
        for per_channels, per_rows, per_columns in itertools.product(
            channel_tiles, _divisors(axes.rows // rows), column_tiles
        ):
            for pad_at, channels_outside in itertools.product(self._pad_places(), (True, False)):
                tile = RegisterTile(
                    lanes=lanes,
                    vectors=vectors,
                    columns=columns,
                    rows=rows,
                    channel_tiles=per_channels,
                    row_tiles=per_rows,
                    column_tiles=per_columns,
                    pad_at=pad_at,
                    channels_outside=channels_outside,
                    parallel=self._machine.num_threads > 1,
                )
                if self._num_jobs(tile) <= _MAX_JOBS_PER_THREAD * self._machine.num_threads:
                    yield tile

    def _pad_places(self) -> list[PadAt]:
        return ["job", "row"] if self._contraction.has_padding else ["inline"]

    def _num_jobs(self, tile: RegisterTile) -> int:
        axes = self._axes
        channels = ceil(axes.channels / (tile.lanes * tile.vectors * tile.channel_tiles))
        columns = axes.columns // (tile.columns * tile.column_tiles) if tile.column_tiles else 1
        return axes.outer * channels * (axes.rows // (tile.rows * tile.row_tiles)) * columns

    def cycles(self, tile: RegisterTile) -> float:
        """Estimated cycles of a call."""
        num_jobs, threads = self._num_jobs(tile), self._machine.num_threads
        micro = (tile.lanes, tile.vectors, tile.columns, tile.rows)
        job = self._cycles_of_micro(micro) / num_jobs + self._cycles_of_weights(tile) + self._cycles_of_padding(tile)
        if not tile.parallel:
            return num_jobs * job
        return ceil(num_jobs / threads) * (job + _JOB_CYCLES) + _LAUNCH_CYCLES

    def _cycles_of_weights(self, tile: RegisterTile) -> float:
        """Cycles that a job waits for weights: less where they stay in a cache for all of its rows and columns."""
        if self._contraction.shared is None:
            return 0.0
        axes = self._axes
        channels = tile.lanes * tile.vectors
        num_bytes = channels * prod(axes.sums) * self._contraction.num_bytes
        columns = tile.column_tiles or ceil(axes.columns / tile.columns)
        again = tile.channel_tiles * (tile.row_tiles * columns - 1) * num_bytes
        first = tile.channel_tiles * num_bytes / _BYTES_PER_CYCLE["memory"] * 0.5
        if num_bytes <= _L1_BYTES:
            return first
        return first + 0.3 * again / _BYTES_PER_CYCLE["l2" if num_bytes <= _L2_BYTES else "memory"]

    def _cycles_of_padding(self, tile: RegisterTile) -> float:
        """Cycles in which a job copies its input."""
        if tile.pad_at == "inline":
            return 0.0
        kernel = self._axes.sums[0] if len(self._axes.sums) > 1 else 1
        rows = tile.rows * tile.row_tiles if tile.pad_at == "job" else tile.rows
        copies = 1 if tile.pad_at == "job" else tile.channel_tiles * tile.row_tiles
        row_bytes = self._axes.columns * self._axes.sums[-1] * self._contraction.num_bytes
        return copies * (rows + kernel - 1) * row_bytes / _BYTES_PER_CYCLE["copy"]

    def kind(self, tile: RegisterTile) -> object:
        """The tile in registers."""
        return tile.lanes, tile.vectors, tile.columns, tile.rows

    def is_fast(self, tile: RegisterTile) -> bool:
        """Whether its vectors fill half of a register, or there is little to compute."""
        num_sums = self._axes.outer * self._axes.rows * self._axes.columns * self._axes.channels
        is_small = num_sums * prod(self._axes.sums) < _SMALL_WORK
        return is_small or 2 * tile.lanes >= self._machine.lanes(self._contraction.num_bytes)

    def schedule(self, tile: RegisterTile) -> Schedule:
        """The function with a tile."""
        from tvm.s_tir import Schedule

        found = self._contraction
        sch = Schedule(self._mod)
        block = sch.get_sblock(found.block)
        for name in (*found.epilogue[:-1], *found.producers[:-1]):
            sch.compute_inline(sch.get_sblock(name))
        loops = list(sch.get_loops(block))
        spatial, sums = loops[: len(found.spatial)], loops[len(found.spatial) :]
        channels = spatial.pop()
        rest = [loop for axis, loop in enumerate(spatial) if axis not in (self._column_axis, self._row_axis)]
        channel_job, channel_tile, vector, lane = sch.split(
            channels, [None, tile.channel_tiles, tile.vectors, tile.lanes]
        )
        tiled, tiles, inner = self._split(sch, spatial, tile)
        jobs = [channel_job, *rest, *tiled] if tile.channels_outside else [*rest, *tiled, channel_job]
        sch.reorder(*jobs, channel_tile, *tiles, *sums, *inner, vector, lane)
        write = sch.cache_write(block, 0, "local")
        innermost_tile = tiles[-1] if tiles else channel_tile
        sch.reverse_compute_at(write, innermost_tile)
        is_long = len(found.epilogue) > _MAX_EPILOGUE
        if found.epilogue and not is_long:
            sch.reverse_compute_inline(sch.get_sblock(found.epilogue[-1]))
        job = sch.fuse(*jobs)
        if tile.parallel:
            sch.parallel(job)
        if is_long:
            self._place_epilogue(sch, job)
        if found.producers:
            self._place_padding(sch, tile, {"job": job, "row": tiles[0] if tiles else job})
        for loop in (*inner, vector):
            sch.unroll(loop)
        sch.vectorize(lane)
        init = sch.decompose_reduction(block, sums[0])
        depth = len(sch.get_loops(write)) - self._num_inside(sch, write, innermost_tile)
        for inside in (sch.get_loops(init)[depth:], sch.get_loops(write)[depth:]):
            self._vectorize_tile(sch, list(inside), tile)
        return sch

    def _split(
        self, sch: Schedule, spatial: Sequence[LoopRV], tile: RegisterTile
    ) -> tuple[list[LoopRV], list[LoopRV], list[LoopRV]]:
        """Splits rows and columns into the loops over jobs, over the tiles of a job, and inside of a tile."""
        jobs, tiles, inner = [], [], []
        for axis, size, per_job in (
            (self._row_axis, tile.rows, tile.row_tiles),
            (self._column_axis, tile.columns, tile.column_tiles),
        ):
            if axis is None:
                continue
            if per_job:
                job, tile_loop, inside = sch.split(spatial[axis], [None, per_job, size])
                jobs.append(job)
            else:
                tile_loop, inside = sch.split(spatial[axis], [None, size])
            if self._contraction.spatial[axis] % size:
                sch.unroll(tile_loop)  # of its copies only the last has a rest, which is known then
            tiles.append(tile_loop)
            inner.append(inside)
        return jobs, tiles, inner

    def _place_padding(self, sch: Schedule, tile: RegisterTile, places: dict[str, object]) -> None:
        pad = sch.get_sblock(self._contraction.producers[-1])
        if tile.pad_at == "inline":
            sch.compute_inline(pad)
            return
        sch.compute_at(pad, places[tile.pad_at])
        loop = sch.get_loops(pad)[-1]
        lanes = _power_of_two(int(sch.get(loop).extent), self._machine.lanes(self._contraction.num_bytes))
        sch.vectorize(sch.split(loop, [None, lanes])[1])

    def _place_epilogue(self, sch: Schedule, job: LoopRV) -> None:
        """Computes what follows the sums after all tiles of a job, in a loop that is there once."""
        last = sch.get_sblock(self._contraction.epilogue[-1])
        sch.reverse_compute_at(last, job)
        loop = sch.get_loops(last)[-1]
        lanes = _power_of_two(int(sch.get(loop).extent), self._machine.lanes(self._contraction.num_bytes))
        sch.vectorize(sch.split(loop, [None, lanes])[1])

    def _num_inside(self, sch: Schedule, block: object, loop: object) -> int:
        """How many loops around a block are inside of a loop."""
        loops = [sch.get(other) for other in sch.get_loops(block)]
        outside = next(number for number, other in enumerate(loops) if other.same_as(sch.get(loop)))
        return len(loops) - outside - 1

    def _vectorize_tile(self, sch: Schedule, loops: list[LoopRV], tile: RegisterTile) -> None:
        """Unrolls the loops over a tile; the last one is split into vectors. Loops of one iteration may be gone."""
        if not loops:
            return
        if int(sch.get(loops[-1]).extent) != tile.lanes:
            loops[-1:] = sch.split(loops[-1], [None, tile.lanes])
        for loop in loops[:-1]:
            sch.unroll(loop)
        sch.vectorize(loops[-1])


def _divisors(number: int, most: int | None = None) -> list[int]:
    return [divisor for divisor in range(1, min(number, most or number) + 1) if number % divisor == 0]


def _power_of_two(extent: int, most: int) -> int:
    """The largest power of two that divides an extent, and is not above `most`."""
    return min(extent & -extent, most)
