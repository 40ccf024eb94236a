"""Instructions that LLVM finds in no loop: x86's `vpdpbusd`, `vpmaddubsw` and `vdpbf16ps`, Arm's `usdot` and `bfdot`,
conversions.

An annotation of a schedule says which loops are the first of them; in stock TVM, and on another CPU, they stay loops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ansor_mlflow.device import WEIGHT_BITS, has_arithmetic, has_pair_products, machine_of, vector_lanes, weight_bits

DOT_PRODUCTS = "ansor_mlflow.dot_products"
"""Annotation of a loop over the elements of a vector, to each of which an instruction adds the products of a pack."""
PACK_BYTES = 4
"""Size of what is multiplied with as much and added to one sum: four bytes, or two of bfloat16."""
PACK = PACK_BYTES
"""Bytes of a pack."""
_DOT_PRODUCTS = {
    **{("x86_64", lanes): f"llvm.x86.avx512.vpdpbusd.{32 * lanes}" for lanes in (4, 8, 16)},
    ("aarch64", 4): "llvm.aarch64.neon.usdot.v4i32.v16i8",
}
"""LLVM's intrinsics by architecture and elements of a vector; their operands are vectors of bytes since version 22."""
_NARROW_PRODUCTS = {
    ("x86_64", 4): "llvm.x86.ssse3.pmadd.ub.sw.128",
    ("x86_64", 8): "llvm.x86.avx2.pmadd.ub.sw",
    ("x86_64", 16): "llvm.x86.avx512.pmaddubs.w.512",
}
"""Those of x86 without that instruction, which add two products in 16 bits."""
_SUMS_OF_PAIRS = {4: "llvm.x86.sse2.pmadd.wd", 8: "llvm.x86.avx2.pmadd.wd", 16: "llvm.x86.avx512.pmaddw.d.512"}
"""Those that add two such sums, each of them times one, in 32 bits."""
NARROW_REGISTERS = 2
"""Registers that these take beside sums and operands: for ones, and for the sums of two."""
_PAIR_PRODUCTS = {
    **{("x86_64", lanes): f"llvm.x86.avx512bf16.dpbf16ps.{32 * lanes}" for lanes in (4, 8, 16)},
    ("aarch64", 4): "llvm.aarch64.neon.bfdot.v4f32.v8bf16",
}
"""The same of bfloat16."""
_PAIR_FUNCTION = """
declare <{lanes} x float> @{name}(<{lanes} x float>, <{elements} x bfloat>, <{elements} x bfloat>)
define linkonce_odr <{lanes} x float> @pair_products_{lanes}(
    <{lanes} x float> %sums, <{lanes} x i32> %a, <{lanes} x i32> %b) alwaysinline {{
  %data = bitcast <{lanes} x i32> %a to <{elements} x bfloat>
  %weights = bitcast <{lanes} x i32> %b to <{elements} x bfloat>
  %total = call <{lanes} x float> @{name}(<{lanes} x float> %sums, <{elements} x bfloat> %data,
    <{elements} x bfloat> %weights)
  ret <{lanes} x float> %total
}}
"""
"""A function in LLVM's own language: TVM's code generator has no type for bfloat16."""


def with_dot_products(func: Any, _mod: Any, _context: Any) -> Any:
    """A lowered function whose annotated loops are dot products; on a CPU without an instruction they stay loops."""
    from tvm.tirx import AttrStmt, For
    from tvm_ffi import structural_mutate

    target = func.attrs["target"]
    of_bytes = {WEIGHT_BITS: _DOT_PRODUCTS, 0: {}}.get(weight_bits(target), _NARROW_PRODUCTS)
    of_pairs = _PAIR_PRODUCTS if has_pair_products(target) else {}
    widest, functions = vector_lanes(target), set[str]()

    def visit(loop: Any, mutator: Any) -> Any:
        extents, product = (DOT_PRODUCTS in loop.annotations and product_in(loop)) or ({}, None)
        if product is None:
            return mutator.default_mutate(loop)
        lanes = int(loop.extent)
        name = (of_bytes if product.of_bytes else of_pairs).get((machine_of(target), lanes))
        if not name or lanes > widest or not _is_of_vectors(product, extents, lanes):
            return mutator.default_mutate(loop)
        if not product.of_bytes:
            functions.add(_PAIR_FUNCTION.format(name=name, lanes=lanes, elements=product.pack * lanes))
        return _dot_products(product, list(extents), lanes, name)

    body = structural_mutate(func.body, (For, visit))
    for function in functions:
        body = AttrStmt(0, "pragma_import_llvm", function, body)
    return func.with_body(body)


def _is_of_vectors(product: Product, extents: Mapping[Any, int], lanes: int) -> bool:
    """Whether loops are those of an instruction: sums[lane] += sum over k < pack of data[k] · weights[lane, k].

    A record may annotate any loop, so that all of it is checked.
    """
    are_alike = list(extents.values()) == [lanes, product.pack]
    return are_alike and product.strides(list(extents)) == ((1, 0), (0, 1), (product.pack, 1))


