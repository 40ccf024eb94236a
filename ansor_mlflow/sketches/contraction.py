"""Recognises functions whose work is one sum, such as convolutions, matrix multiplications and poolings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.s_tir import Schedule
    from tvm.s_tir.schedule import SBlockRV
    from tvm.tirx import PrimFunc

MAX_EPILOGUE = 8
"""Operators after a sum that are computed while it is written; a GELU is seven. More of them, in every copy of an
unrolled tile, would take the compiler minutes."""
_SPATIAL, _REDUCTION = 0, 2
"""TVM's numbers for the kinds of a block's iterators (`IterVar::IterVarType`)."""


_MOST_PADDED = 1.5
Products = Literal["float32", "bfloat16", "int8"]
"""Types whose products are added up: int8 are those of unsigned and signed 8 bits."""


@dataclass(frozen=True)
class Operand:
    """An array that is read in the sum."""

    buffer: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    """Coefficients of the block's iterators in the index of each dimension of the buffer."""

    def stride(self, axis: int) -> int:
        """Elements in memory from one value of an iterator to the next."""
        return sum(of_dim[axis] * prod(self.shape[dim + 1 :]) for dim, of_dim in enumerate(self.strides))


@dataclass(frozen=True)
class Contraction:
    """A function that sums over some iterators, with what comes before and after."""

    block: str
    spatial: tuple[int, ...]
    """Extents of the iterators of the output; the last one is that of the vectors."""
    reduction: tuple[int, ...]
    """Extents of the summed iterators."""
    operands: tuple[Operand, ...]
    """Arrays that the sum reads, the result left out."""
    producers: tuple[str, ...]
    """Blocks that it is computed of, such as that of the padding."""
    has_padding: bool
    """True if the last producer is a zero-padding block."""
    unpadded: tuple[int, ...]
    """Shape of the tensor before that padding; empty without it."""
    epilogue: tuple[str, ...]
    """Blocks after it, and those that they alone need, in order, as far as they have an element for each sum."""
    spread: tuple[str, ...]
    """Blocks after those, which use a sum for several elements, as of an image that is scaled by channels; the last one
    writes the output, which the last of the epilogue does where there are none."""
    num_bytes: int
    """Size of an element of the sums."""
    result_bytes: int
    """Size of an element of what the function writes."""
    group: int
    """Elements along the vectors that are summed from the same data: all, or those of a group of a convolution."""

    @property
    def is_mostly_padded(self) -> bool:
        """Whether an axis has more padding than half of its elements, as where a kernel is dilated."""
        padded = self.operands[0].shape
        return len(padded) == len(self.unpadded) and any(
            after > _MOST_PADDED * before for before, after in zip(self.unpadded, padded, strict=True)
        )

    @property
    def vector_axis(self) -> int:
        """The iterator along vectors."""
        return len(self.spatial) - 1

    @cached_property
    def broadcast(self) -> Operand | None:
        """The operand of which one element serves for a whole vector; None where all of them are vectors."""
        return next((operand for operand in self.operands if not operand.stride(self.vector_axis)), None)

    @cached_property
    def shared(self) -> Operand | None:
        """The operand that is the same along some iterators of the output, besides that of the vectors: the weights."""
        vectors = [operand for operand in self.operands if operand.stride(self.vector_axis)]
        return vectors[-1] if len(self.operands) > 1 else None

    @cached_property
    def free_axes(self) -> tuple[int, ...]:
        """Iterators of the output that the weights do not depend on: along them a register is used again."""
        shared = self.shared
        return tuple(axis for axis in range(self.vector_axis) if shared is None or not shared.stride(axis))


def is_made_of_blocks(function: PrimFunc) -> bool:
    """Whether a function can be scheduled: one that was written as loops, such as a scatter, is left alone."""
    root = getattr(function.body, "block", None)
    return root is not None and str(root.name_hint) == "root"


def has_sums(mod: IRModule) -> bool:
    """Whether a task's function sums: only then does it pay to pack constants as they are read.

    Of a constant that is read in part, as by `gather_nd` the coordinates of an index, TVM's packing loses the rest.
    """
    from tvm.s_tir import SBlock
    from tvm_ffi import structural_walk

    found: list[int] = []
    structural_walk(mod["main"].body, (SBlock, lambda block: found.extend(_kinds(block))))
    return _REDUCTION in found


