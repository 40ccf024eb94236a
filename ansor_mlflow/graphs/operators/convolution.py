"""Convolutions without the taps that meet nothing but padding.

A kernel of 3×3 with dilation 24 over 14×14 pixels, as segmentation networks have it, reads a pixel with its middle tap
alone: wherever it is, the eight others are in the padding, and what they add is zero. So do eight of nine taps over a
single pixel, at the end of a network for small images.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from ansor_mlflow.graphs.editor import GraphEditor, Rewritings, Unchanged
from ansor_mlflow.graphs.walk import attributes_of, input_of


def _conv(node: onnx.NodeProto, graph: GraphEditor) -> None:
    sizes, kernel = (shape[2:] for shape in map(graph.shape, node.input[:2]))
    attributes, rank = attributes_of(node), len(sizes)
    strides = attributes.get("strides", [1] * rank)
    dilations = attributes.get("dilations", [1] * rank)
    pads = pads_of(sizes, kernel, strides, dilations, attributes)
    trimmed = [_trimmed(*axis) for axis in zip(sizes, kernel, strides, dilations, pads, strict=True)]
    if all(len(taps) == size for (taps, _), size in zip(trimmed, kernel, strict=True)):
        raise Unchanged
    weight = graph.value(node.input[1])
    whole = slice(None)
    kept = weight[(whole, whole, *(slice(taps.start, taps.stop) for taps, _ in trimmed))]
    graph.emit(
        "Conv",
        node.input[0],
        graph.constant(np.ascontiguousarray(kept)),
        *filter(None, [input_of(node, 2)]),
        output=node.output[0],
        group=attributes.get("group", 1),
        strides=strides,
        dilations=[d if len(taps) > 1 else 1 for d, (taps, _) in zip(dilations, trimmed, strict=True)],
        pads=[pad[side] for side in (0, 1) for _, pad in trimmed],
    )


def pads_of(
    sizes: Sequence[int], kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int], attributes: Any
) -> list[tuple[int, int]]:
    """Zeros before and after the input along each axis, as ONNX's specification of Conv and MaxPool has them."""
    rank, auto_pad = len(sizes), attributes.get("auto_pad", "NOTSET")
    if not auto_pad.startswith("SAME"):
        pads = attributes.get("pads", [0] * 2 * rank) if auto_pad == "NOTSET" else [0] * 2 * rank
        return list(zip(pads[:rank], pads[rank:], strict=True))
    found = []
    for size, taps, stride, dilation in zip(sizes, kernel, strides, dilations, strict=True):
        total = max(0, (-(-size // stride) - 1) * stride + dilation * (taps - 1) + 1 - size)
        begin = total // 2 if auto_pad == "SAME_UPPER" else total - total // 2
        found.append((begin, total - begin))
    return found


def _trimmed(size: int, taps: int, stride: int, dilation: int, pads: tuple[int, int]) -> tuple[range, tuple[int, int]]:
    """The taps of a kernel along one axis from the first to the last that meets the input, and the padding they need.

    They are all taps where what is left would take other padding than some zeros at both ends.
    """
    begin, end = pads
    outputs = _outputs(size + begin + end, taps, stride, dilation)
    meeting = [
        tap
        for tap in range(taps)
        if any(0 <= output * stride - begin + tap * dilation < size for output in range(outputs))
    ]
    if meeting:
        first = min(meeting[0], begin // dilation)
        kept = range(first, meeting[-1] + 1)
        before = begin - first * dilation
        after = max(0, (outputs - 1) * stride + dilation * (len(kept) - 1) + 1 - size - before)
        if _outputs(size + before + after, len(kept), stride, dilation) == outputs:
            return kept, (before, after)
    return range(taps), pads


def _outputs(size: int, taps: int, stride: int, dilation: int) -> int:
    """How many outputs a convolution has along an axis whose padding `size` includes."""
    return (size - dilation * (taps - 1) - 1) // stride + 1


@dataclass(frozen=True)
class _Axis:
    """A transposed convolution along one axis."""

    size: int
    """Elements of the input; `output` are those of the output."""
    kernel: int
    """Taps, those between dilated ones included."""
    stride: int
    first: int
    """Position of the output's first element in what the kernel reaches without any padding."""
    output: int

    @property
    def taps(self) -> int:
        """Taps of the kernel of a phase."""
        return -(-self.kernel // self.stride)

    @property
    def pads(self) -> tuple[int, int]:
        """Zeros before and after the input of the convolution; fewer than none are elements to leave out."""
        last = (self.first + self.output - 1) // self.stride
        return self.taps - 1 - self.first // self.stride, last - (self.size - 1)

    @property
    def crop(self) -> tuple[int, int]:
        """Where the output begins and ends among the interleaved phases."""
        begin = self.first % self.stride
        return begin, begin + self.output

    @property
    def positions(self) -> int:
        """Elements of the output of the convolution."""
        return self.size + sum(self.pads) - self.taps + 1


def _conv_transpose(node: onnx.NodeProto, graph: GraphEditor) -> None:
    data, bias = node.input[0], input_of(node, 2)
    shape, weight = graph.shape(data), graph.value(node.input[1])
    attributes = attributes_of(node)
    groups = attributes.get("group", 1)
    dilations = attributes.get("dilations", [1] * (weight.ndim - 2))
    extents = [(size - 1) * dilation + 1 for size, dilation in zip(weight.shape[2:], dilations, strict=True)]
    dilated = np.zeros((*weight.shape[:2], *extents), weight.dtype)  # the zeros between its taps are written down
    dilated[(slice(None), slice(None), *(slice(None, None, dilation) for dilation in dilations))] = weight
    axes = _axes(shape[2:], dilated.shape[2:], attributes)
    strides = [axis.stride for axis in axes]
    channels = groups * weight.shape[1]
    phases_first = groups == 1  # channels next to each other stay so when they are the last axis
    kernel = _phase_kernels(dilated, groups, axes, phases_first=phases_first)
    if cut := [(place, axis) for place, axis in enumerate(axes, start=2) if min(axis.pads) < 0]:
        # what only elements in the padding would need is left out
        starts = [max(0, -axis.pads[0]) for _, axis in cut]
        ends = [axis.size - max(0, -axis.pads[1]) for _, axis in cut]
        data = graph.slice(data, starts, ends, [place for place, _ in cut])
    inputs = [data, graph.constant(kernel)]
    if bias:
        repeat = np.tile if phases_first else np.repeat
        inputs.append(graph.constant(repeat(graph.value(bias), int(np.prod(strides)))))
    pads = [max(0, axis.pads[side]) for side in (0, 1) for axis in axes]
    if all(stride == 1 for stride in strides):
        graph.emit("Conv", *inputs, group=groups, pads=pads, output=node.output[0])
        return
    phases = graph.emit("Conv", *inputs, group=groups, pads=pads)
    interleaved = _interleaved(phases, shape[0], channels, axes, graph, phases_first=phases_first)
    if any(axis.crop != (0, axis.positions * axis.stride) for axis in axes):
        begins, ends = map(list, zip(*(axis.crop for axis in axes), strict=True))
        graph.slice(interleaved, begins, ends, list(range(2, 2 + len(axes))), output=node.output[0])
    else:
        graph.emit("Identity", interleaved, output=node.output[0])


def _axes(sizes: Sequence[int], kernel: Sequence[int], attributes: dict[str, Any]) -> list[_Axis]:
    """What the attributes mean, as ONNX's specification of ConvTranspose has it."""
    rank = len(sizes)
    strides = attributes.get("strides", [1] * rank)
    extra = attributes.get("output_padding", [0] * rank)
    pads = attributes.get("pads", [0] * 2 * rank)
    given, auto_pad = attributes.get("output_shape"), attributes.get("auto_pad", "NOTSET")
    axes = []
    for axis in range(rank):
        full = strides[axis] * (sizes[axis] - 1) + extra[axis] + kernel[axis]
        begin, total = pads[axis], pads[axis] + pads[axis + rank]
        if given is not None or auto_pad.startswith("SAME"):
            wanted = given[-rank:][axis] if given is not None else sizes[axis] * strides[axis]
            total = max(0, full - wanted)
            begin = total // 2 if auto_pad == "SAME_UPPER" else total - total // 2
        elif auto_pad == "VALID":
            begin = total = 0
        output = full - total if given is None else given[-rank:][axis]
        axes.append(_Axis(sizes[axis], kernel[axis], strides[axis], begin, output))
    return axes


def _phase_kernels(
    weight: np.ndarray[Any, Any], groups: int, axes: Sequence[_Axis], *, phases_first: bool
) -> np.ndarray[Any, Any]:
    """Weights [phases · C_out, C_in / groups, …] of the convolution that computes all phases.

    Those of the transposed convolution are [C_in, C_out / groups, …]. The output channels are (phases, C_out), or
    (C_out, phases) where the phases are not first.
    """
    in_channels, out_channels = weight.shape[:2]
    taps, strides = [axis.taps for axis in axes], [axis.stride for axis in axes]
    padded = np.zeros((in_channels, out_channels, *(t * s for t, s in zip(taps, strides, strict=True))), weight.dtype)
    padded[tuple(slice(size) for size in weight.shape)] = weight
    in_group = in_channels // groups
    split = padded.reshape(groups, in_group, out_channels, *itertools.chain(*zip(taps, strides, strict=True)))
    tap_axes = [3 + 2 * axis for axis in range(len(axes))]
    phase_axes = [4 + 2 * axis for axis in range(len(axes))]
    split = np.flip(split, tuple(tap_axes))
    order = [*phase_axes, 0, 2] if phases_first else [0, 2, *phase_axes]
    return np.ascontiguousarray(split.transpose(*order, 1, *tap_axes)).reshape(-1, in_group, *taps)


def _interleaved(
    phases: str, batch: int, channels: int, axes: Sequence[_Axis], graph: GraphEditor, *, phases_first: bool
) -> str:
    """Moves the phases from the channels to their positions."""
    rank = len(axes)
    strides, positions = [axis.stride for axis in axes], [axis.positions for axis in axes]
    before = [batch, *strides, channels] if phases_first else [batch, channels, *strides]
    split = graph.reshape(phases, [*before, *positions])
    channel_axis, first_stride = (1 + rank, 1) if phases_first else (1, 2)
    pairs = [(2 + rank + axis, first_stride + axis) for axis in range(rank)]
    moved = graph.emit("Transpose", split, perm=[0, channel_axis, *itertools.chain(*pairs)])
    return graph.reshape(moved, [batch, channels, *(axis.positions * axis.stride for axis in axes)])


REWRITINGS: Rewritings = {("", "Conv"): _conv, ("", "ConvTranspose"): _conv_transpose}