def _dot_products(product: Product, variables: Sequence[Any], lanes: int, name: str) -> Any:
    """The products of all lanes at once."""
    from tvm import tirx

    def vector(load: Any, result: str, number: int) -> Any:
        place = tirx.Ramp(first_place(load, variables), 1, number)
        return tirx.reinterpret(result, tirx.BufferLoad(load.source, [place]))

    of_sums, of_packs = ("int32", f"int8x{PACK * lanes}") if product.of_bytes else ("float32", f"int32x{lanes}")
    pack = tirx.reinterpret(of_packs, tirx.Broadcast(vector(product.data, "int32", product.pack), lanes))
    packs = vector(product.weights, of_packs, product.pack * lanes)
    sums = vector(product.sums, f"{of_sums}x{lanes}", lanes)
    if name in _NARROW_PRODUCTS.values():
        pairs = tirx.call_llvm_pure_intrin(f"int16x{2 * lanes}", name, pack, packs)
        ones = tirx.Broadcast(tirx.const(1, "int16"), 2 * lanes)
        total = sums + tirx.call_llvm_pure_intrin(f"int32x{lanes}", _SUMS_OF_PAIRS[lanes], pairs, ones)
    elif product.of_bytes:
        total = tirx.call_llvm_pure_intrin(f"int32x{lanes}", name, sums, pack, packs)
    else:
        total = tirx.call_pure_extern(f"float32x{lanes}", f"pair_products_{lanes}", sums, pack, packs)
    return tirx.BufferStore(product.sums.source, total, [tirx.Ramp(first_place(product.sums, variables), 1, lanes)])


@dataclass(frozen=True)
class Product:
    """What a statement `sums += data · weights` loads: of unsigned and signed bytes, or of bfloat16."""

    sums: Any
    data: Any
    weights: Any

    @property
    def of_bytes(self) -> bool:
        return str(self.sums.ty.dtype) == "int32"

    @property
    def pack(self) -> int:
        """Elements of a pack."""
        return PACK if self.of_bytes else PACK_BYTES // 2

    def strides(self, variables: Sequence[Any]) -> tuple[tuple[int, ...] | None, ...]:
        """The distances in memory along variables of each of the loads."""
        return tuple(distances(load.indices, variables) for load in (self.sums, self.data, self.weights))


def product_in(loop: Any) -> tuple[dict[Any, int], Product] | None:
    """Nested loops around nothing but a product: the extents by variable, from the outermost on; None of others."""
    from tvm import tirx
    from tvm.ir import TensorLoad
    from tvm_ffi import structural_equal

    extents, store = nested(loop)
    if not isinstance(store, tirx.BufferStore) or not isinstance(store.value, tirx.Add):
        return None
    total, product = store.value.a, store.value.b
    if not isinstance(product, tirx.Mul):
        return None
    factors = [_narrow(product.a), _narrow(product.b)]
    if not all(isinstance(load, TensorLoad) and len(load.indices) == 1 for load in (*factors, total)):
        return None
    if not store.buffer.same_as(total.source) or not structural_equal(store.indices, total.indices):
        return None
    dtypes = (str(total.ty.dtype), *(str(load.ty.dtype) for load in factors))
    if dtypes == ("int32", "int8", "uint8"):
        factors.reverse()
    are_known = dtypes in (("int32", "uint8", "int8"), ("int32", "int8", "uint8"), ("float32", "uint16", "uint16"))
    return (extents, Product(total, *factors)) if are_known else None


def _narrow(value: Any) -> Any:
    """The bytes of which a value is a conversion, or the bits of bfloat16, which TVM makes floats by a shift."""
    from tvm import tirx
    from tvm.ir import Call

    if isinstance(value, tirx.Cast):
        return value.value if str(value.ty.dtype) == "int32" else None
    shift = value.args[0] if isinstance(value, Call) and getattr(value.op, "name", "") == "tirx.reinterpret" else None
    if not isinstance(shift, tirx.LShift) or not isinstance(shift.a, tirx.Cast) or int(shift.b) != 16:
        return None
    return shift.a.value


def nested(statement: Any) -> tuple[dict[Any, int], Any]:
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


def first_place(load: Any, variables: Sequence[Any]) -> Any:
    """The place of the first element that is loaded."""
    from tvm.sym import detect_linear_equation

    return list(detect_linear_equation(load.indices[0], variables))[-1]


def distances(indices: Sequence[Any], variables: Sequence[Any]) -> tuple[int, ...] | None:
    """The distances in memory along variables; None where they are no constants."""
    from tvm import tirx
    from tvm.sym import detect_linear_equation

    terms = list(detect_linear_equation(indices[0], variables))[:-1] if len(indices) == 1 else []
    return tuple(map(int, terms)) if terms and all(isinstance(term, tirx.IntImm) for term in terms) else None


