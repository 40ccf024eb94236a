"""Minimal filtering by the Cook-Toom algorithm: the matrices of Winograd's convolutions.

S. Winograd, "Arithmetic complexity of computations" (1980); A. Lavin and S. Gray, "Fast algorithms for convolutional
neural networks", arXiv:1509.09308. The points decide how much the rounding of float32 costs: B. Barabasz and others,
"Error analysis and improving the accuracy of Winograd convolution for deep neural networks", arXiv:1803.10986. Those of
F(4), each other's negatives and inverses, are of the kind that S. A. Alam, A. Anderson, B. Barabasz and D. Gregg found,
"Winograd convolution for deep neural networks: efficient point selection", doi:10.1145/3524069: a third of the error
less than with (0, -1, 1, 1/2, -2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm import te, tirx

Matrix = tuple[tuple[Fraction, ...], ...]

_POINTS = {2: ("0", "1", "-1"), 4: ("0", "3/4", "-3/4", "4/3", "-4/3")}
"""Where the polynomials are evaluated, besides at infinity, by the number of outputs."""
TILES = tuple(_POINTS)
"""Outputs of a tile along each of its axes for which there are points."""
KERNEL = 3
"""Taps of the filter along each axis."""
_NUM_TILES = 32
_MAX_CHANNELS = 64
"""Output channels of which errors are looked at; each is a sum over all input channels."""


@dataclass(frozen=True)
class Transforms:
    """The matrices of F(m, r): outputs = output · ((weights · g) ∘ (data · d)) for r taps g and m + r - 1 inputs d."""

    data: Matrix
    """Shape (m + r - 1, m + r - 1)."""
    weights: Matrix
    """Shape (m + r - 1, r)."""
    output: Matrix
    """Shape (m, m + r - 1)."""


@cache
def transforms(outputs: int) -> Transforms:
    """The matrices for a filter of three taps and one of `TILES` outputs, in exact fractions."""
    points = [Fraction(point) for point in _POINTS[outputs]]
    others = [[other for other in points if other != point] for point in points]
    scales = [
        prod((point - other for other in rest), start=Fraction(1)) for point, rest in zip(points, others, strict=True)
    ]
    size = len(points) + 1
    return Transforms(
        data=tuple(_padded(_from_roots(roots), size) for roots in (*others, points)),
        weights=(
            *(tuple(point**tap / scale for tap in range(KERNEL)) for point, scale in zip(points, scales, strict=True)),
            (*_padded([], KERNEL - 1), Fraction(1)),
        ),
        output=tuple((*(point**row for point in points), Fraction(int(row == outputs - 1))) for row in range(outputs)),
    )


def _from_roots(roots: Sequence[Fraction]) -> list[Fraction]:
    """Coefficients of the polynomial with these roots, from the constant term on."""
    coefficients = [Fraction(1)]
    for root in roots:
        shifted, scaled = [Fraction(0), *coefficients], [*(-root * value for value in coefficients), Fraction(0)]
        coefficients = [a + b for a, b in zip(shifted, scaled, strict=True)]
    return coefficients


def _padded(coefficients: list[Fraction], size: int) -> tuple[Fraction, ...]:
    return (*coefficients, *[Fraction(0)] * (size - len(coefficients)))


@dataclass(frozen=True)
class Depth:
    """The first axis of a convolution in three dimensions."""

    inputs: int
    """Slices of the input."""
    outputs: int
    taps: int
    """Slices that are summed."""
    stride: int
    dilation: int
    front: int
    """Slices of zeros before the first one."""


@dataclass(frozen=True)
class Convolution:
    """A convolution of 3 × 3, or of such faces, whose rows and columns have stride and dilation 1."""

    batch: int
    height: int
    """Rows of the input; `width` are its columns."""
    width: int
    channels_in: int
    channels_out: int
    rows: int
    """Rows of the output, beside its `columns`."""
    columns: int
    top: int
    """Rows of zeros above the input."""
    left: int
    depth: Depth | None = None
    """The first axis of a convolution in three dimensions; None in two."""

    @property
    def num_images(self) -> int:
        """Images that are convolved, each of them with `num_summed` channels."""
        return self.batch * (self.depth.outputs if self.depth else 1)

    @property
    def num_summed(self) -> int:
        """Channels of the input that are summed, of all slices."""
        return self.channels_in * (self.depth.taps if self.depth else 1)

    def tiles(self, outputs: int) -> tuple[int, int]:
        """Number of rows and of columns of tiles in an image."""
        return -(-self.rows // outputs), -(-self.columns // outputs)

    def flops(self, outputs: int) -> float:
        """Floating point operations, those of the transforms among them."""
        size, matrices = outputs + KERNEL - 1, transforms(outputs)
        num_tiles = self.num_images * int(np.prod(self.tiles(outputs)))
        into = 2 * size * _num_terms(matrices.data) * self.num_summed
        back = (size + outputs) * _num_terms(matrices.output) * self.channels_out
        return 2.0 * num_tiles * (size**2 * self.num_summed * self.channels_out + into + back)


def transform_weights(weights: NDArray[np.float32], outputs: int) -> NDArray[np.float32]:
    """Weights (3, 3, summed channels, channels out) at the points, (m + 2, m + 2, …), computed in float64."""
    matrix = np.array(transforms(outputs).weights, np.float64)
    transformed = np.einsum("ea,abio,ub->euio", matrix, weights.astype(np.float64), matrix, optimize=True)
    return np.asarray(transformed, np.float32)


def faces_of(weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """Weights as (3, 3, summed channels, channels out); of three dimensions they are (slices, 3, 3, in, out)."""
    if weights.ndim == 4:
        return weights
    return np.moveaxis(weights, 0, 2).reshape(KERNEL, KERNEL, -1, weights.shape[-1])


def error_of(weights: NDArray[np.float32], outputs: int) -> float:
    """The largest error of F(m × m, 3 × 3) over the largest output, with weights (3, 3, in, out) and normal data."""
    size = outputs + KERNEL - 1
    weights = weights[..., :: max(1, weights.shape[-1] // _MAX_CHANNELS)]
    data = np.random.default_rng(0).standard_normal((_NUM_TILES, size, size, weights.shape[2]), np.float32)
    expected = np.zeros((_NUM_TILES, outputs, outputs, weights.shape[3]))
    for row in range(KERNEL):
        for column in range(KERNEL):
            window = data[:, row : row + outputs, column : column + outputs].astype(np.float64)
            expected += window @ weights[row, column].astype(np.float64)
    scale = np.abs(expected).max()
    # As the kernel computes them, in its order: columns before rows, there and back.
    into, back = (np.array(matrix, np.float32) for matrix in (transforms(outputs).data, transforms(outputs).output))
    points = _along(into, _along(into, data, 1), 2)
    product = np.einsum("teuk,eukc->teuc", points, transform_weights(weights, outputs), optimize=True)
    found = _along(back, _along(back, product, 1), 2)
    return float(np.abs(found - expected).max() / scale) if scale else 0.0


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


def winograd(layer: Convolution, outputs: int, name: str) -> Any:
    """A function of the input, the transformed weights and the output, which a block of that name writes."""
    matrices, size = transforms(outputs), outputs + KERNEL - 1
    down, across = layer.tiles(outputs)
    num_tiles, depth = layer.num_images * down * across, layer.depth
    slices = [] if depth is None else [depth.inputs]
    data = te.placeholder(
        _shape(layer.batch, *slices, layer.height, layer.width, layer.channels_in), name="data", dtype="float32"
    )
    weights = te.placeholder(_shape(size, size, layer.num_summed, layer.channels_out), name="weights", dtype="float32")

    def padded(b: Any, y: Any, x: Any, c: Any) -> Any:
        y, x, place = y - layer.top, x - layer.left, [b]
        inside = [y >= 0, y < layer.height, x >= 0, x < layer.width]
        if depth is not None:
            z = b % depth.outputs * depth.stride + c // layer.channels_in * depth.dilation - depth.front
            place, c = [b // depth.outputs, z], c % layer.channels_in
            inside += [z >= 0, z < depth.inputs]
        return tirx.if_then_else(tirx.all(*inside), data[(*place, y, x, c)], tirx.const(0.0, "float32"))

    pad = te.compute(
        _shape(layer.num_images, down * outputs + KERNEL - 1, across * outputs + KERNEL - 1, layer.num_summed),
        padded,
        name="winograd_pad",
    )

    def element(t: Any, row: Any, column: Any, c: Any) -> Any:
        y, x = t // across % down * outputs + row, t % across * outputs + column
        return pad[t // (across * down), y, x, c]

    by_columns = te.compute(
        _shape(num_tiles, size, size, layer.num_summed),
        lambda t, e, q, c: _combine(e, matrices.data, lambda row: element(t, row, q, c)),
        name="winograd_columns",
    )
    transformed = te.compute(
        _shape(size, size, num_tiles, layer.num_summed),
        lambda e, u, t, c: _combine(u, matrices.data, lambda column: by_columns[t, e, column, c]),
        name="winograd_data",
    )
    k = te.reduce_axis(_shape(0, layer.num_summed), "k")
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

    def output(*axes: Any) -> Any:
        *images, y, x, c = axes
        image = images[0] if depth is None else images[0] * depth.outputs + images[1]
        tile = (image * down + y // outputs) * across + x // outputs
        return _combine(x % outputs, matrices.output, lambda column: rows[tile, y % outputs, column, c])

    slices = [] if depth is None else [depth.outputs]
    result = te.compute(_shape(layer.batch, *slices, layer.rows, layer.columns, layer.channels_out), output, name=name)
    return te.create_prim_func([data, weights, result])


def _combine(index: Any, matrix: Matrix, term: Callable[[Any], Any]) -> Any:
    """The sum of terms with the coefficients in that row of a matrix."""
    *others, result = [_sum(row, term) for row in matrix]
    for number, value in reversed(list(enumerate(others))):
        result = tirx.Select(index == number, value, result)
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
