"""How many digits an algorithm for a layer loses: its error in float32 against float64, with the layer's weights."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ansor_mlflow.lowering.algorithms.winograd import KERNEL, transform_weights, transforms

_NUM_TILES = 32
_MAX_CHANNELS = 64
"""Output channels of which errors are looked at; each is a sum over all input channels."""


def error_of(weights: NDArray[np.float32], outputs: int) -> float:
    """The largest error of F(m × m, 3 × 3) over the largest output, of random tiles of normally distributed data.

    The weights have the shape (3, 3, channels in, channels out).
    """
    size = outputs + KERNEL - 1
    weights = weights[..., :: max(1, weights.shape[-1] // _MAX_CHANNELS)]
    data = np.random.default_rng(0).standard_normal((_NUM_TILES, size, size, weights.shape[2]), np.float32)
    expected = np.zeros((_NUM_TILES, outputs, outputs, weights.shape[3]))
    for row in range(KERNEL):
        for column in range(KERNEL):
            window = data[:, row : row + outputs, column : column + outputs].astype(np.float64)
            expected += window @ weights[row, column].astype(np.float64)
    scale = np.abs(expected).max()
    return float(np.abs(_in_float32(data, weights, outputs) - expected).max() / scale) if scale else 0.0


def _in_float32(data: NDArray[np.float32], weights: NDArray[np.float32], outputs: int) -> NDArray[np.float32]:
    """The outputs as Winograd's algorithm computes them, in its own order: columns before rows, there and back."""
    into, back = (np.array(matrix, np.float32) for matrix in (transforms(outputs).data, transforms(outputs).output))
    points = _along(into, _along(into, data, 1), 2)
    product = np.einsum("teuk,eukc->teuc", points, transform_weights(weights, outputs), optimize=True)
    return _along(back, _along(back, product, 1), 2)


def _along(matrix: NDArray[np.float32], values: NDArray[Any], axis: int) -> NDArray[np.float32]:
    """A transform along an axis, summed term by term as the kernel does it."""
    moved = np.moveaxis(values, axis, 0)
    rows = []
    for row in matrix:
        total = np.zeros(moved.shape[1:], np.float32)
        for coefficient, value in zip(row, moved, strict=True):
            if coefficient:
                total = total + coefficient * value
        rows.append(total)
    return np.moveaxis(np.stack(rows), 0, axis)
