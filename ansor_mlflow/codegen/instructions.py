"""Instructions that LLVM finds in no loop: x86's `vpdpbusd`, the tiles of AMX, and conversions that round.

An annotation of a schedule says which loops are one of the first two; in stock TVM, and on a CPU without them, they
stay loops.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

from ansor_mlflow.device import TILES_REQUEST, has_dot_products, has_matrix_tiles

DOT_PRODUCTS = "ansor_mlflow.dot_products"
"""Annotation of a loop over the elements of a vector, to each of which an instruction adds `PACK` products of bytes."""
MATRIX_TILES = "ansor_mlflow.matrix_tiles"
"""Annotation of the outermost loop over what is summed, around loops that are products of AMX's tiles."""
PACK = 4
TILE_ROWS = 16
"""Rows of a tile, each of 64 bytes: 16 sums, or 16 packs of bytes."""
NUM_TILES = 8
_DOT_LANES = (4, 8, 16)
_ROW_BYTES = 64


def with_dot_products(func: Any, _mod: Any, _context: Any) -> Any:
    """A lowered function whose annotated loops are `vpdpbusd`; on a CPU without it they stay loops."""
    from tvm.tirx import For
    from tvm_ffi import structural_mutate

    if not has_dot_products(func.attrs["target"]):
        return func

    def visit(loop: Any, mutator: Any) -> Any:
        found = _dot_products(loop) if DOT_PRODUCTS in loop.annotations else None
        return found or mutator.default_mutate(loop)

    return func.with_body(structural_mutate(func.body, (For, visit)))


def _dot_products(loop: Any) -> Any:
    """sums[lane] += sum over k < 4 of data[k] · weights[lane, k], for all lanes at once; None of another loop.

    A record may annotate any loop, so that all of it is checked. The names and types are those of LLVM's intrinsics,
    whose operands are vectors of bytes since its version 22.
    """
    from tvm import tirx

    extents, loads = _product_of_bytes(loop) or ({}, {})
    lanes = int(loop.extent)
    if list(extents.values()) != [lanes, PACK] or lanes not in _DOT_LANES:
        return None
    variables, strides = list(extents), {"int8": (PACK, 1), "uint8": (0, 1), "int32": (1, 0)}
    if any(_strides(load.indices, variables) != strides[dtype] for dtype, load in loads.items()):
        return None

    def vector(dtype: str, result: str, number: int) -> Any:
        place = tirx.Ramp(_start(loads[dtype], variables), 1, number)
        return tirx.reinterpret(result, tirx.BufferLoad(loads[dtype].source, [place]))

    pack = tirx.reinterpret(f"int8x{PACK * lanes}", tirx.Broadcast(vector("uint8", "int32", PACK), lanes))
    packs = vector("int8", f"int8x{PACK * lanes}", PACK * lanes)
    sums = vector("int32", f"int32x{lanes}", lanes)
    name = f"llvm.x86.avx512.vpdpbusd.{32 * lanes}"
    total = tirx.call_llvm_pure_intrin(f"int32x{lanes}", name, sums, pack, packs)
    return tirx.BufferStore(loads["int32"].source, total, [tirx.Ramp(_start(loads["int32"], variables), 1, lanes)])


def _product_of_bytes(loop: Any) -> tuple[dict[Any, int], dict[str, Any]] | None:
    """Nested loops around nothing but `sums += data · weights`, of bytes: the extents by variable, from the outermost
    on, and the loads by type; None of others.
    """
    from tvm import tirx
    from tvm.ir import TensorLoad
    from tvm_ffi import structural_equal

    extents, store = _nest(loop)
    if not isinstance(store, tirx.BufferStore) or not isinstance(store.value, tirx.Add):
        return None
    product = store.value.b
    if not isinstance(product, tirx.Mul) or not all(isinstance(each, tirx.Cast) for each in (product.a, product.b)):
        return None
    found = (product.a.value, product.b.value, store.value.a)
    if not all(isinstance(load, TensorLoad) and len(load.indices) == 1 for load in found):
        return None
    loads = {str(load.ty.dtype): load for load in found}
    is_sum = store.buffer.same_as(found[-1].source) and structural_equal(store.indices, found[-1].indices)
    return (extents, loads) if is_sum and set(loads) == {"int8", "uint8", "int32"} else None


