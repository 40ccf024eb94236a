"""How TVM's passes are asked for, and those of our own between them: erf and sums of vectors, arrays, prefetches, and
maxima that keep NaN.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ansor_mlflow.codegen.instructions import (
    only_statement,
    replaced,
    with_conversions_that_round,
    with_copies_of_bfloat16,
    with_dot_products,
)
from ansor_mlflow.codegen.matrix_tiles import fetch, with_matrix_tiles
from ansor_mlflow.device import machine_of, platform_of

if TYPE_CHECKING:
    from tvm.ir.transform import Pass
    from tvm.target import Target

PREFETCH = "ansor_mlflow.prefetch"
"""Annotation of a loop over sums: how often it runs for each panel of weights."""
_LINE_BYTES = 64
_NO_COMMON_SUBEXPRESSIONS = "tirx.disable_cse_tir"
"""TVM's option without its pass that computes equal expressions once, which LLVM does as well: of a large tile it took
two thirds of the time that the function took to compile.
"""
_ALL_CACHES = 3
"""Into which caches LLVM's prefetch brings a line."""
_MAX_FETCHES = 8
"""Lines that are fetched in an iteration."""
_NAME, _NAME_FOR_GPU = "ansor_mlflow", "ansor_mlflow.gpu"
_MAX_STACK_BYTES = 8192
"""Size of a buffer that becomes an array of the function: twice the sums that the largest register files hold."""
_LANES = 16
"""Elements of a vector of partial sums: on CPUs with shorter vectors it is several, whose sums do not wait for each
other."""
_HALVES = (8, 4, 2, 1)
_ELEMENTWISE = frozenset(f"tirx.{name}" for name in ("exp", "fabs", "sqrt"))
"""Functions that are computed of vectors as of single elements."""
_IS_ARRAY = "disable_lower_builtin"
"""TVM's annotation (`transform.h`) of a buffer that code generation is to make an array of."""


def pass_config(target: Target) -> dict[str, bool]:
    """The `config` of the `PassContext` in which code for `target` is generated.

    For CPUs, functions such as exp become vector arithmetic; see `codegen.functions`. Other devices have instructions
    for them. A candidate has to be measured as it will be compiled, so that both take this.
    """
    if not platform_of(target).by_llvm:
        return {}
    from ansor_mlflow.codegen.functions import RULES_FOR

    return {RULES_FOR: True, _NO_COMMON_SUBEXPRESSIONS: True}


def tir_pipeline(target: Target) -> str:
    """The `pipeline` of TVM's `build`, and `tir_pipeline` of its `compile`, with which code for `target` is generated.

    A candidate has to be measured as it will be compiled, so that both take this, as `pass_config`.
    """
    from tvm.tirx.compilation_pipeline import PIPELINE_MAP, register_tir_pipeline

    by_llvm = platform_of(target).by_llvm
    name = _NAME if by_llvm else _NAME_FOR_GPU
    if name not in PIPELINE_MAP:
        register_tir_pipeline(name, functools.partial(_make, by_llvm=by_llvm))
    return name


def _make(*, by_llvm: bool) -> tuple[Pass, Any, Any]:
    """TVM's default passes, and the makers of those that follow for host and device; kernels are in one of these."""
    from tvm.ir.transform import Sequential
    from tvm.s_tir.pipeline import default_s_tir_pipeline
    from tvm.tirx.transform import prim_func_pass

    passes, of_host, of_device = default_s_tir_pipeline()
    nans = prim_func_pass(_with_nans_kept, opt_level=0, name="ansor.nans")
    if not by_llvm:
        powers = prim_func_pass(_with_products_for_powers, opt_level=0, name="ansor.products_for_powers")
        return passes, of_host, lambda: Sequential([powers, nans, of_device()])
    erfs = prim_func_pass(_with_vector_erfs, opt_level=0, name="ansor.vector_erfs")
    choices = prim_func_pass(_with_choices_of_vectors, opt_level=0, name="ansor.choices_of_vectors")
    copies = prim_func_pass(with_copies_of_bfloat16, opt_level=0, name="ansor.copies_of_bfloat16")
    sums = prim_func_pass(_with_vector_sums, opt_level=0, name="ansor.vector_sums")
    dots = prim_func_pass(with_dot_products, opt_level=0, name="ansor.dot_products")
    tiles = prim_func_pass(with_matrix_tiles, opt_level=0, name="ansor.matrix_tiles")
    arrays = prim_func_pass(_with_arrays, opt_level=0, name="ansor.local_arrays")
    fetches = prim_func_pass(_with_prefetches, opt_level=0, name="ansor.prefetch")
    rounding = prim_func_pass(with_conversions_that_round, opt_level=0, name="ansor.conversions_that_round")
    first, last = Sequential([erfs, choices, copies, passes]), [sums, dots, tiles, arrays, fetches, rounding, nans]
    return first, lambda: Sequential([*last, of_host()]), of_device


