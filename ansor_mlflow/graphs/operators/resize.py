"""Resize where TVM's own is wrong or not there: sums of elements that constants choose.

TVM takes the ratio of the sizes where ONNX takes the scale that is given, which differ if the new size is not whole. It
knows neither `axes` nor the policies that keep the aspect ratio nor "half_pixel_symmetric".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import helper

from ansor_mlflow.graphs.editor import GraphEditor, Rewritings, Unchanged
from ansor_mlflow.graphs.types import FLOATS
from ansor_mlflow.graphs.walk import attributes_of, input_of

Array = np.ndarray[Any, Any]

_NEAREST: dict[str, Callable[[Array], Array]] = {
    "floor": np.floor,
    "ceil": np.ceil,
    "round_prefer_ceil": lambda position: np.floor(position + 0.5),
    "round_prefer_floor": lambda position: np.ceil(position - 0.5),
}


def why_not_resized(node: onnx.NodeProto, graph: GraphEditor) -> str | None:
    """Why a Resize is neither TVM's nor rewritten; None if it is."""
    attributes = attributes_of(node)
    if attributes.get("antialias"):
        return "antialiasing"
    if attributes.get("mode", "nearest") != "nearest" and graph.dtype(node.input[0]) not in FLOATS:
        return "values between integers"
    cropped = attributes.get("coordinate_transformation_mode") == "tf_crop_and_resize"
    return "a crop of some axes" if cropped and "axes" in attributes else None


def _resize(node: onnx.NodeProto, graph: GraphEditor) -> None:
    data, shape = node.input[0], graph.shape(node.input[0])
    if why_not_resized(node, graph) is not None:
        raise Unchanged
    attributes = attributes_of(node)
    coordinates = attributes.get("coordinate_transformation_mode", "half_pixel")
    sizes = _sizes(node, graph, shape)
    if coordinates == "tf_crop_and_resize":
        raise Unchanged
    if _is_right_in_tvm(attributes, shape, sizes, coordinates):
        # Exporters write scales without elements beside sizes, which TVM's importer takes for both.
        is_empty = [graph.is_constant(name) and not graph.value(name).size for name in node.input]
        if not any(is_empty):
            raise Unchanged
        inputs = ["" if empty else name for name, empty in zip(node.input, is_empty, strict=True)]
        graph.emit("Resize", *inputs, output=node.output[0], **attributes)
        return
    result = data
    for axis, (scale, size) in enumerate(sizes):
        if scale != 1 or size != shape[axis]:
            indices, weights = _taps(shape[axis], size, scale, coordinates, attributes)
            typed = weights.astype(helper.tensor_dtype_to_np_dtype(graph.dtype(data)))
            result = _chosen(result, axis, len(shape), indices, typed, graph)
    graph.emit("Identity", result, output=node.output[0])


def _is_right_in_tvm(
    attributes: dict[str, Any], shape: tuple[int, ...], sizes: list[tuple[float, int]], coordinates: str
) -> bool:
    whole = all(math.isclose(scale * old, new, rel_tol=1e-6) for old, (scale, new) in zip(shape, sizes, strict=True))
    kept = all(size == old for old, (_, size) in zip(shape[:2], sizes[:2], strict=True))
    # TVM resizes all axes but the first two.
    known = len(shape) in (3, 4, 5) and coordinates != "half_pixel_symmetric" and "axes" not in attributes
    if attributes.get("mode", "nearest") == "nearest":  # else ties depend on how the scale is rounded
        known = known and all(new % old == 0 for old, (_, new) in zip(shape, sizes, strict=True))
    if coordinates == "align_corners":  # TVM divides by zero
        known = known and all(new > 1 for _, new in sizes[2:])
    return known and whole and kept


