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

from ansor_mlflow.sketches import TILE_COLUMNS, divisors

Matrix = tuple[tuple[Fraction, ...], ...]

_POINTS: dict[int, tuple[str, ...]] = {
    1: (),
    4: ("0", "1", "-1"),
    6: ("0", "3/4", "-3/4", "4/3", "-4/3"),
    8: ("0", "1", "-1", "1/2", "-1/2", "2", "-2"),
}
"""Where the polynomials are evaluated, besides at infinity, by the number of inputs of a tile."""
_OUTPUTS = (2, 4)
_MAX_WASTE = 32
"""Rows of tiles for which there may be one more than the image has."""
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
def transforms(outputs: int, taps: int) -> Transforms:
    """The matrices for outputs of a filter, in exact fractions; there are points for outputs + taps - 1 inputs."""
    size = outputs + taps - 1
    points = [Fraction(point) for point in _POINTS[size]]
    others = [[other for other in points if other != point] for point in points]
    scales = [
        prod((point - other for other in rest), start=Fraction(1)) for point, rest in zip(points, others, strict=True)
    ]
    return Transforms(
        data=tuple(_padded(_from_roots(roots), size) for roots in (*others, points)),
        weights=(
            *(tuple(point**tap / scale for tap in range(taps)) for point, scale in zip(points, scales, strict=True)),
            (*_padded([], taps - 1), Fraction(1)),
        ),
        output=tuple((*(point**row for point in points), Fraction(int(row == outputs - 1))) for row in range(outputs)),
    )


