"""Values that ONNX's own cases lack."""

from __future__ import annotations

import numpy as np

_FLOATS = ("own", "nan", "infinity", "zeros", "halves", "large mean", "largest")
_INTEGERS = ("own", "extremes")


def classes(array: np.ndarray) -> tuple[str, ...]:
    """The classes of values that tensors of that dtype are tried with."""
    if is_float(array):
        return _FLOATS
    return _INTEGERS if array.dtype.kind in "iu" else ("own",)


def is_float(array: np.ndarray) -> bool:
    """Whether an array holds floating point numbers, bfloat16 among them."""
    return array.dtype.kind == "f" or array.dtype.name == "bfloat16"


def of_class(array: np.ndarray, kind: str, rng: np.random.Generator) -> np.ndarray:  # noqa: PLR0911 - one for each
    """An array of the class, in the shape and dtype of the given one; NaN and the like are in a part of it."""
    if kind == "own":
        return array
    some = rng.random(array.shape) < 0.2
    if array.size:
        some.flat[rng.integers(array.size)] = True
    sign = np.where(rng.random(array.shape) < 0.5, 1.0, -1.0)
    match kind:
        case "nan":
            return np.where(some, array.dtype.type(np.nan), array).astype(array.dtype)
        case "infinity":
            return np.where(some, (sign * np.inf).astype(array.dtype), array).astype(array.dtype)
        case "zeros":
            values = np.where(rng.random(array.shape) < 0.7, 0.0, array.astype(np.float64))
            return np.copysign(values, sign).astype(array.dtype)
        case "halves":
            return (rng.integers(-5, 5, array.shape) + 0.5).astype(array.dtype)
        case "large mean":
            return (array.astype(np.float64) + (1e3)).astype(array.dtype)
        case "largest":
            largest = 65504.0 if array.dtype.name == "float16" else 1.7e38 if array.dtype.itemsize < 8 else 1e308
            return np.where(some, (sign * largest).astype(array.dtype), array).astype(array.dtype)
        case "extremes":
            limits = np.iinfo(array.dtype)
            return np.where(some, np.where(sign > 0, limits.max, limits.min).astype(array.dtype), array)
    return array


def difference(actual: np.ndarray, expected: np.ndarray, kind: str) -> str:  # noqa: PLR0911 - one for each
    """In what an output is not what it should be; empty where it is."""
    if actual.dtype != expected.dtype:
        return f"{actual.dtype} instead of {expected.dtype}"
    if actual.shape != expected.shape:
        return f"{list(actual.shape)} instead of {list(expected.shape)}"
    if not is_float(expected):
        return "" if np.array_equal(actual, expected) else _first(actual, expected, actual != expected)
    got, wanted = actual.astype(np.float64), expected.astype(np.float64)
    if (wrong := np.isnan(got) != np.isnan(wanted)).any():
        return "NaN: " + _first(actual, expected, wrong)
    if (wrong := (np.isinf(got) | np.isinf(wanted)) & (got != wanted)).any():
        return "infinity: " + _first(actual, expected, wrong)
    finite = np.isfinite(wanted)
    if finite.any():
        rtol = {2: 2e-2, 4: 1e-3, 8: 1e-6}[expected.dtype.itemsize]
        scale = np.sort(abs(wanted[finite]))[-1]
        limit = rtol * abs(wanted) + rtol / 10 * (scale if kind == "largest" else min(scale, 1))
        if (wrong := finite & (abs(got - wanted) > limit)).any():
            return _first(actual, expected, wrong)
    if kind == "zeros" and (wrong := (wanted == 0) & (np.signbit(got) != np.signbit(wanted))).any():
        return "sign of zero"
    return ""


def _first(actual: np.ndarray, expected: np.ndarray, wrong: np.ndarray) -> str:
    place = tuple(np.argwhere(wrong)[0])
    return f"{actual[place]} instead of {expected[place]} ({int(wrong.sum())} of {wrong.size})"
