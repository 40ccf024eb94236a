"""Winograd's convolution as blocks of TensorIR: F(m×m, 3×3) in channels-last layout.

The output is divided into tiles of m × m, which overlap in the input by two rows and columns. With a = m + 2 and t for
the tiles of all images:

    winograd_pad      (n, rows, columns, ci)    the input with zeros around it
    winograd_columns  (t, a, a, ci)             its tiles, transformed along columns
    winograd_data     (a, a, t, ci)             and along rows
    winograd_product  (a, a, t, co)             for each of the a² points a matrix product with the weights there
    winograd_rows     (t, m, a, co)             transformed back along columns
    the output        (n, height, width, co)    and along rows

Sums with the constant matrices are written out as a choice by the index of their result, of which scheduled loops leave
one term: multiplications by zero and one are not there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm import te, tirx

from ansor_mlflow.lowering.ways.cook_toom import KERNEL, Matrix, transforms


@dataclass(frozen=True)
class Convolution:
    """A convolution of 3 × 3 with stride and dilation 1."""

    batch: int
    height: int
    """Of the input, as `width`."""
    width: int
    channels_in: int
    channels_out: int
    rows: int
    """Of the output, as `columns`."""
    columns: int
    top: int
    """Rows of zeros above the input."""
    left: int

    def tiles(self, outputs: int) -> tuple[int, int]:
        """Number of rows and of columns of tiles in an image."""
        return -(-self.rows // outputs), -(-self.columns // outputs)

    def flops(self, outputs: int) -> float:
        """Floating point operations, those of the transforms among them."""
        size, matrices = outputs + KERNEL - 1, transforms(outputs)
        num_tiles = self.batch * int(np.prod(self.tiles(outputs)))
        into = 2 * size * _num_terms(matrices.data) * self.channels_in
        back = (size + outputs) * _num_terms(matrices.output) * self.channels_out
        return 2.0 * num_tiles * (size**2 * self.channels_in * self.channels_out + into + back)


def transform_weights(weights: NDArray[np.float32], outputs: int) -> NDArray[np.float32]:
    """The weights at the points, computed in float64.

    Args:
        weights: Shape (3, 3, channels in, channels out).
        outputs: m of F(m × m, 3 × 3).

    Returns:
        Shape (m + 2, m + 2, channels in, channels out).
    """
    matrix = np.array(transforms(outputs).weights, np.float64)
    transformed = np.einsum("ea,abio,ub->euio", matrix, weights.astype(np.float64), matrix, optimize=True)
    result: NDArray[np.float32] = transformed.astype(np.float32)
    return result


def winograd(layer: Convolution, outputs: int, name: str) -> Any:
    """A function of the input, the transformed weights and the output.

    Args:
        layer: The convolution.
        outputs: m of F(m × m, 3 × 3).
        name: Name of the block that writes the output.
    """
    matrices, size = transforms(outputs), outputs + KERNEL - 1
    down, across = layer.tiles(outputs)
    num_tiles = layer.batch * down * across
    data = te.placeholder(
        _shape(layer.batch, layer.height, layer.width, layer.channels_in), name="data", dtype="float32"
    )
    weights = te.placeholder(_shape(size, size, layer.channels_in, layer.channels_out), name="weights", dtype="float32")

    def padded(b: Any, y: Any, x: Any, c: Any) -> Any:
        y, x = y - layer.top, x - layer.left
        inside = tirx.all(y >= 0, y < layer.height, x >= 0, x < layer.width)
        return tirx.if_then_else(inside, data[b, y, x, c], tirx.const(0.0, "float32"))

    pad = te.compute(
        _shape(layer.batch, down * outputs + KERNEL - 1, across * outputs + KERNEL - 1, layer.channels_in),
        padded,
        name="winograd_pad",
    )

    def element(t: Any, row: Any, column: Any, c: Any) -> Any:
        """Of a tile of the input."""
        y, x = t // across % down * outputs + row, t % across * outputs + column
        return pad[t // (across * down), y, x, c]

    by_columns = te.compute(
        _shape(num_tiles, size, size, layer.channels_in),
        lambda t, e, q, c: _combine(e, matrices.data, lambda row: element(t, row, q, c)),
        name="winograd_columns",
    )
    transformed = te.compute(
        _shape(size, size, num_tiles, layer.channels_in),
        lambda e, u, t, c: _combine(u, matrices.data, lambda column: by_columns[t, e, column, c]),
        name="winograd_data",
    )
    k = te.reduce_axis(_shape(0, layer.channels_in), "k")
    product = te.compute(
        _shape(size, size, num_tiles, layer.channels_out),
        lambda e, u, t, c: te.sum(transformed[e, u, t, k] * weights[e, u, k, c], axis=k),
        name="winograd_product",
    )
    rows = te.compute(
        _shape(num_tiles, outputs, size, layer.channels_out),
        lambda t, e, u, c: _combine(e, matrices.output, lambda row: product[row, u, t, c]),
        name="winograd_rows",
    )

    def output(b: Any, y: Any, x: Any, c: Any) -> Any:
        tile = (b * down + y // outputs) * across + x // outputs
        return _combine(x % outputs, matrices.output, lambda column: rows[tile, y % outputs, column, c])

    result = te.compute(_shape(layer.batch, layer.rows, layer.columns, layer.channels_out), output, name=name)
    return te.create_prim_func([data, weights, result])


def _combine(index: Any, matrix: Matrix, term: Callable[[Any], Any]) -> Any:
    """The sum of terms with the coefficients in that row of a matrix."""
    result = None
    for number, row in reversed(list(enumerate(matrix))):
        value = _sum(row, term)
        result = value if result is None else tirx.Select(index == number, value, result)
    return result


def _sum(row: Sequence[Any], term: Callable[[Any], Any]) -> Any:
    result: Any = None
    for number, coefficient in enumerate(row):
        if not coefficient:
            continue
        value = term(tirx.const(number, "int64"))  # an int would be of another type than the loops
        scaled = value if abs(coefficient) == 1 else value * tirx.const(float(abs(coefficient)), "float32")
        if result is None:
            result = scaled if coefficient > 0 else tirx.const(0.0, "float32") - scaled
        else:
            result = result + scaled if coefficient > 0 else result - scaled
    return result


def _num_terms(matrix: Matrix) -> int:
    return sum(coefficient != 0 for row in matrix for coefficient in row)


def _shape(*extents: int) -> tuple[Any, ...]:
    """Extents of the type that fused functions have."""
    return tuple(tirx.const(extent, "int64") for extent in extents)
