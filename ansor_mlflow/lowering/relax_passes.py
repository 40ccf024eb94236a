"""Passes over Relax: indices kept inside of tensors, places of extrema, normalisations, convolutions of bytes, what
functions are fused with; joining modules, and outputs that are given.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import ml_dtypes  # noqa: F401  NumPy knows bfloat16 by it
import numpy as np
from tvm import relax, te, tirx, topi
from tvm.ir import GenericConst, GlobalVar, IRModule, Op
from tvm.ir.transform import Pass, PassContext, Sequential, module_pass
from tvm.s_tir import SBlock
from tvm.tirx import PrimFunc
from tvm_ffi import structural_equal, structural_mutate, structural_walk

_PATTERN = "op_pattern"
_INJECTIVE, _OPAQUE = 2, 8
"""`OpPatternKind` of TVM (include/tvm/relax/op_attr_types.h): below the first are elementwise and broadcast operations,
and the last is fused with nothing."""
_MAX_FUSED_PARTS = 6
"""Parts of a concatenation; those of image networks have no more."""
_ALONG_AXIS = {"relax.gather_elements", "relax.scatter_elements"}
_COORDINATES = {"relax.gather_nd", "relax.scatter_nd"}
_CONVOLUTIONS = {"relax.nn.conv1d", "relax.nn.conv2d", "relax.nn.conv3d"}


def call_pass(name: str) -> Callable[[Callable[[Any, relax.Call], relax.Expr]], Pass]:
    """Makes a pass over "main" of what rewrites a call, whose arguments are rewritten; it gets the mutator, too."""

    def make(rewrite: Callable[[Any, relax.Call], relax.Expr]) -> Pass:
        @relax.expr_functor.mutator
        class Calls(relax.PyExprMutator):  # type: ignore[misc]
            def __init__(self, mod: IRModule) -> None:
                super().__init__(mod)
                self.mod = mod

            def visit_call_(self, call: relax.Call) -> relax.Expr:
                return rewrite(self, self.visit_expr_post_order(call))

        @module_pass(opt_level=0, name=name)  # type: ignore[untyped-decorator]
        def rewrite_main(mod: IRModule, _context: PassContext) -> IRModule:
            calls = Calls(mod)
            main = calls.visit_expr(mod["main"])
            rewritten = calls.builder_.get().clone()  # with the functions that were added
            rewritten.update_func(rewritten.get_global_var("main"), main)
            return rewritten

        return rewrite_main

    return make


def bound(mutator: Any, expr: relax.Expr) -> relax.Expr:
    """The expression that a variable stands for."""
    value = mutator.lookup_binding(expr) if isinstance(expr, relax.Var) else None
    return expr if value is None else value


def op_name(expr: relax.Expr) -> str:
    """The name of the operator that an expression calls; empty where it calls none."""
    return str(getattr(getattr(expr, "op", None), "name", ""))


def _call(builder: relax.BlockBuilder, call: relax.Call, *, find: Callable[..., te.Tensor], sign: int) -> relax.Expr:
    axis = None if call.attrs.axis is None else int(call.attrs.axis)

    def place(data: te.Tensor) -> te.Tensor:
        if str(data.dtype).startswith("float"):
            return find(_comparable(data, axis, sign), axis, call.attrs.keepdims)
        found = find(data, axis, call.attrs.keepdims)
        return te.compute(found.shape, lambda *indices: tirx.max(found[indices], 0), "place")  # all are the smallest

    return builder.call_te(place, call.args[0], primfunc_name_hint=call.op.name.removeprefix("relax."))


def _comparable(data: te.Tensor, axis: int | None, sign: int) -> te.Tensor:
    """Values of which the first one is chosen where it is NaN; all are beyond the number that TVM begins with."""
    dtype = str(data.dtype)
    info = np.finfo(dtype)
    last = tirx.const(-sign * float(np.nextafter(info.max, info.dtype.type(0))), dtype)
    wins = tirx.const(sign * np.inf, dtype)
    bound = tirx.max if sign > 0 else tirx.min

    def value(*indices: Any) -> Any:
        along = indices if axis is None else [indices[axis]]
        is_first = tirx.all(*(index == 0 for index in along))
        element = data[indices]
        of_nan = tirx.Select(is_first, wins, last)
        return tirx.Select(tirx.isnan(element), of_nan, bound(element, last))

    return te.compute(data.shape, value, "comparable")


def _layer_norm(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    attrs, rank = call.attrs, call.ty.ndim
    if [int(axis) % rank for axis in attrs.axes] != [rank - 1] or not attrs.center or not attrs.scale:
        return call.op.get_attr("FLegalize")(builder, call)

    def norm(data: te.Tensor, scale: te.Tensor, bias: te.Tensor) -> te.Tensor:
        *rows, size = map(int, data.shape)
        one, number, epsilon = (tirx.const(float(value), "float32") for value in (1, size, attrs.epsilon))
        first, second = (te.reduce_axis((0, size), name) for name in ("first", "second"))

        def exact(tensor: te.Tensor, *place: Any) -> Any:
            return tensor[place].astype("float32")

        total = te.compute(rows, lambda *row: te.sum(exact(data, *row, first), axis=first), "total")
        centred = te.compute(data.shape, lambda *place: exact(data, *place) - total[place[:-1]] / number, "centred")
        square = te.compute(
            rows, lambda *row: te.sum(centred[(*row, second)] * centred[(*row, second)], axis=second), "square"
        )

        def value(*place: Any) -> Any:
            inverse = one / te.sqrt(square[place[:-1]] / number + epsilon)
            scaled = centred[place] * inverse * exact(scale, place[-1]) + exact(bias, place[-1])
            return scaled.astype(data.dtype)

        return te.compute(data.shape, value, "norm")

    return builder.call_te(norm, *call.args, primfunc_name_hint="layer_norm")


FUNCTIONS = {
    "relax.argmax": partial(_call, find=topi.argmax, sign=1),
    "relax.argmin": partial(_call, find=topi.argmin, sign=-1),
    "relax.nn.layer_norm": _layer_norm,
}
"""How these operators become functions, for `LegalizeOps`.

