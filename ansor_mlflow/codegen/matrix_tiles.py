"""The tiles of AMX: products of matrices of bytes or bfloat16, which stay loops in stock TVM and on other CPUs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

from ansor_mlflow.codegen.instructions import PACK_BYTES, Product, distances, first_place, nested, product_in
from ansor_mlflow.device import TILES_REQUEST, has_matrix_tiles

MATRIX_TILES = "ansor_mlflow.matrix_tiles"
"""Annotation of the outermost loop over what is summed, around loops that are products of tiles: in how many of them a
panel of weights is used, each of which fetches a share of the next panel; 1 where none is fetched."""
TILE_ROWS = 16
"""Rows of a tile, each of 64 bytes: 16 sums, or 16 packs."""
NUM_TILES = 8
_ROW_BYTES = 64
_BEYOND_FIRST_CACHE = 2
"""Where a panel is fetched to: the first cache has no place for two."""


@dataclass(frozen=True)
class _TileAxis:
    """A loop, with the distances in memory from one iteration to the next, in elements."""

    variable: Any
    extent: int
    sums: int
    data: int
    weights: int


@dataclass(frozen=True)
class _TileProduct:
    """A product of matrices by tiles, whose sums stay in them."""

    factors: Product
    columns: _TileAxis
    """The rows of the data's tiles, and of those of sums."""
    rows: tuple[_TileAxis, ...]
    """What else of the output has data of its own."""
    vectors: tuple[_TileAxis, ...]
    """What of the output has weights of its own, 16 channels each."""
    packs: _TileAxis
    """What is summed by one instruction."""
    terms: tuple[_TileAxis, ...]
    """What is summed besides, in loops."""
    inner: tuple[Any, ...]
    """Variables of all other loops."""

    @staticmethod
    def of(loop: Any) -> _TileProduct | None:
        """The product that nested loops are; None of others, and of those that need more tiles than there are."""
        extents, factors = product_in(loop) or ({}, None)
        if factors is None:
            return None
        variables, pack = list(extents), factors.pack
        found = factors.strides(variables)
        strides = [of_load for of_load in found if of_load is not None]
        if not variables or len(strides) != len(found):
            return None
        of_axes = zip(*strides, strict=True)
        axes = [_TileAxis(var, extents[var], *each) for var, each in zip(variables, of_axes, strict=True)]
        by_kind = {axis: (axis.extent, axis.sums, axis.data, axis.weights) for axis in axes}
        inside = [axis for axis, kind in by_kind.items() if kind in ((TILE_ROWS, 1, 0, pack), (pack, 0, 1, 1))]
        others = [axis for axis in axes if axis not in inside]
        terms = [axis for axis in others if not axis.sums]
        packs = [axis for axis in terms if axis.data == pack and axis.extent <= TILE_ROWS]
        vectors = [axis for axis in others if axis.sums and axis.weights and not axis.data]
        free = [axis for axis in others if axis.sums and axis.data and not axis.weights]
        are_all = len(inside) == 2 and len(others) == len(terms) + len(vectors) + len(free)
        if not are_all or not packs or not free:
            return None
        product = _TileProduct(
            factors=factors,
            columns=free[-1],
            rows=tuple(free[:-1]),
            vectors=tuple(vectors),
            packs=packs[-1],
            terms=tuple(axis for axis in terms if axis is not packs[-1]),
            inner=tuple(axis.variable for axis in axes if axis not in terms or axis is packs[-1]),
        )
        is_even = product.columns.extent % product.height == 0
        return product if is_even and product.num_sums + len(product.data) < NUM_TILES else None

    @property
    def height(self) -> int:
        """Rows of a tile of data."""
        return self.columns.extent // ceil(self.columns.extent / TILE_ROWS)

    @property
    def data(self) -> list[_TileAxis]:
        """The tiles of data."""
        steps = (self.height * step for step in (self.columns.sums, self.columns.data, 0))
        return _places((*self.rows, _TileAxis(None, self.columns.extent // self.height, *steps)))

    @property
    def weights(self) -> list[_TileAxis]:
        """The tiles of weights that meet each of them."""
        return _places(self.vectors)

    @property
    def num_sums(self) -> int:
        return len(self.data) * len(self.weights)

    @property
    def configuration(self) -> tuple[int, ...]:
        """The 64 bytes that say how large the tiles are, as Intel's manual of AMX describes them for palette 1."""
        num_data = len(self.data)
        num_weights = NUM_TILES - self.num_sums - num_data
        shapes = [(self.height, _ROW_BYTES)] * self.num_sums + [
            (self.height, PACK_BYTES * self.packs.extent)
        ] * num_data
        shapes += [(self.packs.extent, _ROW_BYTES)] * num_weights
        row_bytes = [byte for _, width in shapes for byte in (width, 0)]
        return (1, *[0] * 15, *row_bytes, *[0] * 16, *(rows for rows, _ in shapes), *[0] * 8)

    def statements(self, *, are_zero: bool, fetches: Sequence[Any] = ()) -> list[Any]:
        """The product in instructions, added to sums, or in the place of zeros; with what each step is to fetch."""
        from tvm import tirx

        factors, num_bytes = self.factors, PACK_BYTES // self.factors.pack
        multiply = "tdpbusd" if factors.of_bytes else "tdpbf16ps"
        first_data, first_weights = self.num_sums, self.num_sums + len(self.data)
        offsets = [row.sums + column.sums for row in self.data for column in self.weights]
        sums = [
            (tile, self._address(factors.sums, offset), 4 * self.columns.sums) for tile, offset in enumerate(offsets)
        ]
        body = [
            _move(
                "tileloadd64",
                first_data + number,
                self._address(factors.data, place.data),
                num_bytes * self.columns.data,
            )
            for number, place in enumerate(self.data)
        ]
        for number, place in enumerate(self.weights):
            tile = first_weights + number % (NUM_TILES - first_weights)
            address = self._address(factors.weights, place.weights)
            body.append(_move("tileloadd64", tile, address, num_bytes * self.packs.weights))
            for row in range(len(self.data)):
                body.append(_compute(multiply, row * len(self.weights) + number, first_data + row, tile))
        product = tirx.SeqStmt([*fetches, *body])
        for axis in reversed(self.terms):
            product = tirx.For(axis.variable, 0, axis.extent, tirx.ForKind.SERIAL, product)
        first = [_compute("tilezero", tile) if are_zero else _move("tileloadd64", tile, *of) for tile, *of in sums]
        return [*first, product, *(_move("tilestored64", *each) for each in sums)]

    def fetches(self, num_passes: int, number: int, around: Sequence[Any]) -> list[Any]:
        """A share of the next panel of weights, which each of the passes over this one fetches in each step.

        To fetch what is beyond the last panel has no effect. `around` are the loops around, from the outermost on, and
        `number` tells how many products came before, for passes that are written out.
        """
        from tvm import tirx

        load, pack = self.factors.weights, self.factors.pack
        axes = (*self.terms, *self.vectors, self.packs)
        size = prod(axis.extent for axis in axes) * TILE_ROWS * pack
        is_dense = sum((axis.extent - 1) * axis.weights for axis in axes) + TILE_ROWS * pack == size
        if num_passes < 2 or not is_dense:
            return []
        first = first_place(load, [*self.inner, *(axis.variable for axis in self.terms)])
        of_pass, known = tirx.const(0, "int32"), 1
        for loop in reversed(around):
            extent = int(loop.extent)
            if (
                num_passes % (known * extent)
                or loop.kind != tirx.ForKind.SERIAL
                or distances([first], [loop.loop_var]) != (0,)
            ):
                break
            of_pass, known = of_pass + loop.loop_var * known, known * extent
        of_pass = of_pass + number % (num_passes // known) * known
        step, num_steps = tirx.const(0, "int32"), 1
        for axis in reversed(self.terms):
            step, num_steps = step + axis.variable * num_steps, num_steps * axis.extent
        line = _ROW_BYTES * pack // PACK_BYTES
        num_lines = ceil(size / line / num_steps / num_passes)
        place = first + size + (of_pass * num_steps + step) * num_lines * line
        return [fetch(load.source, place + line * each, _BEYOND_FIRST_CACHE) for each in range(num_lines)]

    def _address(self, load: Any, offset: int) -> Any:
        """Where a tile begins, in each iteration over the terms."""
        from tvm import tirx

        return tirx.address_of(tirx.BufferLoad(load.source, [first_place(load, self.inner) + offset]))


def _places(axes: Sequence[_TileAxis]) -> list[_TileAxis]:
    """All places that some loops come to, from the first one on."""
    numbers = itertools.product(*(range(axis.extent) for axis in axes))
    steps = [(axis.sums, axis.data, axis.weights) for axis in axes]
    return [
        _TileAxis(
            None, 1, *(sum(number * step[part] for number, step in zip(each, steps, strict=True)) for part in range(3))
        )
        for each in numbers
    ]


def fetch(buffer: Any, place: Any, caches: int) -> Any:
    """A statement that fetches the line of an element: into all caches with 3, into all but the first with 2."""
    from tvm import tirx

    address = tirx.address_of(tirx.BufferLoad(buffer, [place]))
    arguments = (tirx.const(value, "int32") for value in (0, caches, 1))  # LLVM's for: to read, where to, and data
    return tirx.Evaluate(tirx.call_intrin("void", "tirx.prefetch", address, *arguments))


def _compute(name: str, *tiles: int) -> Any:
    """An instruction between tiles."""
    return _intrinsic(name, *(_number(tile, "int8") for tile in tiles))


def _move(name: str, tile: int, address: Any, row_step: int) -> Any:
    """An instruction that loads or stores a tile, whose rows have so many bytes from one to the next."""
    return _intrinsic(name, _number(tile, "int8"), address, _number(row_step, "int64"))


def _number(value: int, dtype: str) -> Any:
    from tvm import tirx

    return tirx.const(value, dtype)


def _intrinsic(name: str, *operands: Any) -> Any:
    from tvm import tirx

    return tirx.Evaluate(tirx.call_llvm_intrin("void", f"llvm.x86.{name}", *operands))


def with_matrix_tiles(func: Any, _mod: Any, _context: Any) -> Any:
    """A lowered function whose annotated loops are products of tiles; on a CPU without AMX they stay loops."""
    from tvm import tirx
    from tvm_ffi import structural_mutate, structural_walk

    found: list[_TileProduct] = []

    def note(loop: Any) -> None:
        if product := _product_of_tiles(loop):
            found.append(product)

    if has_matrix_tiles(func.attrs["target"]):
        structural_walk(func.body, (tirx.For, note))
    configurations = {product.configuration for product in found}
    if not configurations:
        return func
    # To configure the tiles takes 200 cycles: a job does it once where they are the same in all of its products.
    common = configurations.pop() if len(configurations) == 1 else None
    is_parallel: list[bool] = []

    around: list[Any] = []
    numbers = itertools.count()

    def fetches(loop: Any, product: _TileProduct) -> list[Any]:
        return product.fetches(int(loop.annotations[MATRIX_TILES]), next(numbers), around)

    def of_sequence(sequence: Any, mutator: Any) -> Any:
        statements: list[Any] = []
        for statement in sequence.seq:
            product = _product_of_tiles(statement)
            if product is None:
                statements.append(mutator.mutate(statement))
                continue
            before = next((place for place, each in _backwards(statements) if not isinstance(each, tirx.Bind)), None)
            if are_zero := before is not None and _clears(statements[before], product):
                del statements[before]
            computed = product.statements(are_zero=are_zero, fetches=fetches(statement, product))
            statements += _configured(None if common else product.configuration, computed)
        return tirx.SeqStmt(statements)

    def of_loop(loop: Any, mutator: Any) -> Any:
        if product := _product_of_tiles(loop):
            statements = product.statements(are_zero=False, fetches=fetches(loop, product))
            return tirx.SeqStmt(_configured(None if common else product.configuration, statements))
        around.append(loop)
        loop = mutator.default_mutate(loop)
        around.pop()
        if loop.kind != tirx.ForKind.PARALLEL or not common:
            return loop
        is_parallel.append(True)
        body = tirx.SeqStmt(_configured(common, [loop.body]))
        return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, body, None, loop.annotations)

    body = structural_mutate(func.body, [(tirx.SeqStmt, of_sequence), (tirx.For, of_loop)])
    request = tirx.Evaluate(tirx.call_extern("int64", "syscall", *(_number(each, "int64") for each in TILES_REQUEST)))
    return func.with_body(tirx.SeqStmt([request, *_configured(None if is_parallel else common, [body])]))


def _backwards(statements: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    return zip(reversed(range(len(statements))), reversed(statements), strict=True)


def _product_of_tiles(statement: Any) -> _TileProduct | None:
    """The product that an annotated loop is; None of other statements."""
    from tvm.tirx import For

    is_annotated = isinstance(statement, For) and MATRIX_TILES in statement.annotations
    return _TileProduct.of(statement) if is_annotated else None


def _clears(statement: Any, product: _TileProduct) -> bool:
    """Whether a statement makes zeros of as many sums as a product has, in the same buffer."""
    from tvm import tirx

    extents, store = nested(statement)
    if not isinstance(store, tirx.BufferStore) or not store.buffer.same_as(product.factors.sums.source):
        return False
    is_vector = isinstance(store.value, tirx.Broadcast)
    value, lanes = (store.value.value, int(store.value.lanes)) if is_vector else (store.value, 1)
    num_sums = product.num_sums * product.height * TILE_ROWS
    is_zero = isinstance(value, (tirx.IntImm, tirx.FloatImm)) and not value.value
    return is_zero and prod(extents.values()) * lanes == num_sums


def _configured(configuration: tuple[int, ...] | None, statements: list[Any]) -> list[Any]:
    """Statements between a configuration of the tiles, if there is one, and its end."""
    from tvm import tirx

    if configuration is None:
        return statements
    shapes = tirx.decl_buffer((len(configuration) // 4,), "int32", "tile_shapes", scope="local")
    words = [int.from_bytes(configuration[at : at + 4], "little") for at in range(0, len(configuration), 4)]
    stores = [
        tirx.BufferStore(shapes, _number(word, "int32"), [_number(place, "int32")]) for place, word in enumerate(words)
    ]
    load = _intrinsic("ldtilecfg", tirx.address_of(tirx.BufferLoad(shapes, [_number(0, "int32")])))
    return [tirx.AllocBuffer(shapes), *stores, load, *statements, _intrinsic("tilerelease")]
