"""Transposed convolutions as convolutions.

With stride s, output position o = s·q + r (r < s: its phase) takes only those taps k of the kernel that leave r when
divided by s: y[s·q + r] = Σ_j x[q − j] w[s·j + r]. All phases are one convolution with s times as many channels, whose
kernel is that many times smaller, and the phases are interleaved afterwards (W. Shi and others, "Is the deconvolution
layer the same as a convolutional layer?", 2016). That is as fast as a convolution is, and nothing is multiplied by the
zeros between the inputs; where a kernel is no multiple of its stride, the last taps of some phases are zeros.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from ansor_mlflow.graphs.editor import GraphEditor, Rewritings
from ansor_mlflow.graphs.walk import attributes_of, input_of


@dataclass(frozen=True)
class _Axis:
    """A transposed convolution along one axis."""

    size: int
    """Elements of the input."""
    kernel: int
    """Taps, those between dilated ones included."""
    stride: int
    first: int
    """Position of the output's first element in what the kernel reaches without any padding."""
    output: int
    """Elements of the output."""

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


def _conv_transpose(node: onnx.NodeProto, graph: GraphEditor) -> bool:
    data, weight_name, bias_name = node.input[0], node.input[1], input_of(node, 2)
    shape, weight = graph.shape(data), graph.value(weight_name)
    bias = graph.value(bias_name) if bias_name else None
    if shape is None or weight is None or (bias_name and bias is None):
        return False
    attributes = attributes_of(node)
    groups = attributes.get("group", 1)
    dilated = _dilated(weight, attributes.get("dilations", [1] * (weight.ndim - 2)))
    axes = _axes(shape[2:], dilated.shape[2:], attributes)
    strides = [axis.stride for axis in axes]
    channels = groups * weight.shape[1]
    phases_first = groups == 1  # channels next to each other stay so when they are the last axis
    kernel = _phase_kernels(dilated, groups, axes, phases_first=phases_first)
    inputs = [_without_margins(data, axes, graph), graph.constant(kernel)]
    if bias is not None:
        repeat = np.tile if phases_first else np.repeat
        inputs.append(graph.constant(repeat(bias, int(np.prod(strides)))))
    pads = [max(0, axis.pads[side]) for side in (0, 1) for axis in axes]
    needs_crop = any(axis.crop != (0, axis.positions * axis.stride) for axis in axes)
    if all(stride == 1 for stride in strides):
        graph.emit("Conv", *inputs, group=groups, pads=pads, output=node.output[0])
        return True
    phases = graph.emit("Conv", *inputs, group=groups, pads=pads)
    interleaved = _interleaved(phases, shape[0], channels, axes, graph, phases_first=phases_first)
    if needs_crop:
        begins, ends = zip(*(axis.crop for axis in axes), strict=True)
        spatial = list(range(2, 2 + len(axes)))
        graph.slice(interleaved, list(begins), list(ends), spatial, output=node.output[0])
    else:
        graph.emit("Identity", interleaved, output=node.output[0])
    return True


REWRITINGS: Rewritings = {("", "ConvTranspose"): _conv_transpose}


def _dilated(weight: np.ndarray[Any, Any], dilations: Sequence[int]) -> np.ndarray[Any, Any]:
    """The kernel with the zeros between its taps written down."""
    sizes = [(size - 1) * dilation + 1 for size, dilation in zip(weight.shape[2:], dilations, strict=True)]
    dilated = np.zeros((*weight.shape[:2], *sizes), weight.dtype)
    dilated[(slice(None), slice(None), *(slice(None, None, dilation) for dilation in dilations))] = weight
    return dilated


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
    split = padded.reshape(
        groups, in_channels // groups, out_channels, *itertools.chain(*zip(taps, strides, strict=True))
    )
    split = np.flip(split, tuple(3 + 2 * axis for axis in range(len(axes))))
    phase_axes = [4 + 2 * axis for axis in range(len(axes))]
    tap_axes = [3 + 2 * axis for axis in range(len(axes))]
    order = [*phase_axes, 0, 2] if phases_first else [0, 2, *phase_axes]
    return np.ascontiguousarray(split.transpose(*order, 1, *tap_axes)).reshape(-1, in_channels // groups, *taps)


def _without_margins(data: str, axes: Sequence[_Axis], graph: GraphEditor) -> str:
    """The input without what only elements in the padding would need."""
    cut = [(index, axis) for index, axis in enumerate(axes) if min(axis.pads) < 0]
    if not cut:
        return data
    starts = [max(0, -axis.pads[0]) for _, axis in cut]
    ends = [axis.size - max(0, -axis.pads[1]) for _, axis in cut]
    return graph.slice(data, starts, ends, [2 + index for index, _ in cut])


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