TVM looks for extrema from the smallest number of a type at place -1 on, and forgets what came before a NaN. As ONNX
Runtime, this begins with the first value, which stays where it is NaN, and passes over any other NaN. The variance of a
normalisation is to TVM a difference of squares, of which a large mean leaves no digits.
"""


@call_pass("JoinedLayerNorms")
def joined_layer_norms(mutator: Any, call: relax.Call) -> relax.Expr:
    """Makes one function of a normalisation over the last axis that an exporter wrote in nine operators."""
    scaled, bias = _with_constant(mutator, call, "relax.add")
    divided, scale = _with_constant(mutator, scaled, "relax.multiply")
    quotient = bound(mutator, divided)
    if op_name(quotient) != "relax.divide" or op_name(root := bound(mutator, quotient.args[1])) != "relax.sqrt":
        return call
    deviations, (variance, epsilon) = quotient.args[0], _with_constant(mutator, root.args[0], "relax.add")
    centred, squares = bound(mutator, deviations), _mean_of_rows(mutator, variance)
    if op_name(centred) != "relax.subtract" or squares is None or not _is_square(mutator, squares, deviations):
        return call
    data, size = centred.args[0], int(call.ty.shape[-1])
    mean_of = _mean_of_rows(mutator, centred.args[1])
    are_rows = all(each is not None and each.shape == (size,) for each in (scale, bias))
    if mean_of is None or not data.same_as(mean_of) or not are_rows or str(call.ty.dtype) != "float32":
        return call
    if epsilon is None or epsilon.size != 1:
        return call
    return relax.op.nn.layer_norm(data, relax.const(scale), relax.const(bias), [-1], float(epsilon.item()))


def _is_square(mutator: Any, expr: relax.Expr, base: relax.Expr) -> bool:
    call = bound(mutator, expr)
    if op_name(call) not in ("relax.multiply", "relax.power") or not call.args[0].same_as(base):
        return False
    other = bound(mutator, call.args[1])
    is_two = isinstance(other, GenericConst) and bool((other.value.numpy() == 2).all())
    return is_two if op_name(call) == "relax.power" else bool(call.args[1].same_as(base))


def _with_constant(mutator: Any, expr: relax.Expr, name: str) -> tuple[relax.Expr, np.ndarray[Any, Any] | None]:
    """The operand of a call of an operator whose other operand is a constant, and its value; of others, themselves."""
    call = bound(mutator, expr)
    if op_name(call) == name:
        for place, operand in enumerate(call.args):
            if isinstance(constant := bound(mutator, operand), GenericConst):
                return call.args[1 - place], constant.value.numpy()
    return expr, None


def _mean_of_rows(mutator: Any, expr: relax.Expr) -> relax.Expr | None:
    """What an expression is the mean of, over the last axis, which it keeps; None of others."""
    call = bound(mutator, expr)
    if op_name(call) != "relax.mean" or not call.attrs.keepdims or call.attrs.axis is None:
        return None
    is_last = [int(axis) % call.ty.ndim for axis in call.attrs.axis] == [call.ty.ndim - 1]
    return call.args[0] if is_last else None


@call_pass("BoundIndices")
def bound_indices(mutator: Any, call: relax.Call) -> relax.Expr:
    """Makes an index outside of a tensor harmless, wherever indices are no constants inside of it.

    ONNX makes such an index an error; TVM's kernels read, and for a scatter write, whatever memory it points to.
    Gather gives NaN for it, everything else takes the nearest inside. A tensor that does not hold floats has no NaN, so
    Gather takes the nearest there, too.
    """
    name, is_gather = op_name(call), op_name(call) == "relax.take" and call.attrs.mode == "fast"
    if not is_gather and name not in _ALONG_AXIS | _COORDINATES:
        return call
    data, indices, *rest = call.args
    if (sizes := _sizes(call)) is not None:
        # This one takes negative indices; for the others TVM's importer makes them positive.
        lowest, highest = -sizes if name == "relax.scatter_elements" else 0 * sizes, sizes - 1
        constant = bound(mutator, indices)
        if isinstance(constant, GenericConst):
            values = constant.value.numpy()
            if ((lowest <= values) & (values <= highest)).all():
                return call
    if is_gather:
        return relax.op.take(data, indices, call.attrs.axis, "nan" if "float" in str(data.ty.dtype) else "clip")
    if sizes is None:
        return call
    dtype = str(indices.ty.dtype)
    nearest = relax.op.minimum(relax.op.maximum(indices, relax.const(lowest, dtype)), relax.const(highest, dtype))
    return relax.Call(call.op, [data, mutator.builder_.normalize(nearest), *rest], call.attrs)


def _sizes(call: relax.Call) -> np.ndarray[Any, Any] | None:
    """Sizes of the axes that indices point along: a number, or one for each coordinate; None where they are dynamic."""
    data, indices, *_ = call.args
    if data.ty.shape is None or not all(isinstance(size, tirx.IntImm) for size in data.ty.shape):
        return None
    sizes = np.array([int(size) for size in data.ty.shape])
    if call.op.name not in _COORDINATES:
        return sizes[call.attrs.axis]  # type: ignore[no-any-return]
    first = getattr(call.attrs, "batch_dims", 0)
    return sizes[first : first + int(indices.ty.shape[-1])]


@call_pass("PositiveSqueezeAxes")
def positive_squeeze_axes(_mutator: Any, call: relax.Call) -> relax.Expr:
    """Gives every squeeze axes from the front: ConvertLayout crashes on those from the end."""
    if op_name(call) != "relax.squeeze" or call.attrs.axis is None:
        return call
    return relax.op.squeeze(call.args[0], [int(axis) % call.args[0].ty.ndim for axis in call.attrs.axis])


@dataclass(frozen=True)
class _ByteData:
    """Bytes that a convolution reads, with the channels last, and what it does with them first."""

    levels: relax.Expr
    before: list[int]
    """Elements of padding before each axis."""
    after: list[int]
    outside: int
    """What they are padded with."""
    shift: float | None = None
    """What is subtracted where they become floats, which comes before the padding; None where they stay bytes."""


@call_pass("BytesInConvolutions")
def _bytes_in_convolutions(mutator: Any, call: relax.Call) -> relax.Expr:
    if op_name(call) not in _CONVOLUTIONS or not str(call.attrs.data_layout).endswith("C"):
        return call
    found = _padded_bytes(mutator, call) or _bytes_as_floats(mutator, call)
    if found is None:
        return call
    name = op_name(call).rpartition(".")[2]
    return mutator.builder_.call_te(
        partial(_convolution, call=call, bytes_=found), found.levels, call.args[1], primfunc_name_hint=name
    )


def _padded_bytes(mutator: Any, call: relax.Call) -> _ByteData | None:
    """The bytes of a convolution of integers, which are padded with what is no zero; None of another.

    Channels are added where the bytes are made, which puts those of an element beside each other.
    """
    source, axes = _unmoved(mutator, call.args[0])
    is_pad = op_name(source) == "relax.nn.pad" and source.attrs.pad_mode == "constant"
    if not is_pad or str(source.ty.dtype) != "uint8" or call.attrs.groups != 1 or any(map(int, call.attrs.padding)):
        return None
    widths = [int(width) for width in source.attrs.pad_width]
    before, after = ([widths[2 * axis + side] for axis in axes] for side in (0, 1))
    levels = _moved(mutator, source.args[0], axes)
    return None if before[-1] or after[-1] else _ByteData(levels, before, after, int(source.attrs.pad_value))


def _bytes_as_floats(mutator: Any, call: relax.Call) -> _ByteData | None:
    """The bytes of which the floats of a convolution of single channels are made; None of another."""
    (source, axes), shift = _unmoved(mutator, call.args[0]), np.zeros(1)
    if op_name(source) == "relax.subtract" and isinstance(constant := bound(mutator, source.args[1]), GenericConst):
        source, shift = bound(mutator, source.args[0]), constant.value.numpy()
    is_conversion = op_name(source) == "relax.astype" and str(source.ty.dtype) == "float32" and shift.size == 1
    is_single = call.attrs.groups == int(call.ty.shape[-1]) == int(call.args[0].ty.shape[-1])
    if not is_conversion or not is_single or str(source.args[0].ty.dtype) not in ("int8", "uint8"):
        return None
    padding = [int(width) for width in call.attrs.padding]
    before, after = ([0, *widths, 0] for widths in (padding[: len(padding) // 2], padding[len(padding) // 2 :]))
    return _ByteData(_moved(mutator, source.args[0], axes), before, after, 0, float(shift.item()))


def _unmoved(mutator: Any, expr: relax.Expr) -> tuple[relax.Expr, list[int]]:
    """What an expression is before a transposition, and its axes; the expression itself where it is none."""
    source = bound(mutator, expr)
    if op_name(source) != "relax.permute_dims":
        return source, list(range(expr.ty.ndim))
    return bound(mutator, source.args[0]), [int(axis) for axis in source.attrs.axes]


def _moved(mutator: Any, expr: relax.Expr, axes: list[int]) -> relax.Expr:
    return expr if axes == sorted(axes) else mutator.builder_.normalize(relax.op.permute_dims(expr, axes))


def _convolution(data: te.Tensor, weight: te.Tensor, *, call: relax.Call, bytes_: _ByteData) -> te.Tensor:
    dtype, is_single = call.ty.dtype, bytes_.shift is not None
    strides, dilations = ([int(size) for size in sizes] for sizes in (call.attrs.strides, call.attrs.dilation))
    if is_single:
        data = te.compute(data.shape, lambda *place: data[place].astype(dtype) - bytes_.shift, "levels")
    padded = topi.nn.pad(data, bytes_.before, bytes_.after, tirx.const(bytes_.outside, data.dtype))
    terms = [te.reduce_axis((0, extent), f"k{place}") for place, extent in enumerate(weight.shape[:-1])]

    def total(image: Any, *place: Any) -> te.Tensor:
        steps = zip(place[:-1], terms[:-1], strides, dilations, strict=True)
        window = [at * stride + term * dilation for at, term, stride, dilation in steps]
        factors = padded[(image, *window, place[-1] if is_single else terms[-1])], weight[(*terms, place[-1])]
        return te.sum(factors[0].astype(dtype) * factors[1].astype(dtype), axis=terms)

    return te.compute(tuple(call.ty.shape), total, "convolution")


BYTES_IN_CONVOLUTIONS = Sequential([_bytes_in_convolutions, relax.transform.DeadCodeElimination(["main"])])
"""Puts the zero points around bytes, which are no zeros, into convolutions, and what makes floats of bytes, channel by
channel, too, so that bytes are what is written and read. To be run when layouts are those of the functions.
"""


@call_pass("EvenChannels")
def even_channels(mutator: Any, call: relax.Call) -> relax.Expr:
    """Adds zeros to the channels of an image, of which there are three, so that they are pairs of bfloat16."""
    if op_name(call) not in _CONVOLUTIONS or call.attrs.groups != 1 or str(call.attrs.data_layout)[:2] != "NC":
        return call
    data, weight = call.args[0], bound(mutator, call.args[1])
    if not isinstance(weight, GenericConst) or not int(weight.ty.shape[1]) % 2 or str(data.ty.dtype) != "float32":
        return call
    missing = [(0, 0), (0, 1), *[(0, 0)] * (data.ty.ndim - 2)]
    kernel = relax.const(np.pad(weight.value.numpy(), missing))
    padded = mutator.builder_.emit(relax.op.nn.pad(data, [width for widths in missing for width in widths]))
    return relax.Call(call.op, [padded, kernel], call.attrs)


@call_pass("Float16ToBfloat16")
def float16_to_bfloat16(_mutator: Any, call: relax.Call) -> relax.Expr:
    """Casts to bfloat16 wherever a module casts to float16, which is all that TVM's own pass knows."""
    if op_name(call) == "relax.astype" and call.attrs.dtype == "float16":
        return relax.op.astype(call.args[0], "bfloat16")
    return call


