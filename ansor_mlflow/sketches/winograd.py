"""Winograd's convolution, tile row by tile row in the caches.

From the outside in, for the blocks that `lowering.algorithms` makes; along an axis with one tap nothing is transformed:

    parallel over rows of tiles, and blocks of channels           jobs
      the padded input of a job                                   vectorised
      for each tile and vector of input channels
        transformed along columns                                 in registers
        and along rows                                            vectorised, written out without zeros and ones
      for each of the points, channel tile and column tile
        the sums: tiles × vectors of channels                     in registers
        for all input channels
          a vector of channels                                    one element of the data, one vector of packed weights
      for each tile and vector of channels
        transformed back along columns                            in registers
        and along rows, with bias, addition and activation        vectorised
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, prod
from typing import TYPE_CHECKING, Any

from ansor_mlflow.codegen import PREFETCH
from ansor_mlflow.sketches.estimate import L1_BYTES, LAUNCH_CYCLES, LOADS_OF_WIDE, Machine
from ansor_mlflow.sketches.tile import (
    MAX_JOBS_PER_THREAD,
    MAX_VECTORS,
    divisors,
    inside,
    power_of_two,
    vectorize_innermost,
    write_out,
)

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.s_tir import Schedule
    from tvm.s_tir.schedule import SBlockRV

_PAD, _COLUMNS, _DATA, _PRODUCT, _ROWS = (f"winograd_{name}" for name in ("pad", "columns", "data", "product", "rows"))
TILE_COLUMNS = "ansor_mlflow.tile_columns"
"""Annotation of the block of the rows: columns of the outputs of a tile, where they are not as many as its rows."""
_FLOAT32_BYTES = 4
_MAX_PASSES = 8
"""Tiles that one panel of weights serves, up to which the next panel is fetched ahead: with more of them the first
wait hardly counts."""
_STREAMED_BYTES = 4 * 2**20
"""Size of all weights above which panels are always fetched ahead, as they come from memory in each call."""
_MAX_JOB_BYTES = 8 * 2**20
"""Largest size of what a job keeps between its steps: beyond, it goes through memory, as without jobs."""
_MAX_PROGRAMS = 256
"""How many tiles a search may try."""
_AGAIN_FROM_L2 = 2.0
"""How many times longer a vector of weights takes from the second cache than from the first."""
_TERMS = 4.0
"""Terms of a sum in a transform, on average: most of the coefficients are not zero."""
_BYTES_PER_CYCLE = {"memory": 5.0, "shared": 8.0}
"""Bytes of weights that a core reads in a cycle for the first time, and again from the last cache."""
_STALL = 0.5
"""Share of the shorter of reading and computing that is not hidden behind the longer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WinogradTile:
    """The decisions of the sketch."""

    lanes: int
    """Elements of a vector, a power of two."""
    vectors: int
    tiles: int
    """Tiles of the image whose sums are in registers together."""
    tile_rows: int
    """Rows of tiles of a job."""
    channel_jobs: int
    """Blocks of channels that jobs share out."""
    parallel: bool
    """Whether threads share the jobs."""


@dataclass(frozen=True)
class _Shape:
    batch: int
    """Images; those of a convolution in three dimensions are its slices."""
    outputs: tuple[int, int]
    """Rows and columns of a tile."""
    size: tuple[int, int]
    """Rows and columns of the input that a tile reads."""
    down: int
    """Rows of tiles in an image."""
    across: int
    channels_in: int
    """Channels of the input that are summed: those in a group."""
    groups: int
    channels_out: int
    epilogue: tuple[str, ...]
    """Blocks after the convolution."""
    name: str
    """Block that writes what the convolution gives."""

    @property
    def channels(self) -> int:
        """Channels of the input in all groups."""
        return self.channels_in * self.groups

    @property
    def num_points(self) -> int:
        return prod(self.size)

    @staticmethod
    def of(mod: IRModule) -> _Shape | None:
        """The convolution of a function; None where it is not computed in this way."""
        from tvm.s_tir import Schedule

        sch = Schedule(mod)
        blocks = [sch.get(block) for block in sch.get_child_blocks(sch.get_sblock("root"))]
        names = [str(block.name_hint) for block in blocks]
        if _PRODUCT not in names:
            return None
        place = names.index(_ROWS) + 1
        num_tiles, tile_rows, width, _ = _extents(blocks[place - 1])
        tile_columns = int(blocks[place - 1].annotations.get(TILE_COLUMNS, tile_rows))
        size, *_, channels_in = _extents(blocks[names.index(_PRODUCT)])
        num_images, padded_rows, _, channels = _extents(blocks[names.index(_PAD)])
        down = (padded_rows - size) // tile_rows + 1
        return _Shape(
            batch=num_images,
            outputs=(tile_rows, tile_columns),
            size=(size, width),
            down=down,
            across=num_tiles // (num_images * down),
            channels_in=channels_in,
            groups=channels // channels_in,
            channels_out=_extents(blocks[place])[-1],
            epilogue=tuple(names[place + 1 :]),
            name=names[place],
        )


