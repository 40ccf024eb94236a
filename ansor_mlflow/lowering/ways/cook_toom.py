"""Minimal filtering by the Cook-Toom algorithm: the matrices of Winograd's convolutions.

S. Winograd, "Arithmetic complexity of computations" (1980); A. Lavin and S. Gray, "Fast algorithms for convolutional
neural networks", arXiv:1509.09308. The points decide how much the rounding of float32 costs: B. Barabasz and others,
"Error analysis and improving the accuracy of Winograd convolution for deep neural networks", arXiv:1803.10986. Those of
F(4), each other's negatives and inverses, are of the kind that S. A. Alam, A. Anderson, B. Barabasz and D. Gregg found,
"Winograd convolution for deep neural networks: efficient point selection", doi:10.1145/3524069: a third of the error
less than with (0, -1, 1, 1/2, -2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from math import prod

Matrix = tuple[tuple[Fraction, ...], ...]

_POINTS = {2: ("0", "1", "-1"), 4: ("0", "3/4", "-3/4", "4/3", "-4/3")}
"""Where the polynomials are evaluated, besides at infinity, by the number of outputs."""
TILES = tuple(_POINTS)
"""Outputs of a tile along each of its axes for which there are points."""
KERNEL = 3
"""Taps of the filter along each axis."""


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
