"""The CPU as a kernel sees it, and how long a tile takes on it without a measurement.

The estimate decides in which order tiles get trials, and what is taken without any.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from math import ceil, prod
from typing import TYPE_CHECKING

from ansor_mlflow.codegen import TILE_ROWS
from ansor_mlflow.device import (
    WEIGHT_BITS,
    cpu_features,
    has_dot_products,
    has_matrix_tiles,
    has_pair_products,
    vector_lanes,
    weight_bits,
)

if TYPE_CHECKING:
    from tvm.target import Target

    from ansor_mlflow.sketches.contraction import Contraction, Operand
    from ansor_mlflow.sketches.tile import RegisterTile, TiledAxes

L1_BYTES, L2_BYTES = 24 * 1024, 384 * 1024
"""Bytes of weights that stay in a cache: three quarters of the smallest ones that servers have, as the input passes
through them, too."""
_L2_BYTES_OF_WIDE = 768 * 1024
"""Bytes of weights that stay in the second cache of CPUs with two wide units, which have a mebibyte at least."""
_LARGEST_L2_BYTES = 2048 * 1024
"""Bytes of weights that stay in the second cache of no server."""

LINE_BYTES, _WAY_BYTES = 64, 4096
"""Size of a line of the first cache, and the distance at which lines fall into the same set, which holds eight."""

_CYCLES_PER_ELEMENT = ((4, 0.5), (7, 1.0), (math.inf, 3.5))
"""Cycles to load an element of the input, for up to so many elements of a tile in one set of the first cache. Weights
pass through the set, too, and what they displace comes from the second cache: seven cost little, fourteen take almost
twice the time of the sums."""
_BROADCAST_CYCLES = 0.5
"""Cycles to fill a vector with an element, where a multiply-add cannot do that while it reads, as with AVX2."""
_CONDITION_CYCLES = 0.75
"""Cycles to find out whether such an element is padding: longer than to copy it once."""
_REGISTERS_TO_ASK = 3
"""Registers beside sums and weights where an element may be padding: itself, zeros, and what both become."""
_SPILL_CYCLES = 17.0
"""Cycles of a step with more than fits into registers, as a sum is stored, loaded and added to."""
_ASK_CYCLES = 0.7
"""Cycles of a step's branches around what may be padding."""
LOADS_OF_WIDE = 1.4
"""How much longer loads take than their number, where they are as many as multiply-adds of two wide units."""
_MISS_CYCLES = 2.0
"""Cycles that a vector from the second cache takes longer than one from the first."""
NARROW_OPERATIONS = 2.0
"""Number of multiply-adds that take as long as the two products and the addition of AVX2, where two units multiply."""
_FMA_LATENCY = 4
"""Cycles until a sum can be added to again: a tile of fewer sums waits."""
_TILE_LATENCY = 44.0
"""Cycles until the sums of AMX's tiles can be added to again."""
_CONFIGURE_CYCLES = 400.0
"""Cycles to configure such tiles, and to release them."""
_CYCLES_AT_END = 8.0
"""Cycles to store a vector of sums from a tile, and to write what becomes of it."""
LAUNCH_CYCLES = 6000
"""Cycles to start a parallel loop: two microseconds at 3 GHz, of one to three that were measured."""
_JOB_CYCLES = 400
"""Cycles that a thread takes from one job to the next."""
_BYTES_PER_CYCLE = {"l2": 32.0, "memory": 8.0, "copy": 12.0}
"""Bytes that a core reads in a cycle from the second cache and from memory, and that it copies while it pads."""
_STALL, _STALL_AGAIN = 0.5, 0.3
"""Share of the time to read that a core waits, the first time and later: prefetching hides the rest."""

_MANY_REGISTERS = {"avx512f", "neon", "v"}
"""Features with which there are 32 vector registers; 16 without any of them."""