def _with_vector_erfs(func: Any, _mod: Any, context: Any) -> Any:
    """A function whose loops with erf are vectorised as they are with other functions.

    Of others TVM makes loops over single elements. LLVM finds most of their vectors again, but where there are many, as
    behind the sums of a tile, it keeps these sums in memory, too: a convolution took twice as long.
    """
    from tvm.ir import Call
    from tvm_ffi import structural_mutate

    from ansor_mlflow.codegen.functions import RULES_FOR, erf_as_arithmetic

    if not context.config.get(RULES_FOR):
        return func

    def visit(call: Any, mutator: Any) -> Any:
        return erf_as_arithmetic(mutator.default_mutate(call))

    return func.with_body(structural_mutate(func.body, (Call, visit)))


def _with_products_for_powers(func: Any, _mod: Any, _context: Any) -> Any:
    """A function without squares and cubes by `powf`: TVM has CUDA compile with fast math, where those of negative
    numbers are NaN.
    """
    from tvm.ir import Call
    from tvm_ffi import structural_mutate

    from ansor_mlflow.codegen.functions import power_as_products

    def visit(call: Any, mutator: Any) -> Any:
        return power_as_products(mutator.default_mutate(call))

    return func.with_body(structural_mutate(func.body, (Call, visit)))


def _with_choices_of_vectors(func: Any, _mod: Any, _context: Any) -> Any:
    """A function whose vectors choose what they are made of once, and not each of their elements.

    TVM makes single elements of a vector in which a condition may differ. Where what a concatenation is made of begins
    at a multiple of the vector's length, it does not.
    """
    from tvm.tirx import For
    from tvm_ffi import structural_mutate

    def visit(loop: Any, mutator: Any) -> Any:
        return _choosing_once(mutator.default_mutate(loop))

    return func.with_body(structural_mutate(func.body, (For, visit)))


def _choosing_once(loop: Any) -> Any:
    """A vectorised loop over a block whose conditions `limit <= index` are those of the vector's first element."""
    from tvm import tirx
    from tvm.s_tir import SBlockRealize
    from tvm.sym import Analyzer
    from tvm_ffi import structural_mutate

    realize = loop.body
    if loop.kind != tirx.ForKind.VECTORIZED or int(loop.min) or not isinstance(realize, SBlockRealize):
        return loop
    lanes, analyzer, starts = int(loop.extent), Analyzer(), []
    for index, value in zip(realize.block.iter_vars, realize.iter_values, strict=True):
        if isinstance(value, tirx.Add) and value.b.same_as(loop.loop_var):
            start = analyzer.modular_set(value.a)
            if start.coeff % lanes == 0 and start.base % lanes == 0:
                starts.append((index.var, value.a))

    def of_vector(condition: Any, _mutator: Any) -> Any:
        found = (start for var, start in starts if condition.b.same_as(var))
        start = next(found, None) if isinstance(condition.a, tirx.IntImm) and int(condition.a) % lanes == 0 else None
        return condition if start is None else tirx.LE(condition.a, start)

    return structural_mutate(loop, (tirx.LE, of_vector)) if starts else loop


def _with_vector_sums(func: Any, _mod: Any, _context: Any) -> Any:
    """A lowered function whose sums and maxima of contiguous float32 are those of vectors.

    Each term of a sum waits for the one before, and LLVM keeps their order. A schedule can split a sum into a vector of
    partial sums only where that divides its axis: a softmax over 197 tokens took three times as long.
    """
    from tvm.tirx import For
    from tvm_ffi import structural_mutate

    def visit(loop: Any, mutator: Any) -> Any:
        loop = mutator.default_mutate(loop)
        return _vector_sum(loop) or loop

    return func.with_body(structural_mutate(func.body, (For, visit)))


