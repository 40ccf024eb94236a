"""How far outputs are from a reference, and how far they may be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ansor_mlflow.tensors import Arrays

TOLERANCES = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
"""Largest `max_rel_error` that passes, by the type that a network computes in; the reference computes in float32."""


QUANTIZED_TOLERANCE = 1e-1
"""Tolerance for a network that rounds to 8 bits: a value half-way between two steps goes up or down with the order of a
sum, and what follows from the other step is no error.
"""


_SMALLEST_SCALE = 1e-2
"""Errors of smaller outputs are relative to this. Networks compute with values around 1, and what comes of those is off
by some units of their last place, however small it is: sigmoid(-14.3) is 6.00e-7, or 5.66e-7 and 6.26e-7 in two kernels
of ONNX Runtime. With the tolerance for float32 this allows 1e-6, which are eight such units.
"""


@dataclass(frozen=True)
class Deviation:
    """How far outputs are from a reference, over all outputs."""

    max_abs_error: float
    max_rel_error: float
    """max |output - reference| / max |reference|, the latter at least 0.01; the largest over the outputs. (Dividing
    element by element, or by less, would report the rounding of values near zero.)"""

    @staticmethod
    def worst(differences: list[Deviation]) -> Deviation:
        """The largest errors of several comparisons."""
        return Deviation(
            max(difference.max_abs_error for difference in differences),
            max(difference.max_rel_error for difference in differences),
        )


def compare_outputs(actual: Arrays, expected: Arrays) -> Deviation:
    """Compares outputs by name. A missing output, another shape or a NaN is an infinite error.

    An infinity that both have is none: what is left out of a choice is often minus infinity.
    """
    differences = [_difference(actual.get(name), reference) for name, reference in expected.items()]
    return Deviation.worst(differences)


def compare_tensors(actual: npt.NDArray[Any], expected: npt.NDArray[Any]) -> Deviation:
    """Compares values inside of a network: a NaN or an infinity that both have is no error."""
    if actual.shape != expected.shape:
        return Deviation(float("inf"), float("inf"))
    is_finite = np.isfinite(expected)
    if not np.array_equal(actual[~is_finite], expected[~is_finite], equal_nan=True):
        return Deviation(float("inf"), float("inf"))
    return _difference(actual[is_finite], expected[is_finite])


def _difference(actual: npt.NDArray[Any] | None, expected: npt.NDArray[Any]) -> Deviation:
    if actual is None or actual.shape != expected.shape:
        return Deviation(float("inf"), float("inf"))
    if expected.size == 0:
        return Deviation(0.0, 0.0)
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    is_same_infinity = np.isinf(expected) & (actual == expected)
    errors = np.abs(np.subtract(actual, expected, out=np.zeros(expected.shape), where=~is_same_infinity))
    if not np.isfinite(errors).all():
        return Deviation(float("inf"), float("inf"))
    scale = float(np.max(np.abs(expected), initial=0.0, where=~is_same_infinity))
    max_abs = float(errors.max())
    return Deviation(max_abs, max_abs / max(scale, _SMALLEST_SCALE))