@dataclass(frozen=True)
class Machine:
    """A CPU as a kernel sees it."""

    vector_bytes: int
    """Width of a vector register."""
    num_registers: int
    broadcasts_operands: bool
    """Whether a multiply-add reads an element from memory for all lanes."""
    num_threads: int
    has_dot_products: bool = False
    """Whether four products of bytes are added to each element of a vector."""
    has_narrow_products: bool = False
    """Whether that is two products and an addition, with weights of 7 bits."""
    has_pair_products: bool = False
    """Whether one adds two products of bfloat16."""
    has_matrix_tiles: bool = False
    """Whether an instruction multiplies two matrices of 8 bits."""
    vector_cycles: float = 1.0
    """Cycles from one operation on a vector of 64 bytes to the next."""
    l2_bytes: int = L2_BYTES
    """Bytes of weights that stay in the second cache."""

    @staticmethod
    def of(target: Target) -> Machine:
        features = set(cpu_features(target))
        is_wide = _has_two_wide_units(features)
        return Machine(
            vector_bytes=4 * vector_lanes(target),
            num_registers=16 if features.isdisjoint(_MANY_REGISTERS) else 32,
            broadcasts_operands="sse2" not in features or "avx512f" in features,  # Arm's and RISC-V's all do
            num_threads=int(target.attrs.get("num-cores", 1)),
            has_dot_products=has_dot_products(target),
            has_narrow_products=0 < weight_bits(target) < WEIGHT_BITS,
            has_pair_products=has_pair_products(target),
            has_matrix_tiles=has_matrix_tiles(target),
            vector_cycles=0.5 if is_wide else 1.0,
            l2_bytes=_L2_BYTES_OF_WIDE if is_wide else L2_BYTES,
        )

    @property
    def is_wide(self) -> bool:
        """Whether it begins two operations on the widest vectors in a cycle, so that other things decide sooner."""
        return self.vector_cycles < 1

    def cycles_of_vector(self, num_bytes: int) -> float:
        """Cycles of an operation on a vector of so many bytes: two narrow ones are begun in a cycle."""
        return max(0.5, num_bytes / 64 * self.vector_cycles)

    def lanes(self, num_bytes: int) -> int:
        """Elements of so many bytes in a vector register."""
        return self.vector_bytes // num_bytes


def _has_two_wide_units(features: set[str]) -> bool:
    """Whether a CPU begins two operations on vectors of 64 bytes in a cycle, as Intel's servers and Zen 5 do.

    Zen 4 begins one. Of AMD's CPUs, which alone have SSE4a, it has AVX-512 without AVX-VNNI.
    """
    return "avx512f" in features and ("sse4a" not in features or "avxvnni" in features)