def _vector_sum(loop: Any) -> Any:
    """A loop that adds terms to an element, or takes the maximum, in vectors; None of another loop."""
    from tvm import tirx

    store, extent, variable = only_statement(loop.body), loop.extent, loop.loop_var
    if loop.kind != tirx.ForKind.SERIAL or not isinstance(extent, tirx.IntImm) or int(loop.min):
        return None
    if int(extent) < _LANES or not _is_sum_over(store, variable):
        return None
    number, combine = tirx.Var("number", variable.ty), type(store.value)
    if (terms := _vector_of(store.value.b, variable, number * _LANES, _LANES)) is None:
        return None
    partial = tirx.decl_buffer((_LANES,), "float32", "partial", scope="local")

    def load(first: int, lanes: int) -> Any:
        return tirx.BufferLoad(partial, [_indices(tirx.const(first, "int32"), lanes)])

    def add(terms: Any, lanes: int) -> Any:
        place = _indices(tirx.const(0, "int32"), lanes)
        return tirx.BufferStore(partial, combine(load(0, lanes), terms), [place])

    start, num_vectors = tirx.const(0, str(variable.ty.dtype)), int(extent) // _LANES
    steps = [
        tirx.AllocBuffer(partial),
        tirx.BufferStore(partial, replaced(terms, number, start), [_indices(start, _LANES)]),
        tirx.For(number, 0, num_vectors - 1, loop.kind, add(replaced(terms, number, number + 1), _LANES)),
    ]
    done = num_vectors * _LANES
    for lanes in _HALVES:  # what is left, in vectors that are shorter and shorter
        if int(extent) & lanes:
            steps.append(add(_vector_of(store.value.b, variable, start + done, lanes), lanes))
            done += lanes
    steps += [add(load(lanes, lanes), lanes) for lanes in _HALVES]
    steps.append(tirx.BufferStore(store.buffer, combine(store.value.a, load(0, 1)), store.indices))
    return tirx.SeqStmt(steps)


def _is_sum_over(store: Any, variable: Any) -> bool:
    """Whether a statement adds terms that depend on a variable to one element of float32, or takes the maximum."""
    from tvm.ir import TensorLoad
    from tvm.tirx import Add, BufferStore, Max, Min
    from tvm_ffi import structural_equal, structural_walk

    if not isinstance(store, BufferStore) or not isinstance(store.value, (Add, Max, Min)) or len(store.indices) != 1:
        return False
    before, term = store.value.a, store.value.b
    if not isinstance(before, TensorLoad) or str(store.value.ty.dtype) != "float32":
        return False
    reads: list[Any] = []
    structural_walk(term, (TensorLoad, lambda read: reads.append(read.source)))
    return (
        before.source.same_as(store.buffer)
        and structural_equal(before.indices, store.indices)
        and not _uses(store.indices[0], [variable])
        and _uses(term, [variable])
        and not any(source.same_as(store.buffer) for source in reads)
    )


def _vector_of(value: Any, variable: Any, first: Any, lanes: int) -> Any:
    """The vector of what a value is for `first` and the next values of a variable; None where it is not contiguous."""
    from tvm import tirx
    from tvm.ir import Call, TensorLoad
    from tvm.sym import detect_linear_equation

    if not _uses(value, [variable]):
        return tirx.Broadcast(value, lanes) if lanes > 1 else value
    if isinstance(value, TensorLoad):
        terms = detect_linear_equation(value.indices[0], [variable]) if len(value.indices) == 1 else []
        if not len(terms) or not isinstance(terms[0], tirx.IntImm) or int(terms[0]) != 1:
            return None
        return tirx.BufferLoad(value.source, [_indices(replaced(value.indices[0], variable, first), lanes)])
    if isinstance(value, Call) and getattr(value.op, "name", "") in _ELEMENTWISE:
        arguments = [_vector_of(argument, variable, first, lanes) for argument in value.args]
        dtype = f"float32x{lanes}" if lanes > 1 else "float32"
        return None if None in arguments else tirx.call_intrin(dtype, value.op.name, *arguments)
    if not isinstance(value, (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Max, tirx.Min)):
        return None
    operands = [_vector_of(operand, variable, first, lanes) for operand in (value.a, value.b)]
    return None if None in operands else type(value)(*operands)


def _indices(first: Any, lanes: int) -> Any:
    from tvm import tirx

    return tirx.Ramp(first, 1, lanes) if lanes > 1 else first


def _with_arrays(func: Any, _mod: Any, _context: Any) -> Any:
    """A lowered function whose small local buffers are arrays of its own."""
    from tvm.tirx import AllocBuffer
    from tvm_ffi import structural_mutate

    return func.with_body(structural_mutate(func.body, (AllocBuffer, _as_array)))


def _with_prefetches(func: Any, _mod: Any, _context: Any) -> Any:
    """A lowered function whose annotated loops fetch the next panel."""
    from tvm.tirx import For
    from tvm_ffi import structural_mutate

    return func.with_body(structural_mutate(func.body, (For, _Fetcher(func.body).visit)))


