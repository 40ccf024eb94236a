"""Finds what of a fused function can be computed by another algorithm, and makes the function that does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm import s_tir, tirx
from tvm.ir import GenericConst, IRModule, Range, TensorLoad, Var
from tvm.s_tir import Schedule
from tvm.s_tir.meta_schedule.utils import shash2hex
from tvm.sym import detect_linear_equation
from tvm_ffi import structural_mutate

from ansor_mlflow.errors import UserInputError
from ansor_mlflow.lowering.algorithms.choose import constants_of
from ansor_mlflow.lowering.algorithms.winograd import (
    Convolution,
    Depth,
    Filter,
    error_of,
    faces_of,
    transform_weights,
    winograd,
)
from ansor_mlflow.lowering.network import CONSTANTS, TuningTask, short_name
from ansor_mlflow.settings import Algorithm
from ansor_mlflow.sketches import MAX_EPILOGUE, Contraction, find_contraction

_FLOAT32_BYTES = 4
_MAX_REL_ERROR = 1e-4
"""Largest error of a layer by another algorithm: that which the outputs of a network may have."""
_MIN_FLOPS = 1e7
"""Operations of a layer for which other algorithms get trials; smaller ones take microseconds in any case."""
_CHANNELS = 4
"""What the channels have to be a multiple of, where transforms would not be in vectors and take longest."""
_CHANNELS_OF_GROUP = 16
"""Outputs of a group from which other algorithms are tried: vectors do not go beyond a group."""
_MAX_SHOWN = 3


class NoAlgorithmError(Exception):
    """Says in a few words why a function has no other algorithm."""


@dataclass(frozen=True)
class WinogradLayer:
    """A fused function with another algorithm to compute its convolution, as `LayerAlgorithm` says."""

    filter: Filter
    mod: IRModule
    weights: int
    flops: float
    """Floating point operations of the convolution."""

    @property
    def algorithm(self) -> str:
        """The name that users read."""
        return f"winograd {self.filter}"

    @property
    def suffix(self) -> str:
        rows, columns = self.filter.outputs
        return f"winograd{rows if rows == columns else self.filter}"

    @property
    def growth_bytes(self) -> int:
        points = self.filter.num_points
        num_transformed = prod(int(extent) for extent in self.mod["main"].params[self.weights].shape)
        return _FLOAT32_BYTES * num_transformed * (points - prod(self.filter.taps)) // points

    def max_rel_error(self, calls: Sequence[Sequence[GenericConst | None]]) -> float:
        """The largest error against float64 over the largest output, with the constant arguments of each call."""
        found = [weights.value.numpy() for call in calls if (weights := call[self.weights]) is not None]
        return max(error_of(faces_of(weights, self.filter), self.filter) for weights in found)

    def transform(self, weights: NDArray[np.float32]) -> NDArray[np.float32]:
        return transform_weights(faces_of(weights, self.filter), self.filter)


def with_algorithms(
    mod: IRModule, tasks: Sequence[TuningTask], algorithm: Algorithm, called: str
) -> tuple[TuningTask, ...]:
    """Adds to each task those of the other algorithms to compute it, as far as they are exact enough.

    With algorithm=winograd, the direct algorithm is left out where there is another.
    """
    constants = constants_of(mod)
    found: list[TuningTask] = []
    reasons = []
    for task in tasks:
        others: list[TuningTask] = []
        try:
            if algorithm == "winograd" or task.info.flops >= _MIN_FLOPS:
                calls = constants[task.info.workload_hash]
                errors = [(each, each.max_rel_error(calls)) for each in find_algorithms(task.mod)]
                others = [_task_of(task, each, error) for each, error in errors if error <= _MAX_REL_ERROR]
        except NoAlgorithmError as err:
            reasons.append(f"{task.info.name}: {err}")
        found += others if algorithm == "winograd" and others else [task, *others]
    if algorithm == "winograd" and len(found) == len(tasks) == len(reasons):
        raise UserInputError(
            f"network={called}: algorithm=winograd, but no layer can be computed so: "
            f"{', '.join(reasons[:_MAX_SHOWN])}; give auto or direct"
        )
    return tuple(replace(task, info=replace(task.info, index=index)) for index, task in enumerate(found))


def _task_of(task: TuningTask, algorithm: WinogradLayer, max_rel_error: float) -> TuningTask:
    workload_hash = shash2hex(algorithm.mod)
    info = replace(
        task.info,
        name=short_name(f"{task.info.name}_{algorithm.suffix}", workload_hash),
        flops=algorithm.flops,
        workload_hash=workload_hash,
        algorithm=algorithm.algorithm,
        layer=task.info.workload_hash,
        max_rel_error=max_rel_error,
    )
    return TuningTask(info=info, mod=algorithm.mod, algorithm=algorithm)


def find_algorithms(mod: IRModule) -> list[WinogradLayer]:
    """Other algorithms to compute the function of a task's module; a NoAlgorithmError where there are none."""
    found = find_contraction(mod)
    if found is None:
        raise NoAlgorithmError("it is no convolution")
    layer = _layer(mod, found)
    return [_alternative(mod, found, layer, filter) for filter in layer.filters()]