def with_conversions_that_round(func: Any, _mod: Any, _context: Any) -> Any:
    """A lowered function in which floats between two integers become bytes by conversions that round, ties to even.

    TVM rounds, in two instructions for a vector, and converts then by cutting off: a quarter of what follows the sums
    of a quantised layer.
    """
    from tvm.tirx import AttrStmt, Cast
    from tvm_ffi import structural_mutate

    has_bfloat16, narrowed = has_arithmetic(func.attrs["target"], "bfloat16"), []

    def visit(cast: Any, mutator: Any) -> Any:
        cast = mutator.default_mutate(cast)
        if has_bfloat16 and (found := _as_bfloat16(cast)) is not None:
            narrowed.append(found)
            return found
        found = _rounded(cast)
        return cast if found is None else found

    body = structural_mutate(func.body, (Cast, visit))
    return func.with_body(AttrStmt(0, "pragma_import_llvm", _TO_BFLOAT16, body) if narrowed else body)


_TO_BFLOAT16 = "".join(
    f"""
define linkonce_odr <{lanes} x i16> @to_bfloat16_{lanes}(<{lanes} x float> %value) alwaysinline {{
  %narrow = fptrunc <{lanes} x float> %value to <{lanes} x bfloat>
  %bits = bitcast <{lanes} x bfloat> %narrow to <{lanes} x i16>
  ret <{lanes} x i16> %bits
}}
"""
    for lanes in (8, 16)
)
"""Functions in LLVM's own language: TVM's code generator has no type for bfloat16."""


def _as_bfloat16(cast: Any) -> Any:
    """The bits of bfloat16 that TVM computes of a float by adding, with the instruction for it; None of others."""
    from tvm import tirx
    from tvm.ir import Call

    shift = cast.value
    if not isinstance(shift, tirx.RShift) or _number_of(shift.b) != 16 or not isinstance(shift.a, tirx.Add):
        return None
    bits = shift.a.a
    if not isinstance(bits, Call) or getattr(bits.op, "name", "") != "tirx.reinterpret":
        return None
    value, (kind, _, lanes) = bits.args[0], str(cast.ty.dtype).partition("x")
    if kind != "uint16" or lanes not in ("8", "16") or str(value.ty.dtype) != f"float32x{lanes}":
        return None
    return tirx.call_pure_extern(f"uint16x{lanes}", f"to_bfloat16_{lanes}", value)


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


def with_copies_of_bfloat16(func: Any, _mod: Any, _context: Any) -> Any:
    """A function whose copies of bfloat16, as of a padded image, are of its bits: TVM would make float32 of them, twice
    as many bytes, of which AMX has no products.
    """
    from tvm import tirx
    from tvm.ir import TensorLoad
    from tvm.s_tir import SBlock
    from tvm_ffi import structural_mutate, structural_walk

    own: list[Any] = []
    structural_walk(func.body, (SBlock, lambda block: own.extend(block.alloc_buffers)))
    copies = {
        each: tirx.decl_buffer(each.shape, "uint16", each.name, scope=each.scope())
        for each in own
        if str(each.dtype) == "bfloat16"
    }

    stores: list[Any] = []
    structural_walk(func.body, (tirx.BufferStore, stores.append))
    computed = {store.buffer for store in stores if store.buffer in copies and _bits_of(store.value) is None}
    while computed:  # what copies them is one of float32, too
        for buffer in computed:
            del copies[buffer]
        computed = {
            store.buffer
            for store in stores
            if store.buffer in copies and not computed.isdisjoint(_sources_of(store.value))
        }
    if not copies:
        return func

    def of_load(load: Any, mutator: Any) -> Any:
        load = mutator.default_mutate(load) if load.source not in copies else load
        if load.source not in copies:
            return load
        return tirx.reinterpret("bfloat16", tirx.BufferLoad(copies[load.source], load.indices))

    def of_store(store: Any, mutator: Any) -> Any:
        if store.buffer not in copies:
            return mutator.default_mutate(store)
        return tirx.BufferStore(copies[store.buffer], mutator.mutate(_bits_of(store.value)), store.indices)

    visitors = [
        (TensorLoad, of_load),
        (tirx.BufferStore, of_store),
        (tirx.Var, lambda var, _mutator: copies.get(var, var)),
    ]
    return func.with_body(structural_mutate(func.body, visitors))


def _sources_of(value: Any) -> list[Any]:
    """The buffers that a value is read from."""
    from tvm.ir import TensorLoad
    from tvm_ffi import structural_walk

    found: list[Any] = []
    structural_walk(value, (TensorLoad, lambda load: found.append(load.source)))
    return found


def _bits_of(value: Any) -> Any:
    """The bits of what is copied, as uint16; None where it is computed."""
    from tvm import tirx
    from tvm.ir import Call, TensorLoad

    if isinstance(value, TensorLoad):
        return tirx.reinterpret("uint16", value)
    if isinstance(value, tirx.FloatImm):
        return None if value.value else tirx.const(0, "uint16")
    if isinstance(value, Call) and getattr(value.op, "name", "") == "prim.if_then_else":
        condition, *values = value.args
        bits = [_bits_of(each) for each in values]
        return None if any(each is None for each in bits) else tirx.if_then_else(condition, *bits)
    return None


def _number_of(value: Any) -> float | None:
    """The number that all elements of a value are; None where they are computed."""
    from tvm.tirx import Broadcast, FloatImm, IntImm

    value = value.value if isinstance(value, Broadcast) else value
    return float(value.value) if isinstance(value, (FloatImm, IntImm)) else None