def _nest(statement: Any) -> tuple[dict[Any, int], Any]:
    """The extents of serial loops within each other, by variable, and the statement in the innermost.

    A condition `variable < number` is a smaller extent: the last tile of a row has fewer columns.
    """
    from tvm import tirx

    extents: dict[Any, int] = {}
    while True:
        if isinstance(statement, tirx.For):
            is_plain = statement.kind == tirx.ForKind.SERIAL and not int(statement.min)
            if not is_plain or not isinstance(statement.extent, tirx.IntImm):
                return extents, statement
            extents[statement.loop_var] = int(statement.extent)
            statement = only_statement(statement.body)
        elif isinstance(statement, tirx.IfThenElse) and statement.else_case is None:
            condition = statement.condition
            limited = [var for var in extents if isinstance(condition, tirx.LT) and var.same_as(condition.a)]
            if not limited or not isinstance(condition.b, tirx.IntImm):
                return extents, statement
            extents[limited[0]] = min(extents[limited[0]], int(condition.b))
            statement = statement.then_case
        else:
            return extents, statement


def only_statement(body: Any) -> Any:
    """The statement of a loop, with the values of the variables that stand for its common terms."""
    from tvm.tirx import Bind, SeqStmt

    if not isinstance(body, SeqStmt) or not all(isinstance(statement, Bind) for statement in body.seq[:-1]):
        return body
    statement = body.seq[-1]
    for bind in reversed(body.seq[:-1]):
        statement = replaced(statement, bind.var, bind.value)
    return statement


def replaced(value: Any, variable: Any, by: Any) -> Any:
    """A value, or a statement, with a value in the place of a variable."""
    from tvm.tirx import Var
    from tvm_ffi import structural_mutate

    return structural_mutate(value, (Var, lambda var, _mutator: by if var.same_as(variable) else var))


def _start(load: Any, variables: Sequence[Any]) -> Any:
    """The place of the first element that is loaded."""
    from tvm.sym import detect_linear_equation

    return list(detect_linear_equation(load.indices[0], variables))[-1]