def find_contraction(mod: IRModule, name: str = "", packed: str = "") -> Contraction | None:
    """The sum that a task's function is, or that of a block of that name; None where it is something else.

    Elements of the buffer `packed` follow each other along vectors, as it will be packed so.
    """
    from tvm.s_tir import Schedule

    if not is_made_of_blocks(mod["main"]):
        return None
    sch = Schedule(mod)
    blocks = list(sch.get_child_blocks(sch.get_sblock("root")))
    names = [str(sch.get(block).name_hint) for block in blocks]
    summing = [place for place, block in enumerate(blocks) if _REDUCTION in _kinds(sch.get(block))]
    if name:
        summing = [names.index(name)]
    # Two sums, as of a softmax, are for `rows`; blocks are found again by their names.
    if len(summing) != 1 or len(set(names)) != len(names):
        return None
    (place,) = summing
    block = sch.get(blocks[place])
    kinds, extents = _kinds(block), [int(var.dom.extent) for var in block.iter_vars]
    num_spatial = kinds.count(_SPATIAL)
    # The schedules take the loops of the output first, those that are summed next.
    if kinds != [_SPATIAL] * num_spatial + [_REDUCTION] * (len(kinds) - num_spatial) or num_spatial < 2:
        return None
    group = _group(block, num_spatial - 1)
    operands = _operands(block, num_spatial - 1)
    if operands is None:
        return None
    # Along the vectors, elements of each operand follow each other, or are the same one; the last block alone writes
    # what no other block reads.
    strides = [1 if operand.buffer == packed else operand.stride(num_spatial - 1) for operand in operands]
    are_vectors = 1 in strides and set(strides) <= {0, 1} and strides.count(0) <= 1
    is_read = [bool(sch.get_consumers(block)) for block in blocks[place:]]
    after = [_num_elements(sch.get(block)) == prod(extents[:num_spatial]) for block in blocks[place + 1 :]]
    num_alike = after.index(False) if False in after else len(after)
    epilogue, spread = names[place + 1 :][:num_alike], names[place + 1 :][num_alike:]
    # The spread is a loop of its own, to which all of the sums come through one array.
    is_chain = not spread or _is_chain(sch, [names[place], *epilogue])
    if not are_vectors or not is_chain or is_read != [True] * (len(is_read) - 1) + [False]:
        return None
    # A block before the sum that does not feed it, such as the other term of an addition, belongs to the epilogue.
    feeding = _names_feeding(sch, blocks[place])
    before, beside = (
        [name for name in names[:place] if (name in feeding) is is_feeding] for is_feeding in (True, False)
    )
    pad = sch.get(blocks[names.index(before[-1])]) if before else None
    # Any other last producer, such as a conversion, is computed in the loops.
    has_padding = pad is not None and "if_then_else" in str(pad.body)
    return Contraction(
        block=names[place],
        spatial=tuple(extents[:num_spatial]),
        reduction=tuple(extents[num_spatial:]),
        operands=operands,
        producers=tuple(before),
        has_padding=has_padding,
        unpadded=_shape(pad.reads[0]) if pad is not None and has_padding else (),
        epilogue=(*beside, *epilogue) if epilogue else (),
        spread=(*beside, *spread) if spread and not epilogue else tuple(spread),
        num_bytes=_num_bytes(block.body.value.ty),
        result_bytes=_num_bytes(sch.get(blocks[-1]).writes[0].source.dtype),
        group=group,
    )


def is_layout_free(mod: IRModule, buffer: str) -> bool:
    """Whether an argument of a task's function is a constant, which may be packed in another order."""
    function = mod["main"]
    places = map(int, function.attrs.get("layout_free_buffers", ()) if function.attrs is not None else ())
    return any(str(function.params[place].name) == buffer for place in places)


def products_of(mod: IRModule) -> Products:
    """What a task's function adds products of, as far as CPUs have instructions for them."""
    found = find_contraction(mod)
    dtypes = {operand.dtype for operand in found.operands} if found else set()
    return "int8" if dtypes == {"uint8", "int8"} else "bfloat16" if dtypes == {"bfloat16"} else "float32"