def _layer(mod: IRModule, found: Contraction) -> Convolution:
    """The convolution of a function, if it is one with stride 1 for whose filter there are points."""
    function = mod["main"]
    num_axes = len(found.reduction) - 1
    num_dims = [len(found.spatial), *(len(operand.shape) for operand in found.operands)]
    if num_axes not in (1, 2, 3) or num_dims != [num_axes + 2, num_axes + 2, num_axes + 2]:
        raise NoAlgorithmError("it is no convolution with channels last")
    data, weights = found.operands
    kernel = (found.reduction[-3], found.reduction[-2]) if num_axes > 1 else (found.reduction[0], 1)
    if not Filter.all_of(kernel):
        raise NoAlgorithmError(f"its kernel is {kernel[0]}x{kernel[1]}, not of 3, 5 or 7 taps")
    iterators = np.eye(len(found.spatial) + len(found.reduction), dtype=int)
    (image, *places, channel), (*taps, summed) = iterators[: num_axes + 2], iterators[num_axes + 2 :]
    is_whole = np.array_equal(weights.strides, [*taps, summed, channel]) and np.array_equal(data.strides[-1], summed)
    groups = found.spatial[-1] // found.group
    if not is_whole or (groups > 1 and (found.group < _CHANNELS_OF_GROUP or num_axes > 2)):
        raise NoAlgorithmError("it is a convolution in groups")
    # The first axis of three may have a stride, that and the only one a dilation.
    stride = int(data.strides[1] @ places[0]) if num_axes == 3 else 1
    dilation = int(data.strides[1] @ taps[0]) if num_axes != 2 else 1
    if not np.array_equal(
        data.strides, [image, stride * places[0] + dilation * taps[0], *np.add(places, taps)[1:], summed]
    ):
        raise NoAlgorithmError("its stride or dilation is not 1")
    if _parameter(function, weights.buffer) not in map(int, function.attrs.get(CONSTANTS, ())):
        raise NoAlgorithmError("its weights are no constants")
    if any(str(parameter.dtype) != "float32" for parameter in function.params):
        raise NoAlgorithmError("it is not in float32")
    if len(found.epilogue) > MAX_EPILOGUE or found.spread:
        raise NoAlgorithmError("too much follows it to be computed as it is written")
    if kernel != (3, 3) and found.reduction[-1] % _CHANNELS:
        raise NoAlgorithmError(f"its channels are no multiple of {_CHANNELS}")
    if not found.producers:
        raise NoAlgorithmError("its input is not padded by a block of its own")
    shape, before = _padding(mod, found.producers[-1])
    depth = None
    if num_axes == 3:
        depth = Depth(shape[1], found.spatial[1], found.reduction[0], stride, dilation, front=before[1])
    face = slice(-2 if num_axes == 1 else -3, -1)
    (height, width), (rows, columns), (top, left) = (
        (*values[face], other)[:2] for values, other in ((shape, 1), (found.spatial, 1), (before, 0))
    )
    return Convolution(
        batch=found.spatial[0],
        height=height,
        width=width,
        channels_in=found.reduction[-1],
        channels_out=found.spatial[-1],
        rows=rows,
        columns=columns,
        top=top,
        left=left,
        taps=kernel,
        groups=groups,
        depth=depth,
        line=dilation if num_axes == 1 else 0,
    )


def _padding(mod: IRModule, name: str) -> tuple[list[int], list[int]]:
    """The shape of what a block pads, and how many zeros are before it along each axis."""
    sch = Schedule(mod)
    block = sch.get(sch.get_sblock(name))
    variables = [var.var for var in block.iter_vars]
    load = _padded_load(block.body.value)
    shifts = [] if load is None else [detect_linear_equation(index, variables) for index in load.indices]
    identity = np.eye(len(variables), dtype=int).tolist()
    if load is None or [[int(coefficient) for coefficient in shift[:-1]] for shift in shifts] != identity:
        raise NoAlgorithmError("its input is not padded with zeros alone")
    return [int(extent) for extent in load.source.shape], [-int(shift[-1]) for shift in shifts]


def _padded_load(value: Any) -> Any:
    """What an element of a padded array is read from: as it is, or where there is no zero; None for other elements."""
    if str(getattr(getattr(value, "op", None), "name", "")).endswith("if_then_else"):
        _, value, otherwise = value.args
        if getattr(otherwise, "value", None) != 0:
            return None
    return value if isinstance(value, TensorLoad) else None