def _as_array(alloc: Any, _mutator: Any) -> Any:
    import tvm
    from tvm import tirx

    buffer = alloc.buffer
    num_bits = tvm.DataType(str(buffer.dtype)).bits
    for extent in buffer.shape:
        if not isinstance(extent, tirx.IntImm):
            return alloc
        num_bits *= int(extent)
    if buffer.scope() != "local" or num_bits > 8 * _MAX_STACK_BYTES:
        return alloc
    # Else it is memory from TVM's pool, to which LLVM writes the sums, too: programs take 7 to 13 % longer.
    return tirx.AllocBuffer(buffer, {**dict(alloc.annotations), _IS_ARRAY: tirx.IntImm("int32", 1)})


class _Fetcher:
    """Fetches weights while the ones before them are multiplied.

    A program of a sketch reads packed weights panel after panel: all sums of some output channels, once for each tile
    of the image. The first tile waits for memory, the others find the panel in a cache. A loop over sums that says how
    many tiles there are (`PREFETCH`) gets instructions that fetch the next panel, a share of it with each tile, so that
    memory is read all the time. To fetch what is beyond the last panel has no effect.
    """

    def __init__(self, body: Any) -> None:
        from tvm.tirx import Bind
        from tvm_ffi import structural_walk

        self._values: dict[Any, Any] = {}
        """Values that variables stand for."""
        self._around: Any = None
        """The next loop around."""
        self._num_loops = 0
        """Annotated loops before this one."""

        def note(node: Any) -> None:
            if isinstance(node, Bind):
                self._values[node.var] = node.value

        structural_walk(body, note)

    def visit(self, loop: Any, mutator: Any) -> Any:
        if PREFETCH in loop.annotations:
            return self._with_fetches(loop, int(loop.annotations[PREFETCH]))
        outer, self._around = self._around, loop
        loop = mutator.default_mutate(loop)
        self._around = outer
        return loop

    def _with_fetches(self, loop: Any, num_passes: int) -> Any:
        from tvm import DataType, tirx

        found = self._vectors(loop)
        number, self._num_loops = self._num_loops, self._num_loops + 1
        if found is None:
            return loop
        buffer, start, stride = found
        around = self._around
        # The loop around goes over the tiles for which a panel is read, or else these are written out.
        is_pass = around is not None and int(around.extent) == num_passes and not _uses(start, [around.loop_var])
        of_pass = around.loop_var if is_pass else number % num_passes
        num_sums, step = int(loop.extent), -(-stride // num_passes)
        place = start + num_sums * stride + (of_pass * num_sums + loop.loop_var) * step
        line = 8 * _LINE_BYTES // DataType(str(buffer.dtype)).bits
        fetches = [
            fetch(buffer, place + offset, _ALL_CACHES) for offset in range(0, min(step, _MAX_FETCHES * line), line)
        ]
        body = tirx.SeqStmt([loop.body, *fetches])
        return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, body, None, loop.annotations)

    def _vectors(self, loop: Any) -> tuple[Any, Any, int] | None:
        """What a loop reads vector after vector: the buffer, the first element, and the elements of an iteration."""
        from tvm.ir import TensorLoad
        from tvm.sym import detect_linear_equation
        from tvm.tirx import For, Ramp
        from tvm_ffi import structural_walk

        inside = []
        structural_walk(loop.body, lambda node: inside.append(node.loop_var) if isinstance(node, For) else None)
        found = []

        def note(node: Any) -> None:
            if isinstance(node, TensorLoad) and isinstance(node.indices[0], Ramp):
                terms = detect_linear_equation(self._expanded(node.indices[0].base), [loop.loop_var])
                if len(terms) and int(terms[0]) > 0 and not _uses(terms[1], inside):
                    found.append((node.source, terms[1], int(terms[0])))

        structural_walk(loop.body, note)
        return found[0] if found else None

    def _expanded(self, index: Any) -> Any:
        """An index without the variables that TVM has put for common terms."""
        from tvm.tirx import Var
        from tvm_ffi import structural_mutate

        def value_of(var: Any, _mutator: Any) -> Any:
            return self._expanded(self._values[var]) if var in self._values else var

        return structural_mutate(index, (Var, value_of))


def _uses(index: Any, variables: Sequence[Any]) -> bool:
    from tvm.tirx.analysis import undefined_vars

    return any(var.same_as(other) for var in undefined_vars(index) for other in variables)