class Estimate:
    """Estimates the cycles of a function's tiles on a CPU, which adds to a sum in the time of `num_operations`."""

    def __init__(
        self, contraction: Contraction, axes: TiledAxes, machine: Machine, *, num_operations: float = 1.0
    ) -> None:
        self._contraction, self._axes, self._machine = contraction, axes, machine
        self._num_operations = num_operations
        self.cycles_of_sums = cache(self._count_cycles)
        """Cycles of all sums for lanes, vectors, columns and rows of a tile in registers, on one thread; many tiles
        that differ in their jobs share it."""

    def cycles(self, tile: RegisterTile) -> float:
        num_jobs, threads = self._axes.num_jobs(tile), self._num_threads(tile)
        micro = (tile.lanes, tile.vectors, tile.columns, tile.rows)
        asks = self._contraction.has_padding and tile.pad_at == "inline"
        job = self.cycles_of_sums(micro, asks) / num_jobs
        job = job + self._cycles_of_weights(tile) + self._cycles_of_padding(tile)
        to_read = self._cycles_to_read(tile) + self._cycles_to_read_again(tile)
        if not tile.parallel:
            return num_jobs * job + to_read
        # TVM gives every thread as many jobs before it starts: all wait for the one with the most.
        return ceil(num_jobs / threads) * (job + _JOB_CYCLES) + to_read + LAUNCH_CYCLES

    def _num_threads(self, tile: RegisterTile) -> int:
        return self._machine.num_threads if tile.parallel else 1

    def _cycles_to_read(self, tile: RegisterTile) -> float:
        """Cycles that a thread waits for input and weights when it reads them for the first time.

        A thread gets jobs that follow each other. So it reads its share of what the outer loop over jobs divides, and
        all of what the inner one does, unless there are fewer outer jobs than threads.
        """
        found, threads = self._contraction, self._num_threads(tile)
        # Jobs over channels divide the weights, those over rows and columns the input.
        outer = (self._axes.num_channel_jobs(tile), found.shared)
        inner = (self._axes.num_spatial_jobs(tile), found.broadcast)
        if not tile.channels_outside:
            outer, inner = inner, outer
        shares = (min(outer[0], threads), min(inner[0], ceil(threads / outer[0])))
        operands = zip((outer[1], inner[1]), shares, strict=True)
        num_elements = sum(prod(operand.shape) / share for operand, share in operands if operand is not None)
        return _STALL * num_elements * found.num_bytes / _BYTES_PER_CYCLE["memory"]

    def _cycles_to_read_again(self, tile: RegisterTile) -> float:
        """Cycles that a thread waits for input that it has read before, for other channels, and that no cache holds."""
        found, axes = self._contraction, self._axes
        if found.broadcast is None:
            return 0.0
        num_bytes = prod(found.broadcast.shape) * found.num_bytes
        channel_jobs, spatial_jobs = axes.num_channel_jobs(tile), axes.num_spatial_jobs(tile)
        fits = num_bytes / spatial_jobs <= self._machine.l2_bytes
        # Jobs that follow each other share the channels, or, with the channels inside, the input.
        times = channel_jobs if not fits or (tile.channels_outside and spatial_jobs > 1) else 1
        times *= 1 if fits else tile.channel_tiles
        # Threads divide the passes over the input among them, or else the input.
        return _STALL * (times - 1) * num_bytes / self._num_threads(tile) / _BYTES_PER_CYCLE["memory"]

    def _cycles_of_weights(self, tile: RegisterTile) -> float:
        """Cycles that a job waits for weights: less where they stay in a cache for all of its rows and columns."""
        if self._contraction.shared is None:
            return 0.0
        axes = self._axes
        num_bytes = tile.lanes * tile.vectors * prod(axes.sums) * self._contraction.num_bytes
        columns = tile.column_tiles or ceil(axes.columns / tile.columns)
        # What the first cache holds is read once for all tiles of a job, what it does not once for each of them.
        times = 1 if num_bytes <= L1_BYTES else tile.row_tiles * columns
        level = "l2" if num_bytes <= self._machine.l2_bytes else "memory"
        of_job = tile.channel_tiles * num_bytes
        waits = times * of_job / _BYTES_PER_CYCLE[level]
        # Weights that no second cache holds come from memory again, for each job but the first over its channels.
        if level == "l2" and of_job >= _LARGEST_L2_BYTES:
            again = 1 - 1 / axes.num_spatial_jobs(tile)
            waits += again * of_job * (1 / _BYTES_PER_CYCLE["memory"] - 1 / _BYTES_PER_CYCLE["l2"])
        return _STALL_AGAIN * waits

    def _cycles_of_padding(self, tile: RegisterTile) -> float:
        """Cycles in which a job copies its input."""
        if tile.pad_at == "inline":
            return 0.0
        kernel = self._axes.sums[0] if len(self._axes.sums) > 1 else 1
        # Padding at a row is done again for each tile of channels; neighbours share kernel - 1 rows of input.
        rows = tile.rows * tile.row_tiles if tile.pad_at == "job" else tile.rows
        copies = 1 if tile.pad_at == "job" else tile.channel_tiles * tile.row_tiles
        row_bytes = self._axes.columns * self._axes.sums[-1] * self._contraction.num_bytes
        return copies * (rows + kernel - 1) * row_bytes / _BYTES_PER_CYCLE["copy"]

    def _count_cycles(self, micro: tuple[int, int, int, int], asks: bool = False) -> float:
        """Cycles of all sums for a tile in registers, on one thread; `asks` tells whether elements may be padding."""
        lanes, vectors, columns, rows = micro
        axes = self._axes
        num_tiles = ceil(axes.channels / (lanes * vectors)) * (axes.rows // rows)
        full, rest = divmod(axes.columns, columns)
        # A narrower last tile costs more per sum: its loads serve fewer of them.
        per_row = full * self._cycles_of_tile(lanes, vectors, columns, rows, asks)
        if rest:
            per_row += self._cycles_of_tile(lanes, vectors, rest, rows, asks)
        return axes.outer * num_tiles * per_row

    def _cycles_of_tile(self, lanes: int, vectors: int, columns: int, rows: int, asks: bool) -> float:
        """Cycles of the sums of one tile: as many as its multiply-adds take, its loads, or waiting for them."""
        width = self._machine.cycles_of_vector(lanes * self._contraction.num_bytes)
        sums = vectors * columns * rows
        shared = 0.0 if self._contraction.shared is None else vectors * width
        broadcast = self._contraction.broadcast
        if broadcast is None:
            loads, misses = (vectors * width * number for number in self._count_vectors(columns, rows))
            loads += shared
        else:  # each element of the input fills a vector, and serves for all vectors of channels
            loads, misses = shared + columns * rows * self._cycles_of_element(broadcast, columns, rows, asks), 0.0
        # Multiply-adds, loads and the wait for the last sums overlap: the longest decides, and of two tiles that are
        # equal in it the one with fewer loads. Sums are cleared before and written after, some four cycles each.
        is_wide = self._machine.is_wide  # slower multiply-adds leave time for what follows
        if is_wide and broadcast is not None:
            loads *= LOADS_OF_WIDE
        step = max(sums * width * self._num_operations, loads, _FMA_LATENCY) + 0.05 * loads + _MISS_CYCLES * misses
        if is_wide and broadcast is not None and asks:
            spills = sums + vectors + _REGISTERS_TO_ASK > self._machine.num_registers
            step = max(step, _SPILL_CYCLES if spills else 0.0) + _ASK_CYCLES
        # What is written needs a bias for each vector, and what it is compared with.
        spills_at_end = is_wide and sums + 2 * vectors + 2 > self._machine.num_registers
        return prod(self._axes.sums) * step + (2 if spills_at_end else 1) * 4 * sums

    def _count_vectors(self, columns: int, rows: int) -> tuple[float, float]:
        """Vectors of the input that a tile reads for a term of its sums, and those that displace each other."""
        found = self._contraction
        data = found.operands[0]
        # Without a padded copy, distances in memory are those of the input itself.
        if found.unpadded and len(found.unpadded) == len(data.shape):
            data = replace(data, shape=found.unpadded)
        axes = [(self._axes.row_axis, rows), (self._axes.column_axis, columns)]
        axes += [(len(found.spatial) + number, extent) for number, extent in enumerate(found.reduction)]
        places = {0}  # as a set: windows of neighbours overlap, and what they share is loaded once
        for stride, extent in ((data.stride(axis), extent) for axis, extent in axes if axis is not None):
            places = {place + number * stride for place in places for number in range(extent)}
        sets = Counter(place * found.num_bytes % _WAY_BYTES // LINE_BYTES for place in places)
        most = _CYCLES_PER_ELEMENT[1][0]
        num_missed = sum(number for number in sets.values() if number > most)
        return len(places) / prod(found.reduction), num_missed / prod(found.reduction)

    def _cycles_of_element(self, data: Operand, columns: int, rows: int, asks: bool) -> float:
        """Cycles to load an element of the input: more where those of a tile displace each other in the first cache."""
        size = self._contraction.num_bytes
        column_bytes = 0 if self._axes.column_axis is None else data.stride(self._axes.column_axis) * size
        row_bytes = 0 if self._axes.row_axis is None else data.stride(self._axes.row_axis) * size
        # Elements at a distance of a multiple of 4 KiB, as in a layer with 1,024 channels, share a set.
        places = itertools.product(range(rows), range(columns))
        sets = Counter((row * row_bytes + column * column_bytes) % _WAY_BYTES // LINE_BYTES for row, column in places)
        cycles = next(cycles for most, cycles in _CYCLES_PER_ELEMENT if max(sets.values()) <= most)
        if self._machine.broadcasts_operands:
            return cycles
        return cycles + _BROADCAST_CYCLES + (_CONDITION_CYCLES if asks else 0)


class TileEstimate(Estimate):
    """Estimates the cycles of functions whose sums are in the tiles of AMX.

    Measured on Sapphire Rapids: a product takes a cycle for each row of sums, however few its terms are, and waits 44
    for the one before it that adds to the same sums; two rows are loaded in a cycle.
    """

    def _count_cycles(self, micro: tuple[int, int, int, int], asks: bool = False) -> float:
        lanes, vectors, columns, rows = micro
        full, rest = divmod(self._axes.columns, columns)
        num_tiles = ceil(self._axes.channels / (lanes * vectors)) * (self._axes.rows // rows) * (full + 1)
        # Where the last tile of a row is narrower, the tiles are configured for each.
        return super()._count_cycles(micro, asks) + (_CONFIGURE_CYCLES * self._axes.outer * num_tiles if rest else 0.0)

    def _cycles_of_tile(self, lanes: int, vectors: int, columns: int, rows: int, asks: bool) -> float:  # noqa: ARG002
        packs = most_packs(self._axes.sums[-1])
        loads = 0.6 * (rows * columns + packs * vectors)
        step = max(1.2 * rows * columns * vectors, _TILE_LATENCY, loads) + 0.2 * loads
        return prod(self._axes.sums) // packs * step + _CYCLES_AT_END * rows * columns * vectors


def most_packs(extent: int) -> int:
    """The most packs that follow each other in all rows of a tile, of so many that are summed."""
    return max(number for number in range(1, TILE_ROWS + 1) if extent % number == 0)