# TVM takes a slice that begins at zero for an elementwise operation, since it reads what it writes, and fuses it into a
# convolution. The convolution's tiles then have to fit the sizes after the slice, too, for which they were padded.
#
# It fuses a concatenation with what computes any of its parts. With many parts, as those of the steps of a recurrent
# layer, the last step would be a function of its own kind, whose every element asks which step it belongs to: LLVM
# takes a minute for it.
@module_pass(opt_level=0, name="CorrectPatterns")  # type: ignore[untyped-decorator]
def correct_patterns(mod: IRModule, _context: PassContext) -> IRModule:
    """Says what slices and concatenations are; to be run on what AnnotateTIROpPattern annotated."""
    annotated = mod.clone()
    for var, function in mod.functions_items():
        name, is_kernel = var.name_hint, isinstance(function, PrimFunc)
        is_long = is_kernel and name.startswith("concatenate") and len(function.params) - 1 > _MAX_FUSED_PARTS
        if is_long or (is_kernel and name.startswith("strided_slice")):
            pattern = max(int(function.attrs[_PATTERN]), _OPAQUE if is_long else _INJECTIVE)
            annotated.update_func(var, function.with_attr(_PATTERN, pattern))
    return annotated


@module_pass(opt_level=0, name="NamedByOperators")  # type: ignore[untyped-decorator]
def named_by_operators(mod: IRModule, _context: PassContext) -> IRModule:
    """Names no block after the variable that it reads: a trace finds its blocks by their names, and in another network,
    or a part of one, the same function reads another variable.
    """
    named = mod.clone()
    for var, function in mod.functions_items():
        if isinstance(function, PrimFunc):
            variables = {str(param.name) for param in function.params}
            named.update_func(var, function.with_body(_with_plain_names(function.body, variables)))
    return named


