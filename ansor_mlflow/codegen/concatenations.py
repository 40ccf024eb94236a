"""Concatenations without copies: what computes a part writes it to its place in the whole.

A function that only concatenates reads and writes everything once more, which takes longer than many a convolution.
Where each part is computed by a function that nothing else needs the result of, these functions take the memory of the
whole instead, one after the other, and the concatenation is gone.

Functions are changed after their schedules were applied, so that tasks and records of them are the same with and
without a concatenation behind them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tvm import relax, tirx
from tvm.ir import GlobalVar, IRModule, Range, TensorLoad, TensorRegion
from tvm_ffi import structural_mutate

from ansor_mlflow.names import PART_WRITER

_PATTERN, _OPAQUE = "op_pattern", 8
"""TVM's attribute of a function that says with what it may be fused, and its value for nothing."""


@dataclass(frozen=True)
class _PlaceInWhole:
    shape: tuple[int, ...]
    """Shape of the whole."""
    axis: int
    offset: int


@dataclass(frozen=True)
class _Part:
    whole: relax.Var
    place: _PlaceInWhole
    into: relax.Var
    """The whole after this part was written; that after the last part is `whole`."""
    before: relax.Var | None
    """The whole before this part was written; None for the first part."""


def count_written_in_place(mod: IRModule) -> Mapping[str, int]:
    """How many calls of a function of a network are concatenations that need no copies, by the function's name."""
    found: Counter[str] = Counter()
    for _, function in _relax_functions(mod):
        found.update(call.args[0].name_hint for call, _ in _concatenations(mod, function))
    return found


def write_in_place(mod: IRModule) -> IRModule:
    """A network, with schedules applied, without the concatenations that need no copies."""
    builder = relax.BlockBuilder(mod)
    writers: dict[tuple[str, _PlaceInWhole], GlobalVar] = {}

    def writer(name: str, place: _PlaceInWhole) -> GlobalVar:
        if (name, place) not in writers:
            function = _writing_into(mod[name], place)
            writers[name, place] = builder.add_func(function, f"{name}{PART_WRITER}{len(writers)}")
        return writers[name, place]

    for var, function in _relax_functions(mod):
        found = list(_concatenations(mod, function))
        if found:
            parts = {part: each for _, of_whole in found for part, each in of_whole.items()}
            wholes = {each.whole for each in parts.values()}
            builder.update_func(var, _rewritten(function, parts, wholes, writer))
    entries = [var.name_hint for var, _ in _relax_functions(mod)]
    return relax.transform.DeadCodeElimination(entries)(builder.get())


def _relax_functions(mod: IRModule) -> Iterator[tuple[GlobalVar, relax.Function]]:
    for var, function in mod.functions_items():
        if isinstance(function, relax.Function):
            yield var, function


def _concatenations(mod: IRModule, function: relax.Function) -> Iterator[tuple[relax.Call, dict[relax.Var, _Part]]]:
    """Concatenations whose parts nothing else needs, and where each part belongs, in the order of their computation."""
    # The number of bindings that need a variable, or the result that is one.
    uses: Counter[relax.Var] = Counter(relax.analysis.free_vars(function.body.body))
    for block in function.body.blocks:
        for binding in block.bindings:
            uses.update(relax.analysis.free_vars(binding.value))
    wholes: set[relax.Var] = set()
    for block in _dataflow_blocks(function):
        calls = {
            binding.var: binding.value
            for binding in block.bindings
            if isinstance(binding.value, relax.Call) and getattr(binding.value.op, "name", "") == "relax.call_tir"
        }
        for whole, call in calls.items():
            parts = list(call.args[1])
            if (
                call.args[0].name_hint.rstrip("0123456789") == "concatenate"  # it does nothing else
                and len(set(parts)) == len(parts)
                and all(part in calls and uses[part] == 1 and part not in wholes for part in parts)
                and not any(relax.analysis.has_reshape_pattern(mod[calls[part].args[0].name_hint]) for part in parts)
            ):
                wholes.add(whole)
                yield call, _parts(whole, call, [part for part in calls if part in parts])