def _alternative(mod: IRModule, found: Contraction, layer: Convolution, filter: Filter) -> WinogradLayer:
    function = mod["main"]
    number = _parameter(function, found.operands[1].buffer)
    sch = Schedule(mod)
    pad, convolution = (sch.get(sch.get_sblock(name)) for name in (found.producers[-1], found.block))
    algorithm = winograd(layer, filter, found.block)
    data, weights, result = algorithm.params
    new_of = {data: pad.reads[0].source, result: convolution.writes[0].source}
    body = structural_mutate(
        algorithm.body, (Var, lambda var, _: next((n for o, n in new_of.items() if o.same_as(var)), var))
    )
    parameters = [weights if place == number else old for place, old in enumerate(function.params)]
    *steps, last = body.block.body.seq
    if not layer.is_exact:
        last = _at_its_place(last, layer, filter)
    root, blocks = function.body.block, list(function.body.block.body.seq)
    place = len(found.producers) - 1
    padded = pad.writes[0].source
    new_root = s_tir.SBlock(
        root.iter_vars,
        root.reads,
        root.writes,
        root.name_hint,
        tirx.SeqStmt([*blocks[:place], *steps, last, *blocks[place + 2 :]]),
        alloc_buffers=[*(b for b in root.alloc_buffers if not b.same_as(padded)), *body.block.alloc_buffers],
        annotations=root.annotations,
    )
    body = s_tir.SBlockRealize(function.body.iter_values, function.body.predicate, new_root)
    new = IRModule({"main": tirx.PrimFunc(parameters, body, function.ret_type, function.attrs)})
    if not layer.is_exact:
        new = _with_inlined_epilogue(new, found, layer, filter)
    return WinogradLayer(filter=filter, mod=new, weights=number, flops=layer.flops(filter))


def _at_its_place(nest: Any, layer: Convolution, filter: Filter) -> Any:
    """Loops over an image of whole tiles with a block that writes each element to its place in the output, if any."""

    def store(statement: Any, _mutator: Any) -> Any:
        return tirx.BufferStore(statement.buffer, statement.value, _place_of(statement.indices, layer, filter))

    def realize(statement: Any, _mutator: Any) -> Any:
        block, values = statement.block, statement.iter_values
        place = _place_of([axis.var for axis in block.iter_vars], layer, filter)
        writes = [tirx.BufferRegion(block.writes[0].source, [Range.from_min_extent(index, 1) for index in place])]
        body = structural_mutate(block.body, (tirx.BufferStore, store))
        block = s_tir.SBlock(block.iter_vars, block.reads, writes, block.name_hint, body)
        return s_tir.SBlockRealize(values, _is_inside(values, layer, filter), block)

    return structural_mutate(nest, (s_tir.SBlockRealize, realize))


def _with_inlined_epilogue(mod: IRModule, found: Contraction, layer: Convolution, filter: Filter) -> IRModule:
    """A function whose last block, with what follows it, asks itself whether its elements are those of an output.

    As a predicate of the block, this would have to be a range of its loops: no others could be reordered.
    """
    sch = Schedule(mod)
    try:
        for name in found.epilogue[:-1]:
            sch.compute_inline(sch.get_sblock(name))
        if found.epilogue:
            sch.reverse_compute_inline(sch.get_sblock(found.epilogue[-1]))
    except (RuntimeError, ValueError) as err:  # TVM's error for what it refuses is one of the first
        raise NoAlgorithmError("what follows it cannot be computed with it") from err

    def realize(statement: Any, mutator: Any) -> Any:
        block = statement.block
        if str(block.name_hint) != found.block:
            return mutator.default_mutate(statement)
        inside = _is_inside([axis.var for axis in block.iter_vars], layer, filter)
        body = tirx.IfThenElse(inside, block.body, None)
        block = s_tir.SBlock(block.iter_vars, block.reads, block.writes, block.name_hint, body)
        return s_tir.SBlockRealize(statement.iter_values, tirx.const(True, "bool"), block)

    function = sch.mod["main"]
    return IRModule({"main": function.with_body(structural_mutate(function.body, (s_tir.SBlockRealize, realize)))})


def _place_of(indices: Sequence[Any], layer: Convolution, filter: Filter) -> list[Any]:
    """Indices in the output of an element of the image."""
    *images, y, x, c = indices
    return [*images, *layer.place(filter, y, x), c]


def _is_inside(indices: Sequence[Any], layer: Convolution, filter: Filter) -> Any:
    extents = (layer.rows,) if layer.line else (layer.rows, layer.columns)
    place = layer.place(filter, *indices[-3:-1])
    return tirx.all(*(index < extent for index, extent in zip(place, extents, strict=True)))


def _parameter(function: Any, buffer: str) -> int:
    """Number of the parameter with that name; -1 where none has it."""
    return next((number for number, each in enumerate(function.params) if str(each.name) == buffer), -1)