def _with_plain_names(body: Any, variables: Collection[str]) -> Any:
    """The body of a function whose reductions, which TVM calls VARIABLE_red, are called without it."""
    blocks: list[SBlock] = []
    structural_walk(body, (SBlock, blocks.append))
    found = [str(block.name_hint) for block in blocks]
    plain: dict[str, str] = {}
    for name in found:
        end = next(
            (name.removeprefix(f"{variable}_") for variable in variables if name.startswith(f"{variable}_red")), ""
        )
        if end:
            taken = {*found, *plain.values()}
            numbered = (f"{end}_{number}" for number in itertools.count(1))
            plain[name] = next(each for each in itertools.chain([end], numbered) if each not in taken)

    def rename(block: Any, mutator: Any) -> Any:
        block = mutator.default_mutate(block)
        if str(block.name_hint) not in plain:
            return block
        return SBlock(
            block.iter_vars,
            block.reads,
            block.writes,
            plain[str(block.name_hint)],
            block.body,
            block.init,
            block.alloc_buffers,
            block.match_buffers,
            block.annotations,
        )

    return structural_mutate(body, (SBlock, rename)) if plain else body


def join_modules(modules: Mapping[str, IRModule]) -> IRModule:
    """Puts the functions of several modules into one; the "main" of each gets the name that it is given by.

    Functions of two modules that are the same become one; others of the same name get a number.
    """
    joined = IRModule()
    for name, mod in modules.items():
        variables: dict[str, GlobalVar] = {}
        for var, function in mod.functions_items():
            if var.name_hint != "main":
                variables[var.name_hint] = _added(joined, var, function)
        joined[name] = _Renamer(variables).visit_expr(mod["main"]).with_attr("global_symbol", name)
    return joined