def _dataflow_blocks(function: relax.Function) -> list[relax.DataflowBlock]:
    return [block for block in function.body.blocks if isinstance(block, relax.DataflowBlock)]


def _parts(whole: relax.Var, call: relax.Call, computed: list[relax.Var]) -> dict[relax.Var, _Part]:
    """Where each part belongs, in the order in which they are computed."""
    shape, shapes = _shape(whole), [_shape(part) for part in call.args[1]]
    axis = next((axis for axis, extent in enumerate(shape) if shapes[0][axis] != extent), 0)
    offsets = dict(zip(call.args[1], itertools.accumulate((each[axis] for each in shapes), initial=0), strict=False))
    later = [relax.DataflowVar(f"{part.name}_whole", whole.ty) for part in computed[:-1]]
    return {
        part: _Part(whole, _PlaceInWhole(shape, axis, offsets[part]), into, before)
        for part, into, before in zip(computed, [*later, whole], [None, *later], strict=True)
    }


def _shape(var: relax.Var) -> tuple[int, ...]:
    return tuple(int(extent) for extent in var.ty.shape)


def _rewritten(
    function: relax.Function,
    parts: Mapping[relax.Var, _Part],
    wholes: set[relax.Var],
    writer: Callable[[str, _PlaceInWhole], GlobalVar],
) -> relax.Function:
    """The function with parts that are written to their places, and without the concatenations."""

    def bindings(block: relax.BindingBlock) -> Iterator[relax.Binding]:
        for binding in block.bindings:
            part = parts.get(binding.var)
            if part is not None:
                name, arguments = binding.value.args[0].name_hint, list(binding.value.args[1])
                into, ty = writer(name, part.place), part.whole.ty
                if part.before is None:
                    call = relax.call_tir(into, arguments, ty)
                else:
                    call = relax.call_tir_inplace(into, [*arguments, part.before], len(arguments), ty)
                yield relax.VarBinding(part.into, call)
            elif binding.var not in wholes:
                yield binding

    found = _dataflow_blocks(function)
    blocks = [relax.DataflowBlock(list(bindings(each))) if each in found else each for each in function.body.blocks]
    body = relax.SeqExpr(blocks, function.body.body)
    return relax.Function(function.params, body, function.ret_ty, function.is_pure, function.attrs)


def _writing_into(function: tirx.PrimFunc, place: _PlaceInWhole) -> tirx.PrimFunc:
    """A function that writes its result to a part of its last argument."""
    result = function.params[-1]
    extents = [tirx.IntImm("int64", extent) for extent in place.shape]
    whole = tirx.decl_buffer(extents, str(result.dtype), result.name)

    def moved(index: Any, axis: int) -> Any:
        return index + tirx.IntImm("int64", place.offset) if axis == place.axis else index

    def indices(node: Any) -> list[Any]:
        return [moved(index, axis) for axis, index in enumerate(node.indices)]

    def load(node: Any, mutator: Any) -> Any:
        node = mutator.default_mutate(node)
        return tirx.BufferLoad(whole, indices(node)) if node.source.same_as(whole) else node

    def store(node: Any, mutator: Any) -> Any:
        node = mutator.default_mutate(node)
        return tirx.BufferStore(whole, node.value, indices(node)) if node.buffer.same_as(whole) else node

    def region(node: Any, mutator: Any) -> Any:
        node = mutator.default_mutate(node)
        if not node.source.same_as(whole):
            return node
        ranges = [Range.from_min_extent(moved(each.min, axis), each.extent) for axis, each in enumerate(node.region)]
        return tirx.BufferRegion(whole, ranges)

    body = structural_mutate(
        function.body,
        [
            (TensorLoad, load),
            (tirx.BufferStore, store),
            (TensorRegion, region),
            (tirx.Var, lambda var, _: whole if var.same_as(result) else var),
        ],
    )
    changed = tirx.PrimFunc([*function.params[:-1], whole], body, function.ret_type, function.attrs)
    return changed.with_attr(_PATTERN, _OPAQUE).without_attr("global_symbol")
