"""Convolutions without the taps that meet nothing but padding.

A kernel of 3×3 with dilation 24 over 14×14 pixels, as segmentation networks have it, reads a pixel with its middle tap
alone: wherever it is, the eight others are in the padding, and what they add is zero. So do eight of nine taps over a
single pixel, at the end of a network for small images.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx

from ansor_mlflow.graphs.editor import GraphEditor, Rewritings
from ansor_mlflow.graphs.walk import attributes_of, input_of


def _conv(node: onnx.NodeProto, graph: GraphEditor) -> bool:
    sizes, kernel = (shape and shape[2:] for shape in map(graph.shape, node.input[:2]))
    if not sizes or not kernel:
        return False
    attributes, rank = attributes_of(node), len(sizes)
    strides = attributes.get("strides", [1] * rank)
    dilations = attributes.get("dilations", [1] * rank)
    pads = pads_of(sizes, kernel, strides, dilations, attributes)
    trimmed = [_trimmed(*axis) for axis in zip(sizes, kernel, strides, dilations, pads, strict=True)]
    if all(len(taps) == size for (taps, _), size in zip(trimmed, kernel, strict=True)):
        return False
    if (weight := graph.value(node.input[1])) is None:
        return False
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
    return True


REWRITINGS: Rewritings = {("", "Conv"): _conv}


def pads_of(
    sizes: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    attributes: dict[str, Any],
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
