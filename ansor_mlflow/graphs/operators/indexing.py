"""Operators that sum along, choose among or move elements, where TVM's own is wrong, slow or not there."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper

from ansor_mlflow.graphs.editor import GraphEditor, Rewritings, Unchanged
from ansor_mlflow.graphs.operators.convolution import pads_of
from ansor_mlflow.graphs.types import FLOATS
from ansor_mlflow.graphs.walk import attributes_of

_MIN_TERMS = 1024
"""Terms of a sum over several axes from which each axis is summed by itself: 34,000 of them take a fifth of the time
then, and the error is a tenth; 49 of them gain nothing."""
_MAX_LENGTH = 1024
"""Longer axes stay: the product with a triangular matrix takes the square of the length."""


def _cum_sum(node: onnx.NodeProto, graph: GraphEditor) -> None:
    """The product with a triangular matrix of ones, in the dtype itself, so that integers wrap as they should."""
    data, axis, shape = node.input[0], graph.value(node.input[1]), graph.shape(node.input[0])
    if not shape or shape[(place := int(axis.item()))] > _MAX_LENGTH:
        raise Unchanged
    length, dtype, attributes = shape[place], graph.dtype(data), attributes_of(node)
    ones = np.triu(np.ones((length, length)), 1 if attributes.get("exclusive") else 0)
    if attributes.get("reverse"):
        ones = ones.T
    triangle = graph.constant(ones, dtype)
    order = [index for index in range(len(shape)) if index != place % len(shape)] + [place % len(shape)]
    last = graph.emit("Transpose", data, perm=order)
    summed = graph.emit("MatMul", graph.reshape(last, (-1, length)), triangle)
    restored = graph.reshape(summed, [shape[index] for index in order])
    graph.emit("Transpose", restored, perm=[order.index(index) for index in range(len(shape))], output=node.output[0])


def _mean(node: onnx.NodeProto, graph: GraphEditor) -> None:
    """The sum over the number of elements; TVM's mean of integers is of int64."""
    data = node.input[0]
    shape, dtype, axes = graph.shape(data), graph.dtype(data), graph.reduced_axes(node)
    if dtype in FLOATS:
        _sum_in_stages(node, graph)
        return
    total = graph.reduce("ReduceSum", data, axes)
    count = graph.constant(math.prod(shape[axis] for axis in axes), dtype)
    _keep(graph.emit("Div", total, count), node, graph)


def _sum_in_stages(node: onnx.NodeProto, graph: GraphEditor) -> None:
    """Axis after axis: a sum of all pixels of a channel, one after the other, loses digits, and has one thread."""
    shape, is_pooling = graph.shape(node.input[0]), node.op_type == "GlobalAveragePool"
    axes = list(range(2, len(shape))) if is_pooling else sorted(graph.reduced_axes(node))
    num_terms = math.prod(shape[axis] for axis in axes)
    if graph.dtype(node.input[0]) != TensorProto.FLOAT or len(axes) < 2 or num_terms < _MIN_TERMS:
        raise Unchanged
    data = node.input[0]
    for axis in reversed(axes):
        data = graph.reduce("ReduceMean" if is_pooling else node.op_type, data, [axis])
    _keep(data, node, graph, axes)


def _keep(data: str, node: onnx.NodeProto, graph: GraphEditor, axes: Sequence[int] | None = None) -> None:
    """Makes the output of a reduction of a tensor with axes of the size 1 in place of those that were reduced."""
    axes, keeps = graph.reduced_axes(node) if axes is None else axes, attributes_of(node).get("keepdims", 1)
    shape = enumerate(graph.shape(node.input[0]))
    kept = [1 if place in axes else size for place, size in shape if keeps or place not in axes]
    graph.reshape(data, kept, output=node.output[0])


def _one_hot(node: onnx.NodeProto, graph: GraphEditor) -> None:
    """Comparison with 0, 1, …; an index outside of the depth matches none."""
    indices, depth, values = node.input[0], graph.value(node.input[1]), graph.value(node.input[2])
    shape, dtype = graph.shape(indices), graph.dtype(indices)
    if dtype not in (TensorProto.INT32, TensorProto.INT64):
        raise Unchanged
    size, rank = int(depth.item()), len(shape) + 1
    axis = attributes_of(node).get("axis", -1) % rank
    np_dtype = helper.tensor_dtype_to_np_dtype(dtype)
    broadcast = [size if index == axis else 1 for index in range(rank)]
    levels = graph.constant(np.arange(size).reshape(broadcast), np_dtype)
    is_negative = graph.emit("Less", indices, graph.constant(0, np_dtype))
    shifted = graph.emit("Add", indices, graph.constant(size, np_dtype))
    wrapped = graph.emit("Where", is_negative, shifted, indices)
    spread = graph.reshape(wrapped, (*shape[:axis], 1, *shape[axis:]))
    off, on = (graph.constant(value) for value in values)
    graph.emit("Where", graph.emit("Equal", spread, levels), on, off, output=node.output[0])


def _scatter_elements(node: onnx.NodeProto, graph: GraphEditor) -> None:
    """Whole rows, where an index is the same for all elements of one, as sums over the neighbours in a graph are."""
    data, indices, updates = node.input
    expand, attributes = graph.producer(indices), attributes_of(node)
    if expand is None or expand.op_type != "Expand" or attributes.pop("axis", 0):
        raise Unchanged
    if (graph.dtype(data), graph.dtype(indices)) != (TensorProto.FLOAT, TensorProto.INT64):
        raise Unchanged  # ScatterND has no other indices, and TVM's takes longer
    first, shape = graph.dims(expand.input[0]), graph.dims(updates)
    is_of_rows = len(first) == len(shape) and all(size == 1 for size in first[1:])
    if not is_of_rows or None in shape[1:] or shape[1:] != graph.dims(data)[1:]:
        raise Unchanged
    rows = graph.reshape(expand.input[0], (-1,))
    if first[0] is None or first[0] != shape[0]:  # as many as there were values, or one for all
        start = graph.constant([0], np.int64)
        rows = graph.emit("Expand", rows, graph.emit("Gather", graph.emit("Shape", updates), start))
    rows = graph.reshape(rows, (-1, 1))
    graph.emit("ScatterND", data, rows, updates, output=node.output[0], **attributes)