def _strides(indices: Sequence[Any], variables: Sequence[Any]) -> tuple[int, ...] | None:
    """The distances in memory along variables; None where they are no constants."""
    from tvm import tirx
    from tvm.sym import detect_linear_equation

    terms = list(detect_linear_equation(indices[0], variables))[:-1] if len(indices) == 1 else []
    return tuple(map(int, terms)) if terms and all(isinstance(term, tirx.IntImm) for term in terms) else None


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

    loads: dict[str, Any]
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
        extents, loads = _product_of_bytes(loop) or ({}, {})
        variables = list(extents)
        found = [_strides(loads[dtype].indices, variables) for dtype in ("int32", "uint8", "int8") if loads]
        strides = [of_load for of_load in found if of_load is not None]
        if not variables or len(strides) != len(found):
            return None
        of_axes = zip(*strides, strict=True)
        axes = [_TileAxis(var, extents[var], *each) for var, each in zip(variables, of_axes, strict=True)]
        by_kind = {axis: (axis.extent, axis.sums, axis.data, axis.weights) for axis in axes}
        inside = [axis for axis, kind in by_kind.items() if kind in ((TILE_ROWS, 1, 0, PACK), (PACK, 0, 1, 1))]
        others = [axis for axis in axes if axis not in inside]
        terms = [axis for axis in others if not axis.sums]
        packs = [axis for axis in terms if axis.data == PACK and axis.extent <= TILE_ROWS]
        vectors = [axis for axis in others if axis.sums and axis.weights and not axis.data]
        free = [axis for axis in others if axis.sums and axis.data and not axis.weights]
        are_all = len(inside) == 2 and len(others) == len(terms) + len(vectors) + len(free)
        if not are_all or not packs or not free:
            return None
        product = _TileProduct(
            loads=loads,
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
        shapes = [(self.height, _ROW_BYTES)] * self.num_sums + [(self.height, PACK * self.packs.extent)] * num_data
        shapes += [(self.packs.extent, _ROW_BYTES)] * num_weights
        row_bytes = [byte for _, width in shapes for byte in (width, 0)]
        return (1, *[0] * 15, *row_bytes, *[0] * 16, *(rows for rows, _ in shapes), *[0] * 8)

    def statements(self, *, are_zero: bool) -> list[Any]:
        """The product in instructions, added to sums, or in the place of zeros."""
        from tvm import tirx

        first_data, first_weights = self.num_sums, self.num_sums + len(self.data)
        offsets = [row.sums + column.sums for row in self.data for column in self.weights]
        sums = [(tile, self._address("int32", offset), 4 * self.columns.sums) for tile, offset in enumerate(offsets)]
        body = [
            _move("tileloadd64", first_data + number, self._address("uint8", place.data), self.columns.data)
            for number, place in enumerate(self.data)
        ]
        for number, place in enumerate(self.weights):
            tile = first_weights + number % (NUM_TILES - first_weights)
            body.append(_move("tileloadd64", tile, self._address("int8", place.weights), self.packs.weights))
            for row in range(len(self.data)):
                body.append(_compute("tdpbusd", row * len(self.weights) + number, first_data + row, tile))
        product = tirx.SeqStmt(body)
        for axis in reversed(self.terms):
            product = tirx.For(axis.variable, 0, axis.extent, tirx.ForKind.SERIAL, product)
        first = [_compute("tilezero", tile) if are_zero else _move("tileloadd64", tile, *of) for tile, *of in sums]
        return [*first, product, *(_move("tilestored64", *each) for each in sums)]

    def _address(self, dtype: str, offset: int) -> Any:
        """Where a tile begins, in each iteration over the terms."""
        from tvm import tirx

        load = self.loads[dtype]
        return tirx.address_of(tirx.BufferLoad(load.source, [_start(load, self.inner) + offset]))


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
            statements += _configured(None if common else product.configuration, product.statements(are_zero=are_zero))
        return tirx.SeqStmt(statements)

    def of_loop(loop: Any, mutator: Any) -> Any:
        if product := _product_of_tiles(loop):
            statements = product.statements(are_zero=False)
            return tirx.SeqStmt(_configured(None if common else product.configuration, statements))
        loop = mutator.default_mutate(loop)
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

    extents, store = _nest(statement)
    if not isinstance(store, tirx.BufferStore) or not store.buffer.same_as(product.loads["int32"].source):
        return False
    is_vector = isinstance(store.value, tirx.Broadcast)
    value, lanes = (store.value.value, int(store.value.lanes)) if is_vector else (store.value, 1)
    num_sums = product.num_sums * product.height * TILE_ROWS
    return isinstance(value, tirx.IntImm) and not int(value) and prod(extents.values()) * lanes == num_sums


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


def with_conversions_that_round(func: Any, _mod: Any, _context: Any) -> Any:
    """A lowered function in which floats between two integers become bytes by conversions that round, ties to even.

    TVM rounds, in two instructions for a vector, and converts then by cutting off: a quarter of what follows the sums
    of a quantised layer.
    """
    from tvm.tirx import Cast
    from tvm_ffi import structural_mutate

    def visit(cast: Any, mutator: Any) -> Any:
        cast = mutator.default_mutate(cast)
        found = _rounded(cast)
        return cast if found is None else found

    return func.with_body(structural_mutate(func.body, (Cast, visit)))


def _rounded(cast: Any) -> Any:
    """A conversion of min(max(round(x), low), high) to bytes as one of min(max(x, low), high), which rounds; None of
    another.
    """
    from tvm import tirx
    from tvm.ir import Call

    most, least = cast.value, getattr(cast.value, "a", None)
    kind, _, lanes = str(cast.ty.dtype).partition("x")
    if kind not in ("int8", "uint8") or not isinstance(most, tirx.Min) or not isinstance(least, tirx.Max):
        return None
    rounding = least.a
    is_round = isinstance(rounding, Call) and getattr(rounding.op, "name", "") == "tirx.nearbyint"
    # Between whole numbers that an int32 holds it makes no difference whether the limits come first.
    limits = [_number_of(limit) for limit in (least.b, most.b)]
    are_whole = all(limit is not None and limit.is_integer() and abs(limit) < 2**31 for limit in limits)
    if not is_round or not are_whole or not str(rounding.ty.dtype).startswith("float32"):
        return None
    limited = tirx.Min(tirx.Max(rounding.args[0], least.b), most.b)
    integers = f"int32x{lanes}" if lanes else "int32"
    return tirx.Cast(cast.ty, tirx.call_llvm_pure_intrin(integers, "llvm.lrint", limited))


def _number_of(value: Any) -> float | None:
    """The number that all elements of a value are; None where they are computed."""
    from tvm.tirx import Broadcast, FloatImm

    value = value.value if isinstance(value, Broadcast) else value
    return float(value.value) if isinstance(value, FloatImm) else None