def _names_feeding(sch: Schedule, block: SBlockRV) -> set[str]:
    """The blocks that a block is computed of."""
    producers = list(sch.get_producers(block))
    return {str(sch.get(each).name_hint) for each in producers}.union(*(_names_feeding(sch, p) for p in producers))


def _num_elements(block: Any) -> int:
    """Elements that a block writes."""
    pairs = zip(_kinds(block), block.iter_vars, strict=True)
    return prod(int(var.dom.extent) for kind, var in pairs if kind == _SPATIAL)


def _is_chain(sch: Schedule, names: Sequence[str]) -> bool:
    """Whether nothing but the last of some blocks is read by a block that is none of them."""
    consumers = [{str(sch.get(each).name_hint) for each in sch.get_consumers(sch.get_sblock(name))} for name in names]
    return all(readers <= set(names) for readers in consumers[:-1])


def _num_bytes(dtype: Any) -> int:
    import tvm

    return (int(tvm.DataType(str(dtype)).bits) + 7) // 8


def _shape(region: Any) -> tuple[int, ...]:
    return tuple(int(dim) for dim in region.source.shape)


def _kinds(block: Any) -> list[int]:
    return [int(var.iter_type) for var in block.iter_vars]


def _group(block: Any, axis: int) -> int:
    """The number by which an iterator is divided to give the group that it belongs to; its extent without groups."""
    from tvm import tirx
    from tvm_ffi import structural_walk

    variable, extent = block.iter_vars[axis].var, int(block.iter_vars[axis].dom.extent)
    sizes: set[int] = set()
    for index in (index for load in _reads(block) for index in load.indices):
        structural_walk(
            index, (tirx.FloorDiv, lambda node: sizes.add(int(node.b)) if _is_group(node, variable) else None)
        )
    return sizes.pop() if len(sizes) == 1 else extent


def _is_group(index: Any, variable: Any) -> bool:
    from tvm import tirx

    return index.a.same_as(variable) and isinstance(index.b, tirx.IntImm)


def _in_first_group(index: Any, variable: Any) -> Any:
    """An index with 0 for the group of a variable."""
    from tvm import tirx
    from tvm_ffi import structural_mutate

    def first(node: Any, mutator: Any) -> Any:
        is_group = _is_group(node, variable)
        return tirx.IntImm(str(node.b.ty), 0) if is_group else mutator.default_mutate(node)

    return structural_mutate(index, (tirx.FloorDiv, first))


def _reads(block: Any) -> list[Any]:
    """The loads of a sum, its result among them."""
    from tvm import tirx

    return list(_loads(block.body.value)) if isinstance(block.body, tirx.BufferStore) else []


def _operands(block: Any, axis: int) -> tuple[Operand, ...] | None:
    """The arrays that a sum reads besides its result; None where an index is no linear function of the iterators.

    Where it depends on the group of the iterator of the vectors, it is seen inside of a group.
    """
    from tvm.sym import detect_linear_equation

    variables = [var.var for var in block.iter_vars]

    def strides(index: Any) -> tuple[int, ...]:
        terms = detect_linear_equation(_in_first_group(index, variables[axis]), variables)
        return tuple(int(coefficient) for coefficient in list(terms)[:-1])

    operands = tuple(
        Operand(
            buffer=str(load.source.name),
            dtype=str(load.source.dtype),
            shape=_shape(load),
            strides=tuple(map(strides, load.indices)),
        )
        for load in _reads(block)
        if not load.source.same_as(block.body.buffer)
    )
    is_linear = all(() not in operand.strides for operand in operands)
    return operands if is_linear and 1 <= len(operands) <= 2 else None


def _loads(expr: Any) -> Iterator[Any]:
    """Yields what an expression of sums, products, maxima and conversions reads, from left to right."""
    from tvm.ir import TensorLoad

    if isinstance(expr, TensorLoad):
        yield expr
        return
    for inner in (getattr(expr, name, None) for name in ("a", "b", "value")):
        if hasattr(inner, "ty"):
            yield from _loads(inner)