def _max_pool(node: onnx.NodeProto, graph: GraphEditor) -> None:
    """TVM loses a window at the end with SAME_LOWER, unless the stride divides the size; pads say it without doubt."""
    attributes, shape = attributes_of(node), graph.shape(node.input[0])
    if attributes.get("auto_pad") != "SAME_LOWER":
        raise Unchanged
    strides, dilations = (attributes.get(name, [1] * (len(shape) - 2)) for name in ("strides", "dilations"))
    pads = pads_of(shape[2:], attributes["kernel_shape"], strides, dilations, attributes)
    kept = {name: value for name, value in attributes.items() if name != "auto_pad"}
    kept["pads"] = [pad[side] for side in (0, 1) for pad in pads]
    graph.emit_all("MaxPool", node.input, list(node.output), **kept)


def _roi_align(node: onnx.NodeProto, graph: GraphEditor) -> None:
    """TVM takes half a pixel off before it scales regions, and reads whatever image the index of one points to."""
    data, regions, images = node.input
    attributes, shape, dtype = attributes_of(node), graph.shape(data), graph.dtype(regions)
    if may_have_empty_regions(node, graph):
        raise Unchanged
    scale = attributes.get("spatial_scale", 1.0) if _is_shifted(node, graph) else 1.0
    numbers = graph.value(images) if graph.is_constant(images) else np.array(-1)
    are_within = bool(((numbers >= 0) & (numbers < shape[0])).all())
    if scale == 1 and are_within:
        raise Unchanged
    if not are_within:
        lowest, highest = (graph.constant(number, np.int64) for number in (0, shape[0] - 1))
        images = graph.emit("Min", graph.emit("Max", images, lowest), highest)
    if scale != 1:
        regions = graph.emit("Mul", regions, graph.constant(scale, dtype))
        attributes["spatial_scale"] = 1.0
    graph.emit("RoiAlign", data, regions, images, output=node.output[0], **attributes)


def may_have_empty_regions(node: onnx.NodeProto, graph: GraphEditor) -> bool:
    """Whether regions of a RoiAlign say how many samples they take, and may be smaller than a pixel."""
    return _is_shifted(node, graph) and not attributes_of(node).get("sampling_ratio")


def _is_shifted(node: onnx.NodeProto, graph: GraphEditor) -> bool:
    counting = "half_pixel" if graph.opset >= 16 else "output_half_pixel"  # unless they say otherwise
    return bool(attributes_of(node).get("coordinate_transformation_mode", counting) == "half_pixel")


def _reverse_sequence(node: onnx.NodeProto, graph: GraphEditor) -> None:
    """Steps in another order, where the sequences of a batch are equally long."""
    axis, lengths = attributes_of(node).get("time_axis", 0), graph.value(node.input[1])
    if not lengths.size or (lengths != lengths[0]).any():
        raise Unchanged
    num_steps, length = graph.shape(node.input[0])[axis], int(lengths[0])
    order = graph.constant([*range(length)[::-1], *range(length, num_steps)], np.int64)
    graph.emit("Gather", node.input[0], order, axis=axis, output=node.output[0])


def _tile(node: onnx.NodeProto, graph: GraphEditor) -> None:
    """TVM's function takes remainders by three axes at once; with AVX-512, some of its elements are wrong."""
    data, repeats, shape = node.input[0], graph.value(node.input[1]), graph.shape(node.input[0])
    pairs = list(zip(repeats.tolist(), shape, strict=True))
    spread = graph.reshape(data, [size for _, old in pairs for size in (1, old)])
    repeated = graph.emit("Expand", spread, graph.constant([size for pair in pairs for size in pair], np.int64))
    graph.reshape(repeated, [times * old for times, old in pairs], output=node.output[0])


def _concat(node: onnx.NodeProto, graph: GraphEditor) -> None:
    """Exporters write a roll by zero as parts one of which is empty; TVM's slices are never."""
    full = [name for name in node.input if 0 not in (graph.find_shape(name) or ())]
    if not full or len(full) == len(node.input):
        raise Unchanged
    if len(full) == 1:
        graph.emit("Identity", full[0], output=node.output[0])
    else:
        graph.emit("Concat", *full, output=node.output[0], **attributes_of(node))


def _split(node: onnx.NodeProto, graph: GraphEditor) -> None:
    """One part is the tensor itself; TVM makes a tuple of it, at which ConvertLayout stops."""
    if len(node.output) != 1:
        raise Unchanged
    graph.emit("Identity", node.input[0], output=node.output[0])


REWRITINGS: Rewritings = {
    ("", "Concat"): _concat,
    ("", "CumSum"): _cum_sum,
    ("", "GlobalAveragePool"): _sum_in_stages,
    ("", "MaxPool"): _max_pool,
    ("", "OneHot"): _one_hot,
    ("", "ReduceMean"): _mean,
    ("", "ReduceSum"): _sum_in_stages,
    ("", "ReverseSequence"): _reverse_sequence,
    ("", "RoiAlign"): _roi_align,
    ("", "ScatterElements"): _scatter_elements,
    ("", "Split"): _split,
    ("", "Tile"): _tile,
}