@dataclass(frozen=True)
class Filter:
    """F(m, r) along rows and along columns: F(1, 1) along an axis is no transform at all."""

    outputs: tuple[int, int]
    """Rows and columns of the outputs of a tile."""
    taps: tuple[int, int]

    @staticmethod
    def all_of(taps: tuple[int, int]) -> list[Filter]:
        """Those with that many taps for which there are points."""
        filters = [Filter((1 if taps[0] == 1 else m, 1 if taps[1] == 1 else m), taps) for m in _OUTPUTS]
        return [each for each in filters if max(taps) > 1 and all(size in _POINTS for size in each.size)]

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns of the inputs of a tile."""
        rows, columns = (outputs + taps - 1 for outputs, taps in zip(self.outputs, self.taps, strict=True))
        return rows, columns

    @property
    def num_points(self) -> int:
        return prod(self.size)

    @property
    def along(self) -> tuple[Transforms, Transforms]:
        """The matrices along rows and along columns."""
        rows, columns = (transforms(outputs, taps) for outputs, taps in zip(self.outputs, self.taps, strict=True))
        return rows, columns

    def __str__(self) -> str:
        return f"{self.outputs[0]}x{self.outputs[1]}"


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
    """A convolution whose rows and columns have stride 1, over one axis, two, or three."""

    batch: int
    height: int
    """Rows of the input; `width` are its columns."""
    width: int
    channels_in: int
    """Channels of the input in a group."""
    channels_out: int
    """Channels of the output in all groups."""
    rows: int
    """Rows of the output, beside its `columns`."""
    columns: int
    top: int
    """Rows of zeros above the input."""
    left: int
    taps: tuple[int, int]
    """Taps of its filters, along rows and columns."""
    groups: int = 1
    depth: Depth | None = None
    """The first axis of a convolution in three dimensions; None in fewer."""
    line: int = 0
    """How far apart the taps of a convolution over one axis are, whose elements are rows here; 0 with more axes."""

    @property
    def num_images(self) -> int:
        """Images that are convolved, each of them with `num_summed` channels."""
        return self.batch * (self.depth.outputs if self.depth else 1)

    @property
    def num_summed(self) -> int:
        """Channels of the input that are summed: those in a group, of all slices."""
        return self.channels_in * (self.depth.taps if self.depth else 1)

    def filters(self) -> list[Filter]:
        """Those that compute it.

        What every n-th element of a line is convolved with are other elements of these: they are a row or a column of
        an image, of n of them. There should be many rows, which are shared out.
        """
        filters = Filter.all_of(self.taps)
        if not self.line:
            return filters
        return [
            each
            if self.line == 1 or self.line**2 * each.outputs[0] <= self.rows
            else Filter(each.outputs[::-1], each.taps[::-1])
            for each in filters
        ]

    def image(self, filter: Filter) -> tuple[int, int]:
        """Rows and columns of the output, those of the image that a line is among them."""
        if not self.line:
            return self.rows, self.columns
        length = -(-self.rows // self.line)
        return (length, self.line) if filter.taps[0] > 1 else (self.line, length)

    @property
    def is_exact(self) -> bool:
        """Whether the output is written as it is, and not as whole tiles: those functions have records."""
        return self.taps == (3, 3)

    def tiles(self, filter: Filter) -> tuple[int, int]:
        """Number of rows and of columns of tiles in an image."""
        (rows, columns), (tile_rows, tile_columns) = self.image(filter), filter.outputs
        down, across = -(-rows // tile_rows), -(-columns // tile_columns)
        if not self.is_exact and tile_rows > 1:  # a prime number could not be shared out
            down = max(range(down, down + down // _MAX_WASTE + 1), key=lambda number: len(divisors(number)))
        return down, across

    def place(self, filter: Filter, row: Any, column: Any) -> list[Any]:
        """Where an element of the image is: its row and column, or its place in a line."""
        if not self.line:
            return [row, column]
        if self.line == 1:
            return [row]
        return [row * self.line + column if filter.taps[0] > 1 else column * self.line + row]

    def flops(self, filter: Filter) -> float:
        """Floating point operations, those of the transforms among them."""
        num_tiles = self.num_images * prod(self.tiles(filter))
        (size, width), outputs, (down, across) = filter.size, filter.outputs, filter.along
        into = width * _num_terms(down.data) + size * _num_terms(across.data)
        back = width * _num_terms(down.output) + outputs[0] * _num_terms(across.output)
        product = filter.num_points * self.num_summed * self.channels_out
        return 2.0 * num_tiles * (product + into * self.num_summed * self.groups + back * self.channels_out)


def transform_weights(weights: NDArray[np.float32], filter: Filter) -> NDArray[np.float32]:
    """Weights (taps, taps, summed channels, channels out) at the points, computed in float64."""
    down, across = (np.array(matrices.weights, np.float64) for matrices in filter.along)
    transformed = np.einsum("ea,abio,ub->euio", down, weights.astype(np.float64), across, optimize=True)
    return np.asarray(transformed, np.float32)


def faces_of(weights: NDArray[np.float32], filter: Filter) -> NDArray[np.float32]:
    """Weights (taps, in, out), (taps, taps, in, out) or (slices, taps, taps, in, out), as those of two axes."""
    if weights.ndim > 4:
        weights = np.moveaxis(weights, 0, 2)
    return weights.reshape(*filter.taps, -1, weights.shape[-1])


def error_of(weights: NDArray[np.float32], filter: Filter) -> float:
    """The largest error over the largest output, with weights (taps, taps, in, out) and normal data."""
    weights = weights[..., :: max(1, weights.shape[-1] // _MAX_CHANNELS)]
    data = np.random.default_rng(0).standard_normal((_NUM_TILES, *filter.size, weights.shape[2]), np.float32)
    expected = np.zeros((_NUM_TILES, *filter.outputs, weights.shape[3]))
    for row, column in np.ndindex(filter.taps):
        window = data[:, row : row + filter.outputs[0], column : column + filter.outputs[1]].astype(np.float64)
        expected += window @ weights[row, column].astype(np.float64)
    scale = np.abs(expected).max()
    # As the kernel computes them, in its order: columns before rows, there and back.
    into, back = ([np.array(getattr(each, name), np.float32) for each in filter.along] for name in ("data", "output"))
    points = _along(into[1], _along(into[0], data, 1), 2)
    product = np.einsum("teuk,eukc->teuc", points, transform_weights(weights, filter), optimize=True)
    found = _along(back[1], _along(back[0], product, 1), 2)
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


def winograd(layer: Convolution, filter: Filter, name: str) -> Any:
    """A function of the input, the transformed weights and the output, which a block of that name writes.

    The output is an image of whole tiles if the convolution is not exact.
    """
    (size, width), (tile_rows, tile_columns), (rows_of, columns_of) = filter.size, filter.outputs, filter.along
    down, across = layer.tiles(filter)
    num_tiles, depth = layer.num_images * down * across, layer.depth
    inputs = (layer.height, layer.width)[: 1 if layer.line else 2]
    outputs = (layer.rows, layer.columns) if layer.is_exact else (down * tile_rows, across * tile_columns)
    slices = [] if depth is None else [depth.inputs]
    channels = layer.num_summed * layer.groups
    data = te.placeholder(
        _shape(layer.batch, *slices, *inputs, layer.channels_in * layer.groups), name="data", dtype="float32"
    )
    weights = te.placeholder(_shape(size, width, layer.num_summed, layer.channels_out), name="weights", dtype="float32")

    def padded(b: Any, y: Any, x: Any, c: Any) -> Any:
        before, place, inside = (layer.top, layer.left), [b], []
        face = [index - zeros for index, zeros in zip(layer.place(filter, y, x), before, strict=False)]
        for index, extent in zip(face, inputs, strict=True):
            inside += [index >= 0, index < extent]
        if depth is not None:
            z = b % depth.outputs * depth.stride + c // layer.channels_in * depth.dilation - depth.front
            place, c = [b // depth.outputs, z], c % layer.channels_in
            inside += [z >= 0, z < depth.inputs]
        return tirx.if_then_else(tirx.all(*inside), data[(*place, *face, c)], tirx.const(0.0, "float32"))

    pad = te.compute(
        _shape(
            *(layer.num_images, down * tile_rows + size - tile_rows, across * tile_columns + width - tile_columns),
            channels,
        ),
        padded,
        name="winograd_pad",
    )

    def element(t: Any, row: Any, column: Any, c: Any) -> Any:
        y, x = t // across % down * tile_rows + row, t % across * tile_columns + column
        return pad[t // (across * down), y, x, c]

    by_columns = te.compute(
        _shape(num_tiles, size, width, channels),
        lambda t, e, q, c: _combine(e, rows_of.data, lambda row: element(t, row, q, c)),
        name="winograd_columns",
    )
    transformed = te.compute(
        _shape(size, width, num_tiles, channels),
        lambda e, u, t, c: _combine(u, columns_of.data, lambda column: by_columns[t, e, column, c]),
        name="winograd_data",
    )

    def first(c: Any) -> Any:
        """The first channel of the group of an output."""
        return c // (layer.channels_out // layer.groups) * layer.num_summed if layer.groups > 1 else 0

    k = te.reduce_axis(_shape(0, layer.num_summed), "k")
    product = te.compute(
        _shape(size, width, num_tiles, layer.channels_out),
        lambda e, u, t, c: te.sum(transformed[e, u, t, first(c) + k] * weights[e, u, k, c], axis=k),
        name="winograd_product",
    )
    rows = te.compute(
        _shape(num_tiles, tile_rows, width, layer.channels_out),
        lambda t, e, u, c: _combine(e, rows_of.output, lambda row: product[row, u, t, c]),
        name="winograd_rows",
        # The sketch knows those of squares by their rows.
        attrs=None if tile_rows == tile_columns else {TILE_COLUMNS: tile_columns},
    )

    def output(*axes: Any) -> Any:
        *images, y, x, c = axes
        image = images[0] if depth is None else images[0] * depth.outputs + images[1]
        tile = (image * down + y // tile_rows) * across + x // tile_columns
        return _combine(x % tile_columns, columns_of.output, lambda column: rows[tile, y % tile_rows, column, c])

    slices = [] if depth is None else [depth.outputs]
    result = te.compute(_shape(layer.batch, *slices, *outputs, layer.channels_out), output, name=name)
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
    """How many products a transform sums, for an element of another axis; none where it is no transform."""
    return sum(coefficient != 0 for row in matrix for coefficient in row) if len(matrix) > 1 else 0


def _shape(*extents: int) -> tuple[Any, ...]:
    """Extents of the type that fused functions have."""
    return tuple(tirx.const(extent, "int64") for extent in extents)
