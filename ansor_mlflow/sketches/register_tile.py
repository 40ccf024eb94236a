"""Convolutions and matrix multiplications whose sums stay in registers.

From the outside in:

    parallel over blocks of channels, rows and columns            jobs
      the padded input of a job, or of a row                      vectorised, or no copy: conditions in the loops
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
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil, prod
from operator import itemgetter
from typing import TYPE_CHECKING, ClassVar

from ansor_mlflow.codegen import DOT_PRODUCTS, MATRIX_TILES, NARROW_REGISTERS, NUM_TILES, PACK, TILE_ROWS
from ansor_mlflow.sketches.contraction import MAX_EPILOGUE, Contraction, Operand, find_contraction, is_layout_free
from ansor_mlflow.sketches.estimate import (
    LAUNCH_CYCLES,
    LINE_BYTES,
    NARROW_OPERATIONS,
    Estimate,
    Machine,
    TileEstimate,
    most_packs,
)
from ansor_mlflow.sketches.tile import (
    MAX_COPIES,
    MAX_JOBS_PER_THREAD,
    MAX_VECTORS,
    MIN_PARALLEL,
    PadAt,
    RegisterTile,
    TiledAxes,
    divisors,
    inside,
    power_of_two,
    vectorize_innermost,
    write_out,
)

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.s_tir import Schedule
    from tvm.s_tir.schedule import LoopRV, SBlockRV

_MAX_COLUMNS, _MAX_ROWS = 30, 8
"""Largest tile in registers that is looked at: no more sums than the largest register files hold."""
_MAX_SERIAL = 4
"""Launches in whose time a kernel may be as fast on one thread."""
_MAX_UNROLLED = 1000
"""Terms of sums that are written out where each of them is a load of its own, as in depthwise convolutions and
poolings. What is padding is known then, and so is what neighbours read in common."""
_MAX_WRITTEN = 2048
"""Operations on vectors that all copies of a tile write their sums with, up to which there may be any number of copies:
a row of 599 columns, which is a prime number, has 22 of 28."""
_MAX_ROWS_AT_EDGE = 2
"""Rows of a tile with branches for padding, where each element of the input serves for one sum alone."""
_MAX_TILES = 512
"""How many tiles a search may try."""
_SMALL_WORK = 50_000
"""Multiply-adds that take a few microseconds even one after the other."""
_MAX_CHANNELS, _MIN_LANES, _MIN_VECTORS = 2, 4, 4
"""Elements of a vector of channels up to which one of summed elements is tried, its length, and how many vectors a sum
has then: in the end their elements are added one after the other."""
_FEW_CHANNELS = 3
"""Channels of an image, which are no vector."""
_MAX_TILES_OF_DATA, _MIN_HEIGHT = 3, 7
"""Tiles of data beside those of weights and sums, and rows of them from which AMX is worth its start."""
_MIN_PACKS = {PACK: 7, PACK // 2: 6}
"""Packs from which it is, by their elements: bytes have another instruction, bfloat16 has none there
that pays."""
_FEW_PACKS = 2
"""Packs of the channels of an image."""
_NUM_MICRO = 48
"""How many of the best register tiles get a full search of loop orders."""


class RegisterTiling:
    """The sketch for one function."""

    name = "register tile"

    _max_epilogue = MAX_EPILOGUE
    _writes_out = True
    """Whether each register of a tile has operations of its own in the program."""

    def __init__(self, mod: IRModule, contraction: Contraction, machine: Machine) -> None:
        self._mod, self._contraction, self._machine = mod, contraction, machine
        self._axes = TiledAxes.of(contraction)
        self._widest, self._registers = machine.lanes(contraction.num_bytes), machine.num_registers
        self._estimate = Estimate(contraction, self._axes, machine)

    @classmethod
    def find(cls, mod: IRModule, machine: Machine) -> RegisterTiling | None:
        """The sketch for a task's function; None where it is no contraction."""
        contraction = find_contraction(mod)
        return None if contraction is None else cls(mod, contraction, machine)

    def tiles(self) -> list[RegisterTile]:
        micro = sorted(self._micro_tiles(), key=self._estimate.cycles_of_sums)[:_NUM_MICRO]
        cycles = self._estimate.cycles
        found = [(cycles(tile), tile) for first in micro for tile in self._jobs(first)]
        small = [tile for estimated, tile in found if tile.parallel and estimated < _MAX_SERIAL * LAUNCH_CYCLES]
        found += [(cycles(tile), tile) for tile in (replace(tile, parallel=False) for tile in small)]
        return [tile for _, tile in sorted(found, key=itemgetter(0))[:_MAX_TILES]]

    def _micro_tiles(self) -> Iterator[tuple[int, int, int, int]]:
        """Lanes, vectors, columns and rows of sums that fit into the registers."""
        axes, registers = self._axes, self._registers
        # The two widest vectors that divide the channels of a group, as powers of two: with others LLVM does badly, 24
        # lanes reached 11 to 16 % of the peak.
        widest = power_of_two(self._contraction.group, self._widest)
        for lanes in sorted({widest, max(1, widest // 2)}, reverse=True):
            for vectors, columns in itertools.product(range(1, MAX_VECTORS + 1), range(1, _MAX_COLUMNS + 1)):
                for rows in divisors(axes.rows, _MAX_ROWS):
                    # the sums, a vector of weights for each vector of channels, and one element of the input
                    fits = vectors * columns * rows + vectors + 1 <= registers
                    is_even = axes.columns % columns == 0 or axes.columns // columns < MAX_COPIES
                    # Copies are written out with what follows the sums: many of them are little where that is short.
                    is_even |= axes.columns * vectors * rows * (1 + len(self._contraction.epilogue)) <= _MAX_WRITTEN
                    # a tile within one group reads the same data for all of its channels
                    in_group = self._contraction.group % (vectors * lanes) == 0
                    if fits and is_even and in_group and columns <= axes.columns:
                        yield lanes, vectors, columns, rows

    def _jobs(self, micro: tuple[int, int, int, int]) -> Iterator[RegisterTile]:
        """The ways to share a tile in registers among jobs."""
        lanes, vectors, columns, rows = micro
        axes = self._axes
        channel_tiles = divisors(ceil(axes.channels / (lanes * vectors)))
        # Without rows, as in a matrix product, there is nothing else to share among the threads.
        column_tiles = divisors(axes.columns // columns) if axes.rows == 1 and axes.columns % columns == 0 else [0]
        for per_channels, per_rows, per_columns in itertools.product(
            channel_tiles, divisors(axes.rows // rows), column_tiles
        ):
            for pad_at, channels_outside in itertools.product(self._pad_places(rows), (True, False)):
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
                is_few = axes.num_jobs(tile) <= MAX_JOBS_PER_THREAD * self._machine.num_threads
                if is_few and not self._shares_lines(tile):
                    yield tile

    def _shares_lines(self, tile: RegisterTile) -> bool:
        """Whether threads write to the same lines of a cache all the time, which is ten times as slow."""
        num_shares = min(self._axes.num_channel_jobs(tile), self._machine.num_threads) if tile.channels_outside else 1
        return num_shares > 1 and self._axes.channels * self._contraction.result_bytes < num_shares * LINE_BYTES

    def _pad_places(self, rows: int) -> list[PadAt]:
        """Where the input may be padded."""
        if not self._contraction.has_padding:
            return ["inline"]
        is_vector = self._contraction.broadcast is None
        if not is_vector and self._contraction.is_mostly_padded:
            return ["job", "row"]  # in the loops nearly every tile would ask for each element: up to twice as long
        most = _MAX_ROWS_AT_EDGE if is_vector else 1
        # In the loops there is a branch for what may be at an edge, unless the tile has all rows, so that it is known.
        if (is_vector and rows == self._axes.rows) or rows <= most:
            return ["inline", "job"] if is_vector else ["inline", "job", "row"]
        return ["job", "row"]

    def cycles(self, tile: RegisterTile) -> float:
        return self._estimate.cycles(tile)

    def kind(self, tile: RegisterTile) -> object:
        return tile.lanes, tile.vectors, tile.columns, tile.rows

    def is_fast(self, tile: RegisterTile) -> bool:
        """Whether its vectors fill half of a register, or there is little to compute."""
        num_sums = self._axes.outer * self._axes.rows * self._axes.columns * self._axes.channels
        is_small = num_sums * prod(self._axes.sums) < _SMALL_WORK
        return is_small or 2 * tile.lanes >= self._widest

    def schedule(self, tile: RegisterTile) -> Schedule:
        from tvm.s_tir import Schedule

        found = self._contraction
        sch = Schedule(self._mod)
        block = self._sums(sch)
        # What comes before the padding and between the sums and the output is computed where it is used.
        for name in (*found.epilogue[:-1], *found.producers[:-1]):
            sch.compute_inline(sch.get_sblock(name))
        loops = list(sch.get_loops(block))
        spatial = loops[: len(found.spatial)]
        sums, packs = self._packed(sch, loops[len(found.spatial) :], tile)
        channels = spatial.pop()
        rest = [loop for axis, loop in enumerate(spatial) if axis not in (self._axes.column_axis, self._axes.row_axis)]
        channel_job, channel_tile, vector, lane = sch.split(
            channels, [None, tile.channel_tiles, tile.vectors, tile.lanes]
        )
        tiled, tiles, inner = self._split(sch, spatial, tile)
        # A thread gets jobs that follow each other: the inner of both loops is what each of them reads in whole.
        jobs = [channel_job, *rest, *tiled] if tile.channels_outside else [*rest, *tiled, channel_job]
        sch.reorder(*jobs, channel_tile, *tiles, *sums, *inner, vector, lane, *packs)
        # `codegen` makes this buffer an array of the function, and LLVM keeps it in registers.
        write = sch.cache_write(block, 0, "local")
        innermost_tile = tiles[-1] if tiles else channel_tile
        sch.reverse_compute_at(write, innermost_tile)
        is_long = len(found.epilogue) > self._max_epilogue
        if found.epilogue and not is_long:  # sums go through it on their way to memory
            sch.reverse_compute_inline(sch.get_sblock(found.epilogue[-1]))
        job = sch.fuse(*jobs)
        if tile.parallel:
            sch.parallel(job)
        if found.spread:
            self._spread(sch, job, innermost_tile)
        if is_long:  # after all tiles of a job, in a loop that is there once
            last = sch.get_sblock(found.epilogue[-1])
            sch.reverse_compute_at(last, job)
            vectorize_innermost(sch, last, self._widest)
        if found.producers:
            pad = sch.get_sblock(found.producers[-1])
            if tile.pad_at == "inline":
                sch.compute_inline(pad)
            else:
                sch.compute_at(pad, tiles[0] if tile.pad_at == "row" and tiles else job)
                vectorize_innermost(sch, pad, self._widest)
        if self._writes_out:  # each sum of a tile is a register of its own
            for loop in (*(sums if self._is_short(tile) else ()), *inner, vector):
                sch.unroll(loop)
        self._make_vector(sch, lane)
        # Sums are cleared before the first term: a condition in the loop would be asked for each.
        init = sch.decompose_reduction(block, sums[0])
        depth = len(sch.get_loops(write)) - len(inside(sch, write, innermost_tile))
        for loops in (sch.get_loops(init)[depth:], sch.get_loops(write)[depth:]):
            write_out(sch, loops if self._writes_out else loops[-1:], tile.lanes)
        return sch

    def _sums(self, sch: Schedule) -> SBlockRV:
        """The block that is tiled."""
        return sch.get_sblock(self._contraction.block)

    def _packed(self, _sch: Schedule, sums: list[LoopRV], _tile: RegisterTile) -> tuple[list[LoopRV], list[LoopRV]]:
        """The loops over what is summed, and those of them that are inside of a vector."""
        return sums, []

    def _make_vector(self, sch: Schedule, lane: LoopRV) -> None:
        sch.vectorize(lane)

    def _spread(self, sch: Schedule, _job: LoopRV, _tile: LoopRV) -> None:
        """Computes what has more elements than there are sums after all jobs, as it may need the sums of any."""
        *others, block = map(sch.get_sblock, self._contraction.spread)
        for other in others:
            sch.compute_inline(other)
        outer = sch.get_loops(block)[:-1]
        num_elements = prod(int(sch.get(loop).extent) for loop in sch.get_loops(block))
        vectorize_innermost(sch, block, self._widest)
        if outer and self._machine.num_threads > 1 and num_elements >= MIN_PARALLEL:
            sch.parallel(sch.fuse(*outer))

    def _is_short(self, tile: RegisterTile) -> bool:
        """Whether all terms of a tile's sums are written out, in each of its copies."""
        columns = self._axes.columns if self._axes.columns % tile.columns else tile.columns
        num_terms = prod(self._axes.sums) * tile.vectors * tile.rows * columns
        return self._contraction.broadcast is None and num_terms <= _MAX_UNROLLED

    def _split(
        self, sch: Schedule, spatial: Sequence[LoopRV], tile: RegisterTile
    ) -> tuple[list[LoopRV], list[LoopRV], list[LoopRV]]:
        """Splits rows and columns into the loops over jobs, over the tiles of a job, and inside of a tile."""
        jobs, tiles, inner = [], [], []
        for axis, size, per_job in (
            (self._axes.row_axis, tile.rows, tile.row_tiles),
            (self._axes.column_axis, tile.columns, tile.column_tiles),
        ):
            if axis is None:
                continue
            if per_job:
                job, tile_loop, inside = sch.split(spatial[axis], [None, per_job, size])
                jobs.append(job)
            else:
                tile_loop, inside = sch.split(spatial[axis], [None, size])
            if self._contraction.spatial[axis] % size:
                # Only the last of its copies has a rest, which is known then; for TVM's `LoopPartition` a build needs
                # an option, which records could not say.
                sch.unroll(tile_loop)
            tiles.append(tile_loop)
            inner.append(inside)
        return jobs, tiles, inner


class IntegerTiling(RegisterTiling):
    """The sketch for sums of products of 8 bits, of which an instruction adds four to each element of a vector.

    To the estimate, a pack of numbers that follow each other is one of 32 bits.
    """

    name = "integer tile"
    _max_epilogue = MAX_EPILOGUE + 4  # zero points and scales come before what follows a product of floats
    _dtypes: ClassVar = {("uint8", "int8"): PACK}
    """Types of data and weights, and how many of them are a pack."""

    def __init__(self, mod: IRModule, contraction: Contraction, machine: Machine) -> None:
        super().__init__(mod, contraction, machine)
        if machine.has_narrow_products:
            self._registers -= NARROW_REGISTERS
            self._estimate = Estimate(contraction, self._axes, machine, num_operations=NARROW_OPERATIONS)

    @classmethod
    def find(cls, mod: IRModule, machine: Machine) -> IntegerTiling | None:
        """The sketch for a task's function; None where it is another sum, or the CPU has no such instruction."""
        found = find_contraction(mod)
        if found is None or not cls._is_for(machine) or found.broadcast is None or found.shared is None:
            return None
        pack = cls._dtypes.get((found.broadcast.dtype, found.shared.dtype))
        last = len(found.spatial) + len(found.reduction) - 1
        if pack is None or found.broadcast.stride(last) != 1 or found.reduction[-1] % pack:
            return None
        if power_of_two(found.group, machine.lanes(found.num_bytes)) < _MIN_LANES:
            return None
        if not is_layout_free(mod, found.shared.buffer):  # a pack of weights would be at as many places
            return None
        operands = tuple(_in_packs(operand, last, pack) for operand in found.operands)
        reduction = (*found.reduction[:-1], found.reduction[-1] // pack)
        return cls(mod, replace(found, operands=operands, reduction=reduction), machine)

    @classmethod
    def _is_for(cls, machine: Machine) -> bool:
        """Whether a CPU has the instruction."""
        return machine.has_dot_products

    def _micro_tiles(self) -> Iterator[tuple[int, int, int, int]]:
        return (micro for micro in super()._micro_tiles() if micro[0] >= _MIN_LANES)

    def _pad_places(self, _rows: int) -> list[PadAt]:
        return ["job", "row"] if self._contraction.has_padding else ["inline"]  # a pack is read as it is in memory

    def _packed(self, sch: Schedule, sums: list[LoopRV], _tile: RegisterTile) -> tuple[list[LoopRV], list[LoopRV]]:
        outer, pack = sch.split(sums[-1], [None, self._pack])
        return [*sums[:-1], outer], [pack]

    @property
    def _pack(self) -> int:
        data, weights = self._contraction.broadcast, self._contraction.shared
        assert data is not None
        assert weights is not None
        return self._dtypes[data.dtype, weights.dtype]

    def _make_vector(self, sch: Schedule, lane: LoopRV) -> None:
        sch.annotate(lane, DOT_PRODUCTS, 1)


class PairTiling(IntegerTiling):
    """The sketch for sums of products of bfloat16, of which an instruction adds two to each element of a vector."""

    name = "pair tile"
    _dtypes: ClassVar = {("bfloat16", "bfloat16"): PACK // 2}

    @classmethod
    def _is_for(cls, machine: Machine) -> bool:
        return machine.has_pair_products


class MatrixTiling(IntegerTiling):
    """The sketch for the same sums, and those of products of bfloat16, on a CPU with AMX, which has tiles of 16
    vectors, and multiplies two of them.

    A column is a row of a tile, so that a tile in registers has up to 48 of them.
    """

    name = "matrix tile"
    _max_epilogue = 64
    _writes_out = False
    _dtypes: ClassVar = {**IntegerTiling._dtypes, **PairTiling._dtypes}

    def __init__(self, mod: IRModule, contraction: Contraction, machine: Machine) -> None:
        super().__init__(mod, contraction, machine)
        self._estimate = TileEstimate(contraction, self._axes, machine)

    @classmethod
    def find(cls, mod: IRModule, machine: Machine) -> MatrixTiling | None:
        """The sketch for a task's function; None where vectors serve as well, as of a single row."""
        found = super().find(mod, machine)
        if found is None:
            return None
        tiling = cls(mod, _along_columns(found._contraction), machine)
        return tiling if any(tiling._micro_tiles()) else None

    def _micro_tiles(self) -> Iterator[tuple[int, int, int, int]]:
        axes = self._axes
        if self._contraction.group % TILE_ROWS or most_packs(axes.sums[-1]) < _MIN_PACKS[self._pack]:
            return
        sizes = itertools.product(range(1, MAX_VECTORS + 1), range(_MIN_HEIGHT, _MAX_TILES_OF_DATA * TILE_ROWS + 1))
        for vectors, columns in sizes:
            for rows in divisors(axes.rows, _MAX_TILES_OF_DATA):
                num_data = rows * ceil(columns / TILE_ROWS)
                fits = num_data * (vectors + 1) < NUM_TILES and columns <= axes.columns
                is_even = all(
                    extent % max(1, ceil(extent / TILE_ROWS)) == 0 for extent in (columns, axes.columns % columns)
                )
                are_few = axes.columns % columns == 0 or axes.columns // columns < MAX_COPIES
                if fits and is_even and are_few and self._contraction.group % (TILE_ROWS * vectors) == 0:
                    yield TILE_ROWS, vectors, columns, rows

    @classmethod
    def _is_for(cls, machine: Machine) -> bool:
        return machine.has_matrix_tiles

    def _packed(self, sch: Schedule, sums: list[LoopRV], tile: RegisterTile) -> tuple[list[LoopRV], list[LoopRV]]:
        *others, last = sums
        last, pack = sch.split(last, [None, self._pack])
        if len(sums) > len(self._axes.sums):  # see `_along_columns`
            last = sch.fuse(others.pop(), last)
        terms = [*others, *sch.split(last, [None, most_packs(self._axes.sums[-1])])]
        num_passes = tile.row_tiles * (tile.column_tiles or ceil(self._axes.columns / tile.columns))
        sch.annotate(terms[0], MATRIX_TILES, num_passes)
        return terms, [pack]

    def _make_vector(self, sch: Schedule, lane: LoopRV) -> None:
        """Vectors are the rows of a tile."""

    def is_fast(self, tile: RegisterTile) -> bool:  # noqa: ARG002
        return True


def _in_packs(operand: Operand, axis: int, pack: int) -> Operand:
    """An array whose elements along an iterator are packs."""
    dims = zip(operand.shape, operand.strides, strict=True)
    return replace(operand, shape=tuple(extent // pack if strides[axis] else extent for extent, strides in dims))


def _along_columns(contraction: Contraction) -> Contraction:
    """Sums of few packs, as of an image, as those of the packs of neighbours, which follow each other in a row."""
    *others, neighbours, packs = 1, *contraction.reduction
    last = len(contraction.spatial) + len(contraction.reduction) - 1
    data = contraction.broadcast
    if data is None or not others or packs > _FEW_PACKS or data.stride(last - 1) != packs:
        return contraction
    # the iterator of all these packs takes the place of that of the neighbours
    operands = tuple(
        replace(operand, strides=tuple((*of_dim[: last - 1], of_dim[last]) for of_dim in operand.strides))
        for operand in contraction.operands
    )
    return replace(contraction, operands=operands, reduction=(*others[1:], neighbours * packs))


class DotTiling(RegisterTiling):
    """The sketch for sums of which there is one for each column, such as a convolution to a single channel.

    Vectors are along what is summed: a column has a vector of partial sums, which are added up at the end of a tile.
    """

    name = "dot product"

    def __init__(
        self, mod: IRModule, contraction: Contraction, machine: Machine, sums: Contraction, packed: str
    ) -> None:
        super().__init__(mod, contraction, machine)
        self._whole, self._packed_buffer = sums, packed
        """The function's own sums, and the weights that are packed along them; none, where they need not be."""

    @classmethod
    def find(cls, mod: IRModule, machine: Machine) -> DotTiling | None:
        """The sketch for a task's function; None where vectors of channels serve as well, or none of sums would."""
        from tvm.s_tir import Schedule

        sums = find_contraction(mod)
        if sums is None or sums.spread or power_of_two(sums.group, machine.lanes(sums.num_bytes)) > _MAX_CHANNELS:
            return None
        sch = Schedule(mod)
        # Weights of a few channels, such as those of an image, are packed along what is summed.
        weights, packed = sums.shared, ""
        if weights is not None and sums.spatial[-1] <= _FEW_CHANNELS and is_layout_free(mod, weights.buffer):
            packed = weights.buffer
        try:
            block = _partial_sums(sch, sums, machine.lanes(sums.num_bytes), packed)
        except RuntimeError:  # TVM cannot split such a sum, though its checks let it pass
            return None
        if block is None:
            return None
        partial = find_contraction(sch.mod, str(sch.get(block).name_hint), packed)
        return None if partial is None else cls(mod, partial, machine, sums, packed)

    def _jobs(self, micro: tuple[int, int, int, int]) -> Iterator[RegisterTile]:
        """A job has all elements of a vector: two jobs with half of them each would add to one sum at once."""
        for tile in super()._jobs(micro):
            if tile.channel_tiles * tile.vectors * tile.lanes >= self._axes.channels:
                yield tile

    def _sums(self, sch: Schedule) -> SBlockRV:
        block = _partial_sums(sch, self._whole, self._widest, self._packed_buffer)
        assert block is not None
        return block

    def _spread(self, sch: Schedule, job: LoopRV, tile: LoopRV) -> None:
        """Adds the elements of each vector up, and goes on with these sums after the tiles of a job."""
        total, *others = map(sch.get_sblock, self._contraction.spread)
        (partial,) = sch.get_producers(total)
        sch.set_scope(partial, 0, "local")
        sch.reverse_compute_at(total, tile)
        lane, *columns = inside(sch, total, tile)
        sch.reorder(*columns, lane)
        sch.unroll(lane)
        for other in others[:-1]:
            sch.compute_inline(other)
        if others:
            sch.reverse_compute_at(others[-1], job)


def _partial_sums(sch: Schedule, sums: Contraction, widest: int, packed: str) -> SBlockRV | None:
    """Makes vectors of sums along a summed axis, whose block is returned; None where no axis is long enough."""
    num_spatial, num_terms = len(sums.spatial), prod(sums.reduction)
    for place, extent in enumerate(sums.reduction):
        lanes = power_of_two(extent, widest)
        follows = all(operand.buffer == packed or operand.stride(num_spatial + place) == 1 for operand in sums.operands)
        if lanes < _MIN_LANES or num_terms < _MIN_VECTORS * lanes or not follows or len(sums.operands) < 2:
            continue
        loops = sch.get_loops(sch.get_sblock(sums.block))
        block = sch.rfactor(sch.split(loops[num_spatial + place], [None, lanes])[1], num_spatial)
        # As in any sum that is tiled, the iterator of the vectors comes after the others of the output.
        kinds = [int(var.iter_type) for var in sch.get(block).iter_vars]
        first, *others = range(len(kinds))
        sch.reorder_block_iter_var(block, [*others[:num_spatial], first, *others[num_spatial:]])
        summed = list(sch.get_loops(block)[num_spatial:])
        sch.reorder(summed.pop(place + 1), *summed)
        return block
    return None