class WinogradTiling:
    """The sketch for one function."""

    name = "winograd"

    def __init__(self, mod: IRModule, shape: _Shape, machine: Machine) -> None:
        self._mod, self._shape, self._machine = mod, shape, machine

    @classmethod
    def find(cls, mod: IRModule, machine: Machine) -> WinogradTiling | None:
        """The sketch for a task's function; None where it is no such convolution."""
        shape = _Shape.of(mod)
        return None if shape is None else cls(mod, shape, machine)

    def tiles(self) -> list[WinogradTile]:
        return sorted(self._possible(), key=self.cycles)[:_MAX_PROGRAMS]

    def kind(self, tile: WinogradTile) -> object:
        """How the work is shared, and the tile in registers."""
        return tile.vectors, tile.tiles, tile.channel_jobs

    def is_fast(self, _tile: WinogradTile) -> bool:
        """True: no other space has programs for it."""
        return True

    def cycles(self, tile: WinogradTile) -> float:
        shape, threads = self._shape, self._machine.num_threads if tile.parallel else 1
        per_thread = ceil(self._num_jobs(tile) / threads)
        num_tiles = tile.tile_rows * shape.across
        channels = shape.channels_out // tile.channel_jobs
        width = self._machine.cycles_of_vector(tile.lanes * _FLOAT32_BYTES)
        steps = num_tiles // tile.tiles * self._step(tile, width)
        product = shape.num_points * (channels // (tile.lanes * tile.vectors)) * steps * shape.channels_in
        rows, columns = (size > 1 for size in shape.size)
        into = num_tiles * shape.channels / self._lanes(shape.channels)
        into *= (rows + columns) * _TERMS * shape.num_points
        back = num_tiles * channels / tile.lanes * _TERMS
        back *= shape.outputs[0] * (rows * shape.size[1] + columns * shape.outputs[1])
        weight_bytes = _FLOAT32_BYTES * shape.num_points * shape.channels_in * channels
        # Jobs of the same channels follow each other on a thread, so that only the first of them waits for memory.
        num_reads = ceil(tile.channel_jobs / threads)
        weights = weight_bytes * num_reads / _BYTES_PER_CYCLE["memory"]
        if weight_bytes > self._machine.l2_bytes:
            weights += weight_bytes * (per_thread - num_reads) / _BYTES_PER_CYCLE["shared"]
        # Fetched ahead, weights arrive while others are multiplied: the longer of both decides.
        short, long = sorted((per_thread * product, weights))
        transforms = per_thread * width * (into + back)
        return long + _STALL * short + transforms + (LAUNCH_CYCLES if tile.parallel else 0)

    def _step(self, tile: WinogradTile, width: float) -> float:
        """Cycles of the sums in registers for one input channel."""
        element = 0.5 if self._machine.broadcasts_operands else 1.0
        panel_bytes = _FLOAT32_BYTES * tile.lanes * tile.vectors * self._shape.channels_in
        passes = tile.tile_rows * self._shape.across // tile.tiles  # the first of which has to wait for the panel
        again = (_AGAIN_FROM_L2 + passes - 1) / passes if panel_bytes <= L1_BYTES else _AGAIN_FROM_L2
        weights = tile.vectors * width * again
        sums = tile.vectors * tile.tiles * width
        loads = (weights + tile.tiles * element) * (LOADS_OF_WIDE if self._machine.is_wide else 1.0)
        return max(sums, loads, 4.0)  # 4: until a sum is there again

    def schedule(self, tile: WinogradTile) -> Schedule:
        from tvm.s_tir import Schedule

        sch, shape = Schedule(self._mod), self._shape
        pad, columns, data, product, rows, output = (
            sch.get_sblock(name) for name in (_PAD, _COLUMNS, _DATA, _PRODUCT, _ROWS, shape.name)
        )
        for name in shape.epilogue[:-1]:
            sch.compute_inline(sch.get_sblock(name))
        if shape.epilogue:
            sch.reverse_compute_inline(sch.get_sblock(shape.epilogue[-1]))
        # From the output backwards: each step is computed where the next one needs it, in the caches of one job.
        *images, y, x, c = sch.get_loops(output)
        job_y, tile_y, in_y = sch.split(y, [None, tile.tile_rows, shape.outputs[0]])
        tile_x, in_x = sch.split(x, [None, shape.outputs[1]])
        job_c, vector, lane = sch.split(c, [tile.channel_jobs, None, tile.lanes])
        sch.reorder(job_c, *images, job_y, tile_y, tile_x, vector, in_y, in_x, lane)
        job = sch.fuse(job_c, *images, job_y)
        if tile.parallel:
            sch.parallel(job)
        # Written out, the choice among coefficients is made by the compiler: terms with zero and one are gone.
        write_out(sch, [in_y, in_x, lane])
        sch.compute_at(rows, vector, preserve_unit_loops=True)
        sch.set_scope(rows, 0, "local")
        write_out(sch, inside(sch, rows, vector))
        sch.compute_at(product, job, preserve_unit_loops=True)
        self._multiply(sch, product, tile)
        sch.compute_at(data, job, preserve_unit_loops=True)
        self._transform(sch, data, columns)
        sch.compute_at(pad, job, preserve_unit_loops=True)
        vectorize_innermost(sch, pad, self._machine.lanes(_FLOAT32_BYTES))
        return sch

    def _multiply(self, sch: Schedule, product: SBlockRV, tile: WinogradTile) -> None:
        *points, t, c, k = sch.get_loops(product)[1:]
        channel_tile, vector, lane = sch.split(c, [None, tile.vectors, tile.lanes])
        num_passes = int(sch.get(t).extent) // tile.tiles
        tiles, inner = sch.split(t, [None, tile.tiles])
        sch.reorder(*points, channel_tile, tiles, k, inner, vector, lane)
        write = sch.cache_write(product, 0, "local")
        sch.reverse_compute_at(write, tiles, preserve_unit_loops=True)
        write_out(sch, inside(sch, write, tiles), tile.lanes)
        for loop in (inner, vector):
            sch.unroll(loop)
        sch.vectorize(lane)
        shape = self._shape
        weight_bytes = _FLOAT32_BYTES * shape.num_points * shape.channels_in * shape.channels_out
        if num_passes <= _MAX_PASSES or weight_bytes > _STREAMED_BYTES:
            sch.annotate(k, PREFETCH, num_passes)
        # Sums are cleared before the first channel: a condition in the loop would be asked for each.
        init = sch.decompose_reduction(product, k)
        write_out(sch, inside(sch, init, tiles), tile.lanes)

    def _transform(self, sch: Schedule, data: SBlockRV, columns: SBlockRV) -> None:
        e, u, t, c = sch.get_loops(data)[1:]
        vector, lane = sch.split(c, [None, self._lanes(self._shape.channels)])
        sch.reorder(t, vector, e, u, lane)
        write_out(sch, [e, u, lane])
        sch.compute_at(columns, vector, preserve_unit_loops=True)
        sch.set_scope(columns, 0, "local")
        write_out(sch, inside(sch, columns, vector))

    def _lanes(self, extent: int) -> int:
        """Elements of the widest vector that divides an extent."""
        return power_of_two(extent, self._machine.lanes(_FLOAT32_BYTES))

    def _possible(self) -> Iterator[WinogradTile]:
        """All tiles whose sums fit into the registers, and whose jobs are neither too many nor too large."""
        shape, machine = self._shape, self._machine
        lanes = self._lanes(shape.channels_out // shape.groups)
        num_vectors = shape.channels_out // lanes
        for vectors, tile_rows in itertools.product(
            divisors(num_vectors // shape.groups, MAX_VECTORS), divisors(shape.down)
        ):
            num_tiles = tile_rows * shape.across
            most = min(num_tiles, (machine.num_registers - vectors - 1) // vectors)
            # A narrower last tile would have conditions that depend on the job: that took four times as long.
            sizes = divisors(num_tiles, most)
            for channel_jobs, tiles in itertools.product(divisors(num_vectors // vectors), sizes):
                tile = WinogradTile(
                    lanes=lanes,
                    vectors=vectors,
                    tiles=tiles,
                    tile_rows=tile_rows,
                    channel_jobs=channel_jobs,
                    parallel=machine.num_threads > 1,
                )
                is_small = tile_rows == 1 or self._job_bytes(tile) <= _MAX_JOB_BYTES
                # Of images with a prime number of rows of tiles there may be no fewer jobs.
                is_few = channel_jobs == 1 or self._num_jobs(tile) <= MAX_JOBS_PER_THREAD * machine.num_threads
                # Jobs are parts of groups, or several of them: otherwise each would read other channels.
                is_even = channel_jobs % shape.groups == 0 or shape.groups % channel_jobs == 0
                if is_small and is_few and is_even:
                    yield tile

    def _num_jobs(self, tile: WinogradTile) -> int:
        return tile.channel_jobs * self._shape.batch * (self._shape.down // tile.tile_rows)

    def _job_bytes(self, tile: WinogradTile) -> int:
        """Size of what a job keeps of its tiles: transformed, and multiplied."""
        shape = self._shape
        num_channels = shape.channels + shape.channels_out // tile.channel_jobs
        return _FLOAT32_BYTES * shape.num_points * tile.tile_rows * shape.across * num_channels


def _extents(block: Any) -> list[int]:
    return [int(var.dom.extent) for var in block.iter_vars]