def _sizes(node: onnx.NodeProto, graph: GraphEditor, shape: tuple[int, ...]) -> list[tuple[float, int]]:
    """Scale and new size of each axis."""
    attributes = attributes_of(node)
    axes = [axis % len(shape) for axis in attributes.get("axes", range(len(shape)))]
    result: list[tuple[float, int]] = [(1.0, size) for size in shape]
    names = [input_of(node, position) for position in (2, 3)]
    scales, sizes = (graph.value(name) if graph.is_constant(name) else np.array([]) for name in names)
    if scales.size:
        for axis, scale in zip(axes, scales.tolist(), strict=True):
            result[axis] = (scale, math.floor(np.float32(scale) * np.float32(shape[axis])))
    elif sizes.size:
        ratios = [size / shape[axis] for axis, size in zip(axes, sizes.tolist(), strict=True)]
        policy = attributes.get("keep_aspect_ratio_policy", "stretch")
        common = {"not_larger": min, "not_smaller": max}.get(policy)
        for axis, size, ratio in zip(axes, sizes.tolist(), ratios, strict=True):
            scale = common(ratios) if common else ratio
            result[axis] = (scale, math.floor(scale * shape[axis] + 0.5) if common else size)
    else:
        raise Unchanged
    return result


def _taps(size: int, new_size: int, scale: float, coordinates: str, attributes: dict[str, Any]) -> tuple[Array, Array]:
    """Which elements make each new one, as ONNX's specification of Resize has it.

    Indices and weights are both [taps, new_size]; all weights are 1 where there is one tap.
    """
    position = np.arange(new_size, dtype=np.float32)
    half_pixel = (position + np.float32(0.5)) / np.float32(scale) - np.float32(0.5)
    match coordinates:
        case "align_corners":
            old = position * np.float32(size - 1) / np.float32(max(new_size - 1, 1))
        case "asymmetric":
            old = position / np.float32(scale)
        case "half_pixel_symmetric":
            old = half_pixel + np.float32(size / 2 * (1 - new_size / (scale * size)))
        case "pytorch_half_pixel":
            old = half_pixel if new_size > 1 else np.zeros_like(position)
        case _:
            old = half_pixel
    match attributes.get("mode", "nearest"):
        case "linear":
            old = np.clip(old, 0, size - 1)
            offsets = np.array([0, 1])
            weights = np.stack([1 - (old - np.floor(old)), old - np.floor(old)])
        case "cubic":
            offsets = np.array([-1, 0, 1, 2])
            weights = _cubic(old - np.floor(old), attributes.get("cubic_coeff_a", -0.75))
        case _:
            nearest = _NEAREST[attributes.get("nearest_mode", "round_prefer_floor")](old)
            return np.clip(nearest, 0, size - 1).astype(np.int64)[None], np.ones((1, new_size), np.float32)
    indices = np.floor(old).astype(np.int64) + offsets[:, None]
    if attributes.get("exclude_outside"):
        weights = np.where((indices >= 0) & (indices < size), weights, 0)
        weights = weights / weights.sum(axis=0)
    return np.clip(indices, 0, size - 1), weights.astype(np.float32)


def _cubic(ratio: Array, a: float) -> Array:
    """Weights [4, …] of a cubic convolution (R. Keys, 1981)."""
    near, far = [ratio, 1 - ratio], [1 + ratio, 2 - ratio]
    inner = [((a + 2) * x - (a + 3)) * x * x + 1 for x in near]
    outer = [((a * x - 5 * a) * x + 8 * a) * x - 4 * a for x in far]
    return np.stack([outer[0], inner[0], inner[1], outer[1]])


def _chosen(data: str, axis: int, rank: int, indices: Array, weights: Array, graph: GraphEditor) -> str:
    """Sums the taps along an axis."""
    if len(indices) == 1:
        return graph.emit("Gather", data, graph.constant(indices[0]), axis=axis)
    terms = []
    for index, weight in zip(indices, weights, strict=True):
        chosen = graph.emit("Gather", data, graph.constant(index), axis=axis)
        broadcast = weight.reshape(-1, *[1] * (rank - axis - 1))
        terms.append(graph.emit("Mul", chosen, graph.constant(broadcast)))
    result = terms[0]
    for term in terms[1:]:
        result = graph.emit("Add", result, term)
    return result


REWRITINGS: Rewritings = {("", "Resize"): _resize}