def with_given_outputs(mod: IRModule, name: str, max_bytes: int) -> IRModule:
    """A module with another form of "main", called `name`, to which tensors for the outputs are given, too.

    To ask TVM for an output and to free it takes longer than many a kernel. The module stays as it is where outputs
    have more than `max_bytes` together. Schedules are applied before.
    """
    result = mod["main"].ret_ty
    is_tuple = isinstance(result, relax.TupleType)
    types = list(result.fields) if is_tuple else [result]
    outputs = [te.placeholder(tuple(map(int, each.shape)), each.dtype) for each in types]
    if sum(math.prod(map(int, each.shape)) * each.dtype.dtype.itemsize for each in types) > max_bytes:
        return mod
    builder, main = relax.BlockBuilder(mod), relax.utils.copy_with_new_vars(mod["main"])
    copies = te.create_prim_func([*outputs, *map(topi.identity, outputs)])
    copying = builder.add_func(copies.with_attr("global_symbol", "copy_outputs"), "copy_outputs")
    given = [relax.Var(f"output{place}", each) for place, each in enumerate(types)]
    whole = main.body.body
    taken = [relax.TupleGetItem(whole, place) for place in range(len(types))] if is_tuple else [whole]
    call = relax.call_tir_inplace(copying, [*taken, *given], list(range(len(types), 2 * len(types))), types)
    copied = relax.Var("copied", result if len(types) > 1 else types[0])
    blocks = [*main.body.blocks, relax.BindingBlock([relax.VarBinding(copied, call)])]
    function = relax.Function([*main.params, *given], relax.SeqExpr(blocks, copied), copied.ty, attrs=main.attrs)
    builder.add_func(function.with_attr("global_symbol", name), name)
    return Sequential([relax.transform.Normalize(), relax.transform.CanonicalizeBindings()])(builder.get())


