"""Functions that work on one row after the other: softmax, layer normalisation, and what only moves or maps elements.

    parallel over rows
      for each block                        in the order of the function
        the elements of a row               vectorised; code generation makes sums of vectors (`codegen.passes`)

Rows are the leading axes of the output. Of several outputs that share nothing, as of a split, each has its own.

A transposition reads from line to line of the cache along its rows, and takes one number of each. So it goes over a few
columns at a time, which the cache holds until all rows have read their part of them:

    parallel over all other axes and blocks of columns
      the rows that are contiguous where they are read
        the columns of a block              vectorised

Of an image with a few channels all are a block, so that the compiler makes vectors along its rows.

A softmax over another axis than the last has a sum for each column. It goes over a few columns at a time, too, and its
sums are vectors of them:

    parallel over all other axes that the sums share, and blocks of columns
      for each block of the function
        the terms
          the columns of a block            vectorised
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

from ansor_mlflow.sketches.estimate import Machine
from ansor_mlflow.sketches.tile import MIN_PARALLEL, divisors, inside, write_out

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.s_tir import Schedule
    from tvm.s_tir.schedule import LoopRV, SBlockRV

_SPATIAL = 0
_MAX_COPIES = 128
"""How many vectors of a row may be written out, as each is code."""
_LINE_ELEMENTS = 16
"""Elements of a line of the cache: about as many columns are a block of a transposition, which writes whole lines then,
while those that it reads stay in the first cache."""
_FEW_COLUMNS = 4
"""Channels of an image that are written out, whose elements LLVM interleaves."""
_COLUMN_ELEMENTS = 64
"""About as many columns are a block whose sums are taken over another axis: whole lines of the cache, and some vectors
whose sums do not wait for each other."""
_MANY_COLUMNS = 256
"""About as many they are where vectors are left to the compiler, which makes none of a short loop."""
_MAX_READS = 4
"""How often a sum may read an element: a pooling of 2 × 2 with a stride of 1 reads it four times."""

_FUNCTIONS = frozenset(f"tirx.{name}" for name in ("erf", "exp", "log", "pow", "sigmoid", "tanh"))
_MAX_NESTED = 1
"""Functions in what another one is computed of. Code generation writes out every use of it again while it simplifies:
a tanh of two sigmoids and a tanh, the end of a step of LSTM, took it eight seconds."""
_MIN_ROWS = 64
"""Rows that the threads of most machines share well enough."""


@dataclass(frozen=True, kw_only=True)
class RowTile:
    """The decisions of the sketch."""

    lanes: int
    """Elements of a vector; 1 leaves vectors to the compiler."""
    parallel: bool
    """Whether threads share the rows."""
    columns: int | None = None
    """Columns of a block of a transposition, or of sums over another axis; None for whole rows."""


class RowTiling:
    """The sketch for one function."""

    name = "rows"

    def __init__(self, mod: IRModule, machine: Machine) -> None:
        self._mod, self._machine = mod, machine

    @classmethod
    def find(cls, mod: IRModule, machine: Machine) -> RowTiling:
        """The sketch for any task's function."""
        return cls(mod, machine)

    def tiles(self) -> list[RowTile]:
        from tvm.s_tir import Schedule

        sch = Schedule(self._mod)
        extents = [int(var.dom.extent) for var in sch.get(_blocks(sch)[-1]).iter_vars]
        widest = self._machine.lanes(4)
        # One lane is last: the compiler then finds vectors itself, where a row is no multiple of them.
        lanes = [width for width in (widest, widest // 2, 1) if width and extents and extents[-1] % width == 0]
        is_large = prod(extents) >= MIN_PARALLEL
        by_row = [
            RowTile(lanes=width, parallel=parallel)
            for parallel in (is_large, not is_large)
            for width in dict.fromkeys([*lanes, 1])
        ]
        by_block = [*_blocked(Schedule(self._mod), extents[-1], lanes)] if is_large else []
        return [*by_block, *_in_columns(Schedule(self._mod), extents[-1], lanes, is_large), *by_row]

    def kind(self, tile: RowTile) -> object:
        """Every decision is of its own kind."""
        return tile

    def cycles(self, _tile: RowTile) -> float:
        """Infinite: these functions wait for memory, of which nothing is estimated."""
        return math.inf

    def is_fast(self, _tile: RowTile) -> bool:
        """Whether each sum reads an element about once, unlike a convolution's."""
        from tvm.s_tir import Schedule

        sch = Schedule(self._mod)
        for block in filter(_is_sum, map(sch.get, _blocks(sch))):
            num_read = max((prod(int(extent) for extent in read.source.shape) for read in block.reads), default=0)
            if prod(int(var.dom.extent) for var in block.iter_vars) > _MAX_READS * num_read:
                return False
        return True

    def schedule(self, tile: RowTile) -> Schedule:
        from tvm.s_tir import Schedule

        sch = Schedule(self._mod)
        _inline(sch)
        blocks = _blocks(sch)
        if tile.columns is not None:
            _schedule_columns(sch, tile)
            return sch
        if len(blocks) > 1 and not any(map(sch.get_consumers, blocks)):  # one for each result, as of a split
            for block in blocks:
                loops = list(sch.get_loops(block))
                num_rows = min(_num_leading(sch.get(block)), len(loops) - 1)
                if num_rows > 0 and tile.parallel:
                    sch.parallel(sch.fuse(*loops[:num_rows]))
                _vectorize(sch, block, tile.lanes, num_rows)
            return sch
        *others, last = blocks
        num_rows = min([_num_rows(sch.get(block), sch.get(last)) for block in others or [last]])
        loops = list(sch.get_loops(last))
        if num_rows > 0:
            row = sch.fuse(*loops[:num_rows])
            if tile.parallel:
                sch.parallel(row)
            # The last one first: a block can be moved only when all that read it are there.
            for block in reversed(others):
                sch.compute_at(block, row)
        for block in others:
            if not _is_sum(sch.get(block)):
                _vectorize(sch, block, tile.lanes, num_rows)
        _vectorize(sch, last, tile.lanes, num_rows)
        return sch


def _blocked(sch: Schedule, num_columns: int, lanes: Sequence[int]) -> list[RowTile]:
    """The tiles of a transposition, the block that is about as wide as a line first; none of another function."""
    _inline(sch)
    blocks = _blocks(sch)
    if len(blocks) > 1 or _row_read(sch.get(blocks[-1])) is None:
        return []
    if num_columns <= _FEW_COLUMNS:
        return [RowTile(lanes=1, parallel=True, columns=num_columns)]
    # Narrower blocks write parts of lines, wider ones lose what they read before all rows have used it.
    widths = range(_LINE_ELEMENTS // 2, 2 * _LINE_ELEMENTS + 1)
    sizes = [size for size in widths if num_columns % size == 0 and size % lanes[0] == 0]
    sizes.sort(key=lambda size: abs(size - _LINE_ELEMENTS))
    return [RowTile(lanes=lanes[0], parallel=True, columns=size) for size in sizes[:2]]


def _row_read(block: Any) -> int | None:
    """The iterator along which a transposition reads what is contiguous; None of any other block."""
    variables = [var.var for var in block.iter_vars]
    for read in filter(lambda read: len(read.region), block.reads):  # a scalar has no axes
        *others, row = [dim.min for dim in read.region]
        place = next((place for place, index in enumerate(others) if index.same_as(variables[-1])), None)
        if place is None or prod(int(extent) for extent in read.source.shape[place + 1 :]) < _LINE_ELEMENTS:
            continue
        found = next((place for place, var in enumerate(variables) if var.same_as(row)), None)
        if found is not None and not _is_sum(block):
            return found
    return None


def _schedule_columns(sch: Schedule, tile: RowTile) -> None:
    if (shared := _shared_axes(sch)) is None:
        _schedule_transposition(sch, _blocks(sch)[-1], tile)
    else:
        _schedule_sums(sch, shared, tile)


def _schedule_transposition(sch: Schedule, block: SBlockRV, tile: RowTile) -> None:
    *others, columns = sch.get_loops(block)
    row_read = _row_read(sch.get(block))
    assert row_read is not None
    row = others.pop(row_read)
    outer, inner = sch.split(columns, [None, tile.columns])
    jobs = [*others, outer]
    sch.reorder(*jobs, row, inner)
    job = sch.fuse(*jobs)
    if tile.parallel:
        sch.parallel(job)
    if tile.lanes > 1:
        sch.vectorize(sch.split(inner, [None, tile.lanes])[1])
    elif tile.columns is not None and tile.columns <= _FEW_COLUMNS:
        sch.unroll(inner)


def _in_columns(sch: Schedule, num_columns: int, lanes: Sequence[int], parallel: bool) -> list[RowTile]:
    """The tiles of a function with sums over another axis than the last one; none of another function."""
    _inline(sch)
    if _shared_axes(sch) is None:
        return []
    tiles = []
    for width, wanted in {lanes[0]: _COLUMN_ELEMENTS, 1: _MANY_COLUMNS}.items():
        sizes = [size for size in divisors(num_columns) if size % width == 0 and size > 1]
        sizes.sort(key=lambda size, wanted=wanted: abs(math.log(size / wanted)))  # type: ignore[misc]
        tiles += [RowTile(lanes=width, parallel=parallel, columns=size) for size in sizes[:2]]
    return tiles


def _shared_axes(sch: Schedule) -> list[int] | None:
    """The places of the last block's iterators for each of which there is a sum, the last one among them; None where
    sums are those of rows, or there are none.
    """
    *others, last = map(sch.get, _blocks(sch))
    sums = [block for block in others if _is_sum(block)]
    made = [write.source for block in sums for write in block.writes]
    variables = [var.var for var in last.iter_vars]
    shared: set[int] = set()
    for read in last.reads:
        if any(read.source.same_as(source) for source in made):
            indices = [dim.min for dim in read.region]
            shared |= {place for place, var in enumerate(variables) if any(map(var.same_as, indices))}
    extents = [int(var.dom.extent) for var in last.iter_vars]
    places = [place for place in sorted(shared) if extents[place] > 1]
    is_alike = all(
        _large(block.iter_vars[: _num_leading(block)]) in ([extents[place] for place in places], _large(last.iter_vars))
        for block in others
    )
    is_prefix = places == [place for place, extent in enumerate(extents) if extent > 1][: len(places)]
    if _is_sum(last) or is_prefix or not is_alike or len(extents) - 1 not in places:
        return None
    return places


def _large(variables: Sequence[Any]) -> list[int]:
    """The extents of iterators that have more than one value."""
    return [extent for var in variables if (extent := int(var.dom.extent)) > 1]


def _schedule_sums(sch: Schedule, shared: Sequence[int], tile: RowTile) -> None:
    *others, last = _blocks(sch)
    loops = list(sch.get_loops(last))
    *jobs, columns = [loops[place] for place in shared]
    terms = [loop for place, loop in enumerate(loops) if place not in shared]
    outer, inner = sch.split(columns, [None, tile.columns])
    sch.reorder(*jobs, outer, *terms, inner)
    job = sch.fuse(*jobs, outer)
    if tile.parallel:
        sch.parallel(job)
    for block in reversed(others):
        sch.compute_at(block, job)
    for block in others:
        *_, along = within = inside(sch, block, job)
        found = sch.get(block)
        if num_sums := len(_large(found.iter_vars[_num_leading(found) :])):
            along, over = within[-num_sums - 1], within[-num_sums:]
            sch.reorder(*over, along)
        write_out(sch, [along], tile.lanes)
        if num_sums:  # only a whole sum can be made of vectors
            write_out(sch, [sch.get_loops(sch.decompose_reduction(block, over[0]))[-1]], tile.lanes)
    write_out(sch, [inner], tile.lanes)


def _blocks(sch: Schedule) -> list[SBlockRV]:
    return list(sch.get_child_blocks(sch.get_sblock("root")))


def _num_leading(block: Any) -> int:
    """Iterators of the output before the first that is summed."""
    kinds = [int(var.iter_type) for var in block.iter_vars]
    return next((place for place, kind in enumerate(kinds) if kind != _SPATIAL), len(kinds))


def _num_rows(block: Any, last: Any) -> int:
    """Leading iterators that a block shares with the last one; one that is no sum leaves the last for vectors.

    That is the one before, where the last has a single element and rows are left to share out.
    """
    pairs = zip(block.iter_vars[: _num_leading(block)], last.iter_vars, strict=False)
    shared = itertools.takewhile(lambda pair: int(pair[0].dom.extent) == int(pair[1].dom.extent), pairs)
    extents = [int(var.dom.extent) for var in last.iter_vars]
    most = len(extents) - (not _is_sum(block))
    if most < len(extents) and extents[-1] == 1 and prod(extents[:-2]) >= _MIN_ROWS:
        most -= 1
    return min(len(list(shared)), most)


def _is_sum(block: Any) -> bool:
    return _num_leading(block) < len(block.iter_vars)


def _inline(sch: Schedule) -> None:
    """Computes elements where they are read: in one place, or in several if nothing is computed."""
    from tvm.ir import TensorLoad

    for block in _blocks(sch)[:-1]:
        consumers = [sch.get(consumer) for consumer in sch.get_consumers(block)]
        if _is_sum(sch.get(block)) or not consumers or any(map(_is_sum, consumers)):
            continue
        only_moves = isinstance(getattr(sch.get(block).body, "value", None), TensorLoad)
        if len(consumers) > 1 and not only_moves:
            continue
        if _num_functions(sch.get(block)) <= _MAX_NESTED or not any(map(_num_functions, consumers)):
            sch.compute_inline(block)


def _num_functions(block: Any) -> int:
    """How many functions such as exp are in an element of a block."""
    from tvm import ir
    from tvm_ffi import structural_walk

    found: list[Any] = []
    structural_walk(block.body, (ir.Call, lambda call: found.append(call) if _op_name(call) in _FUNCTIONS else None))
    return len(found)


def _vectorize(sch: Schedule, block: SBlockRV, lanes: int, num_rows: int) -> None:
    """Vectorises a row along the last iterator."""
    loops = list(sch.get_loops(block))
    if lanes > 1 and len(loops) > (1 if num_rows else 0) and _is_multiple(sch, loops[-1], lanes):
        vectors, lane = sch.split(loops[-1], [None, lanes])
        if int(sch.get(vectors).extent) <= _MAX_COPIES and _chooses_within(sch.get(block), lanes):
            sch.unroll(vectors)  # each vector knows then what it is made of
        sch.vectorize(lane)


def _is_multiple(sch: Schedule, loop: LoopRV, lanes: int) -> bool:
    """Whether a loop is made of whole vectors; one that is longer in some rows than in others is not."""
    from tvm import tirx

    extent = sch.get(loop).extent
    return isinstance(extent, tirx.IntImm) and int(extent) % lanes == 0


def _chooses_within(block: Any, lanes: int) -> bool:
    """Whether a condition may differ between the elements of a vector, as that of some concatenations.

    Where it is about a multiple of the vector's length, code generation makes it one for the whole vector.
    """
    from tvm import ir, tirx
    from tvm_ffi import structural_walk

    last = block.iter_vars[-1].var
    choices: list[Any] = []
    uses: list[Any] = []
    structural_walk(block.body, (ir.Call, choices.append))
    conditions = [call.args[0] for call in choices if _op_name(call).endswith("if_then_else")]
    for condition in itertools.filterfalse(partial(_is_of_vectors, last=last, lanes=lanes), conditions):
        structural_walk(condition, (tirx.Var, uses.append))
    return any(var.same_as(last) for var in uses)


def _is_of_vectors(condition: Any, *, last: Any, lanes: int) -> bool:
    """Whether a condition is the same for all elements of a vector."""
    from tvm import tirx

    is_limit = isinstance(condition, tirx.LE) and isinstance(condition.a, tirx.IntImm)
    return is_limit and condition.b.same_as(last) and int(condition.a) % lanes == 0


def _op_name(call: Any) -> str:
    return str(getattr(call.op, "name", ""))
