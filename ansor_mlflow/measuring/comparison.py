"""How far outputs are from a reference, and how far they may be."""

from __future__ import annotations

from collections.abc import Callable
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


_INFINITE = Deviation(float("inf"), float("inf"))


def compare_outputs(actual: Arrays, expected: Arrays) -> Deviation:
    """Compares outputs by name. A missing output, another shape or a NaN is an infinite error.

    An infinity that both have is none: what is left out of a choice is often minus infinity.
    """
    return Deviation.worst([_compare(actual.get(name), output, np.isinf) for name, output in expected.items()])


def compare_tensors(actual: npt.NDArray[Any], expected: npt.NDArray[Any]) -> Deviation:
    """Compares values inside of a network: a NaN or an infinity that both have is no error."""
    return _compare(actual, expected, lambda values: ~np.isfinite(values))


def _compare(
    actual: npt.NDArray[Any] | None,
    expected: npt.NDArray[Any],
    must_be_equal: Callable[[npt.NDArray[Any]], npt.NDArray[np.bool_]],
) -> Deviation:
    """How far values are from others, of which some must be equal: there no difference says how far."""
    if actual is None or actual.shape != expected.shape:
        return _INFINITE
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    exact = must_be_equal(expected)
    if not np.array_equal(actual[exact], expected[exact], equal_nan=True):
        return _INFINITE
    return _difference(actual[~exact], expected[~exact])


def _difference(actual: npt.NDArray[Any], expected: npt.NDArray[Any]) -> Deviation:
    if expected.size == 0:
        return Deviation(0.0, 0.0)
    errors = np.abs(actual - expected)
    if not np.isfinite(errors).all():
        return _INFINITE
    scale = float(np.max(np.abs(expected)))
    max_abs = float(errors.max())
    return Deviation(max_abs, max_abs / max(scale, _SMALLEST_SCALE))