def _added(joined: IRModule, var: GlobalVar, function: Any) -> GlobalVar:
    """The variable of a function under its name or with a number: the first that is free, or that of the same one."""
    name = var.name_hint
    there = {other.name_hint: other for other in joined.get_global_vars()}
    for number in itertools.count(1):
        if name not in there:
            break
        other, same = (each.without_attr("global_symbol") for each in (joined[name], function))
        if structural_equal(other, same, map_free_vars=True):
            return there[name]
        name = f"{var.name_hint}_{number}"
    new = GlobalVar(name)
    relax.expr._update_type(new, var.ty)
    # One that has no symbol gets none: that would change the hash of its records.
    has_symbol = function.attrs is not None and "global_symbol" in function.attrs
    joined[new] = function.with_attr("global_symbol", name) if has_symbol else function
    return new


@relax.expr_functor.mutator
class _Renamer(relax.PyExprMutator):  # type: ignore[misc]
    def __init__(self, variables: Mapping[str, GlobalVar]) -> None:
        super().__init__()
        self._variables = variables

    def visit_global_var_(self, var: GlobalVar) -> GlobalVar:
        return self._variables[var.name_hint]


_TAKE_MODES: dict[str, Literal["raise", "wrap", "clip"]] = {"fast": "clip", "clip": "clip", "wrap": "wrap"}
"""NumPy's name of what becomes of an index beyond the end; what "fast" reads there is not defined."""
_BY_CALL = {
    *("relax.astype", "relax.expand_dims", "relax.permute_dims", "relax.reshape", "relax.shape_to_tensor"),
    "relax.take",
}
_ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "relax.add": np.add,
    "relax.divide": np.divide,
    "relax.isnan": np.isnan,
    "relax.less": np.less,
    "relax.multiply": np.multiply,
    "relax.sqrt": np.sqrt,
    "relax.subtract": np.subtract,
    "relax.where": np.where,
}
"""Operators that NumPy computes to the same bits as a compiled kernel."""