def _with_nans_kept(func: Any, _mod: Any, _context: Any) -> Any:
    """A lowered function whose maxima and minima of floats keep NaN, as IEEE 754's `maximum` and ONNX Runtime do.

    TVM's code generator for LLVM chooses `a > b ? a : b`, which is b where either is NaN: max(x, 0), which is what a
    rectifier is in TVM, would make an ordinary number of it. With the operands in the other order, 0 > x ? 0 : x, a
    comparison with a constant keeps NaN in as many instructions. So does one with a single element that is an argument,
    as which bounds of a Clip arrive. Where both operands may be NaN the first one is looked at, too. Arm has
    instructions that keep NaN, which only LLVM's intrinsics ask for.

    A running maximum is left as it is, so that the loops of a pooling layer cost what they did: as in ONNX Runtime's
    kernels, it is that of what comes after a NaN, and NaN where that is the last; on a GPU, NaN is passed over.
    `graphs.operators.elementwise` does what ReduceMax and its like need beyond that, and a softmax has a sum that keeps
    NaN.
    """
    from tvm.tirx import BufferStore, Max, Min
    from tvm_ffi import structural_mutate

    target = func.attrs["target"]
    keep = _intrinsic if platform_of(target).by_llvm and machine_of(target) == "aarch64" else _Choices(func)
    running: list[Any] = []

    def store(node: Any, mutator: Any) -> Any:
        if _is_running(node):
            running.append(node.value)
        return mutator.default_mutate(node)

    def visit(node: Any, mutator: Any) -> Any:
        is_running = any(node.same_as(value) for value in running)
        node = mutator.default_mutate(node)
        if is_running or "float" not in str(node.ty.dtype):
            return node
        return keep(node, is_max=isinstance(node, Max))

    return func.with_body(structural_mutate(func.body, [(BufferStore, store), (Max, visit), (Min, visit)]))


def _intrinsic(node: Any, *, is_max: bool) -> Any:
    """The instruction that gives a NaN of either operand."""
    from tvm.tirx import call_llvm_pure_intrin

    return call_llvm_pure_intrin(str(node.ty.dtype), "llvm.maximum" if is_max else "llvm.minimum", node.a, node.b)


class _Choices:
    """Makes choices that give a NaN of either operand."""

    def __init__(self, func: Any) -> None:
        from tvm.tirx import AllocBuffer
        from tvm_ffi import structural_walk

        self._own: list[Any] = []
        """Buffers of the function itself."""
        self._by_llvm = platform_of(func.attrs["target"]).by_llvm
        structural_walk(
            func.body, lambda node: self._own.append(node.buffer) if isinstance(node, AllocBuffer) else None
        )

    def __call__(self, node: Any, *, is_max: bool) -> Any:
        from tvm.tirx import Let, Max, Min, Select, Var

        first, second = (node.b, node.a) if self._rank(node.b) > self._rank(node.a) else (node.a, node.b)
        a, b = Var("a", first.ty), Var("b", second.ty)
        if self._rank(first) > self._rank(second):
            if self._by_llvm:
                # LLVM's code generator gives the second operand where either is NaN. A choice with a `Let` would do the
                # same, but TVM's simplifier puts values of `Let` into the conditions above them, again and again: a
                # chain of a few rectifiers took minutes.
                return Max(first, second) if is_max else Min(first, second)
            return Let(b, second, Select(first > b if is_max else first < b, first, b))
        chosen = Select(a.equal(a), Select(a > b if is_max else a < b, a, b), a)
        return Let(a, first, Let(b, second, chosen))

    def _rank(self, value: Any) -> int:
        """Two for a constant other than NaN, one for a bound that is an argument of one element, none for others.

        `graphs.operators.elementwise` puts NaN behind the maximum where such an argument is one.
        """
        from tvm.ir import TensorLoad
        from tvm.tirx import Broadcast, FloatImm

        value = value.value if isinstance(value, Broadcast) else value
        if isinstance(value, FloatImm):
            return 0 if math.isnan(value.value) else 2
        if not isinstance(value, TensorLoad) or any(getattr(size, "value", 0) != 1 for size in value.source.shape):
            return 0
        return int(not any(value.source.same_as(buffer) for buffer in self._own))


def _is_running(store: Any) -> bool:
    """Whether a statement replaces an element by the maximum of it and another value."""
    from tvm.ir import TensorLoad
    from tvm.tirx import Max, Min
    from tvm_ffi import structural_equal

    return isinstance(store.value, (Max, Min)) and any(
        isinstance(operand, TensorLoad)
        and operand.source.same_as(store.buffer)
        and structural_equal(operand.indices, store.indices)
        for operand in (store.value.a, store.value.b)
    )