def _is_static(shape: relax.ShapeType) -> bool:
    return shape.values is not None and all(isinstance(extent, tirx.IntImm) for extent in shape.values)


def _computed(name: str, call: relax.Call, args: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any] | None:
    """The result of a call; None where NumPy does not compute it with these attributes."""
    match name:
        case "relax.astype":
            return args[0].astype(str(call.attrs.dtype))
        case "relax.expand_dims" | "relax.reshape":
            return args[0].reshape([int(size) for size in call.ty.shape])
        case "relax.permute_dims":
            axes = call.attrs.axes
            return np.transpose(args[0], None if axes is None else [int(axis) for axis in axes])
        case "relax.shape_to_tensor":
            shape = call.args[0].ty
            return np.asarray([int(extent) for extent in shape.values], "int64") if _is_static(shape) else None
        case "relax.take":
            axis, mode = call.attrs.axis, _TAKE_MODES.get(call.attrs.mode)
            return np.take(args[0], args[1], None if axis is None else int(axis), mode=mode) if mode else None
    result: np.ndarray[Any, Any] = _ELEMENTWISE[name](*args)
    return result


@call_pass("FoldConstantInNumPy")
def fold_constants_in_numpy(mutator: Any, call: relax.Call) -> relax.Expr:
    """Evaluates the simplest calls with constant arguments."""
    name = op_name(call)
    if name == "relax.shape_of" and _is_static(call.ty):
        return relax.ShapeExpr(call.ty.values)
    if name not in _BY_CALL and name not in _ELEMENTWISE:
        return call
    args = [bound(mutator, arg) for arg in call.args if not isinstance(arg.ty, relax.ShapeType)]
    if not all(isinstance(arg, GenericConst) for arg in args):
        return call
    with np.errstate(all="ignore"):
        result = _computed(name, call, [arg.value.numpy() for arg in args])
    if result is None or str(result.dtype) != str(call.ty.dtype):
        return call
    return relax.const(np.asarray(result, order="C"), str(result.dtype))  # else float64 becomes float32


@module_pass(opt_level=0, name="FoldConstantsThatAreLeft")  # type: ignore[untyped-decorator]
def _fold_others(mod: IRModule, _context: PassContext) -> IRModule:
    return relax.transform.FoldConstant()(mod) if _has_constant_call(mod["main"]) else mod


FOLD_CONSTANTS = Sequential([fold_constants_in_numpy, _fold_others])
"""Evaluates calls with constant arguments: the simplest in NumPy, the others with FoldConstant."""


def _has_constant_call(function: relax.Function) -> bool:
    """Whether an operator is called with constants alone, or with nothing."""
    constants, found = set(), []

    def is_constant(arg: relax.Expr) -> bool:
        if isinstance(arg, relax.Tuple):
            return all(is_constant(field) for field in arg)
        return not isinstance(arg, relax.Expr) or arg in constants or not isinstance(arg, relax.Var | relax.Call)

    def visit(expr: relax.Expr) -> None:
        if isinstance(expr, relax.SeqExpr):
            for block in expr.blocks:
                for binding in block.bindings:
                    if isinstance(binding, relax.VarBinding) and isinstance(binding.value, GenericConst):
                        constants.add(binding.var)
        elif isinstance(expr, relax.Call) and isinstance(expr.op, Op) and expr.op.name != "relax.call_tir":
            found.append(expr)

    relax.analysis.post_order_visit(function, visit)
    return any(all(is_constant(arg) for arg in call.args) for call in found)
