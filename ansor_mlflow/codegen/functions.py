"""Functions as arithmetic that vectorises: exp, log, tanh, erf, sigmoid, and powers by some constants.

TVM leaves these to LLVM, which calls the C library once for each element, be the loop vectorised or not. Here the call
is replaced while intrinsics are lowered, after scheduling and vectorising, by additions, multiplications, selections
and shifts of the same width. So tasks, their hashes and their operations stay what they were.

Relative errors of float32 results against the exact ones are at most 1e-7 for exp and log, 2e-7 for sigmoid and
powers, and 5e-7 for tanh and erf, for all inputs; where the exact result is less than the smallest normal number,
2^-126, the error is at most 2^-149, and for sigmoid 2^-126. exp is zero there: an Intel CPU takes 150 cycles for each
subnormal number that it multiplies, and a masked attention is full of e^-100.

Infinities, NaN and signed zeros give what IEEE 754 gives, exp overflows to infinity, and neither tanh nor erf exceeds
one. 16-bit floats are computed in float32 and rounded once; float64 stays with the C library.

The reductions of the argument are those of W. J. Cody and W. Waite, "Software manual for the elementary functions"
(1980). A float is rounded to an integer by the addition of 1.5 * 2^23, whose last bits then hold it, as in N. N.
Schraudolph, "A fast, compact approximation of the exponential function", Neural Computation 11 (1999). tanh and erf as
one odd rational function that is clamped where it reaches one are as in Eigen's and XLA's kernels. The coefficients are
our own: least maximal relative error by weighted least squares (C. L. Lawson, 1961), linearised for the rational ones
(C. K. Sanathanan and J. Koerner, 1963).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tvm import tirx
from tvm.ir import register_op_attr
from tvm.tirx import register_intrin_lowering

RULES_FOR = "tirx.enable_fast_math"
"""Option of TVM's passes with which the rules below are asked; without it they change nothing."""

_LOG2_E = 1.44269504088896341
_LN_2_HIGH = 0.693359375
"""355/512: a product with the exponent of a float32 is exact."""
_LN_2_LOW = -2.12194440054690583e-4
_ROUND = 12582912.0
_MANTISSA_BITS = 23
_EXP_RANGE = (-87.336544, 89.0)
"""Where exp becomes subnormal, and rounds to infinity."""
_EXP = (0.49999994039535522, 0.16666515171527863, 0.041668456047773361, 0.0083694187924265862, 0.0013813144760206342)
"""(e^r - 1 - r) / r^2 for |r| <= log(2) / 2; relative error of e^r 5e-9."""
_LOG = (
    *(0.33333331346511841, -0.25000837445259094, 0.20001213252544403, -0.16622704267501831),
    *(0.14201542735099792, -0.1316680759191513, 0.12766516208648682, -0.0762229859828949),
)
"""(log(1 + f) - f + f^2 / 2) / f^3 for sqrt(1/2) <= 1 + f <= sqrt(2); relative error of log 8e-9."""
_TANH = (
    (1.0, 0.133792147, 0.00349343638, 2.05736287e-05, 1.33053852e-08),
    (1.0, 0.467125297, 0.0258687977, 0.000328211434, 7.75642604e-07),
)
"""tanh(x) / x over x^2, up to where tanh rounds to one; relative error 2e-8."""
_TANH_SQUARED_END = 81.5
_ERF = (
    (1.12837911, 0.190567553, 0.0527664348, 0.00377158448, 0.000284849899, 2.04660569e-06),
    (1.0, 0.502218843, 0.114172436, 0.0149812503, 0.00116367533, 3.80540732e-05),
)
"""erf(x) / x over x^2, up to where erf rounds to one; relative error 2e-8."""
_ERF_SQUARED_END = 15.4


class _Bindings:
    """Values that an expression has several times."""

    def __init__(self) -> None:
        self._bound: list[tuple[tirx.Var, tirx.Expr]] = []

    def let(self, value: tirx.Expr) -> tirx.Var:
        variable = tirx.Var("v", value.ty)
        self._bound.append((variable, value))
        return variable

    def within(self, body: tirx.Expr) -> tirx.Expr:
        """An expression with what its variables stand for."""
        for variable, value in reversed(self._bound):
            body = tirx.Let(variable, value, body)
        return body


_Function = Callable[[tirx.Var, _Bindings], tirx.Expr]
"""Computes float32 elements, in vectors of any length."""


def _exp(x: tirx.Var, bindings: _Bindings) -> tirx.Expr:
    """2^n e^r with n = round(x / log(2)); 2^n in two factors, for it may be beyond the exponents of a float32."""
    low, high = _EXP_RANGE
    given = x
    x = bindings.let(_select(x < low, low, x))
    x = bindings.let(_select(x > high, high, x))
    shifted = bindings.let(x * _LOG2_E + _ROUND)
    n = bindings.let(shifted - _ROUND)
    r = bindings.let(x - n * _LN_2_HIGH - n * _LN_2_LOW)
    power = bindings.let(_bits(shifted) - _pattern(_ROUND))
    half = bindings.let(power >> 1)
    result = (r * r * _polynomial(_EXP, r) + r + 1.0) * _two_to(half) * _two_to(power - half)
    return _select(given < low, 0.0, result)


def _log(x: tirx.Var, bindings: _Bindings) -> tirx.Expr:
    """The sum of k log(2) and log(1 + f) with x = 2^k (1 + f); subnormal numbers are scaled first."""
    is_tiny = x < float(np.finfo(np.float32).smallest_normal)
    bits = bindings.let(_bits(_select(is_tiny, x * 2.0**_MANTISSA_BITS, x)))
    power = bindings.let((bits - _pattern(np.sqrt(0.5))) >> _MANTISSA_BITS)
    f = bindings.let(_float(bits - (power << _MANTISSA_BITS)) - 1.0)
    k = bindings.let(power.astype(x.ty.dtype) - _select(is_tiny, float(_MANTISSA_BITS), tirx.const(0.0, x.ty)))
    square = bindings.let(f * f)
    small = square * f * _polynomial(_LOG, f) - square * 0.5 + k * _LN_2_LOW
    result = _select(x < float("inf"), small + f + k * _LN_2_HIGH, x)
    result = _select(x.equal(0.0), float("-inf"), result)
    return _select(x < 0.0, float("nan"), result)


def _odd_rational(
    x: tirx.Var, bindings: _Bindings, coefficients: tuple[Sequence[float], Sequence[float]], end: float
) -> tirx.Expr:
    """The quotient x P(x^2) / Q(x^2) within [-1, 1]; beyond the end of x^2 it grows with x, and is one."""
    square = bindings.let(x * x)
    square = bindings.let(_select(square > end, end, square))
    numerator, denominator = (_polynomial(each, square) for each in coefficients)
    ratio = bindings.let(x * numerator / denominator)
    ratio = bindings.let(_select(ratio > 1.0, 1.0, ratio))
    return _select(ratio < -1.0, -1.0, ratio)


def _select(condition: tirx.Expr, chosen: float | tirx.Expr, otherwise: tirx.Expr) -> tirx.Expr:
    """A choice for each element. A comparison with NaN is false, so `otherwise` is what NaN gives."""
    return tirx.Select(condition, tirx.const(chosen, otherwise.ty) if isinstance(chosen, float) else chosen, otherwise)


def _polynomial(coefficients: Sequence[float], x: tirx.Var) -> tirx.Expr:
    """Evaluates a polynomial by Horner's rule; its coefficients begin with the constant term."""
    *others, value = coefficients
    for coefficient in reversed(others):
        value = x * value + coefficient
    return value


def _bits(value: tirx.Expr) -> tirx.Expr:
    return tirx.reinterpret(str(value.ty.dtype).replace("float", "int"), value)


def _float(bits: tirx.Expr) -> tirx.Expr:
    return tirx.reinterpret(str(bits.ty.dtype).replace("int", "float"), bits)


def _pattern(value: float) -> int:
    """The bits of a float32."""
    return int(np.float32(value).view(np.int32))


def _two_to(power: tirx.Expr) -> tirx.Expr:
    """2^n for the exponents of normal numbers."""
    return _float((power << _MANTISSA_BITS) + _pattern(1.0))


def _lower(call: tirx.Expr, function: _Function) -> tirx.Expr:
    """A rule of TVM: another expression for a call, or the call as it is."""
    dtype = str(call.ty.dtype)
    kind = dtype.partition("x")[0]
    if kind not in ("float16", "float32") or "vscale" in dtype:
        return call
    bindings = _Bindings()
    x = bindings.let(call.args[0].astype(dtype.replace(kind, "float32")))
    return bindings.within(function(x, bindings)).astype(dtype)


def _lower_power(call: tirx.Expr) -> tirx.Expr:
    """Does what `_lower` does, for a power with one of the exponents in `_POWERS`."""
    function = _POWERS.get(_exponent(call))
    return call if function is None else _lower(call, function)


def power_as_products(call: tirx.Expr) -> tirx.Expr:
    """Products for a power with a whole exponent among `_POWERS`; another call as it is."""
    is_one = getattr(call.op, "name", "") == "tirx.pow" and _exponent(call) in (2, 3)
    return _lower_power(call) if is_one else call


def _exponent(call: tirx.Expr) -> Any:
    """The constant that a power has as its exponent, or all of a vector have; another value where there is none."""
    exponent: Any = getattr(call.args[1], "value", None)
    return getattr(exponent, "value", exponent)


def _three_quarters(x: tirx.Var, bindings: _Bindings) -> tirx.Expr:
    root = bindings.let(tirx.sqrt(x))
    return _select(x.equal(float("-inf")), float("inf"), root * tirx.sqrt(root))


def _half(x: tirx.Var, _bindings: _Bindings) -> tirx.Expr:
    root = _select(x.equal(0.0), 0.0, tirx.sqrt(x))  # that of -0.0 is -0.0, its power is not
    return _select(x.equal(float("-inf")), float("inf"), root)


def erf_as_arithmetic(call: tirx.Expr) -> tirx.Expr:
    """What is computed for a call of erf, which TVM, unlike the others, does not vectorise; another call as it is."""
    return _lower(call, _FUNCTIONS["erf"]) if getattr(call.op, "name", "") == "tirx.erf" else call


_FUNCTIONS: dict[str, _Function] = {
    "erf": lambda x, bindings: _odd_rational(x, bindings, _ERF, _ERF_SQUARED_END),
    "exp": _exp,
    "log": _log,
    "sigmoid": lambda x, bindings: 1.0 / (_exp(bindings.let(0.0 - x), bindings) + 1.0),
    "tanh": lambda x, bindings: _odd_rational(x, bindings, _TANH, _TANH_SQUARED_END),
}
_POWERS: dict[float, _Function] = {
    0.5: _half,
    0.75: _three_quarters,
    2: lambda x, _bindings: x * x,
    3: lambda x, _bindings: x * x * x,
}
"""Constant exponents: normalisations have squares and roots, of responses 3/4, and GELU has a cube."""
for _name, _function in _FUNCTIONS.items():
    register_intrin_lowering(f"tirx.{_name}", target="llvm.fastmath", f=functools.partial(_lower, function=_function))
register_intrin_lowering("tirx.pow", target="llvm.fastmath", f=_lower_power)
# TVM does not vectorise a loop with this function, though LLVM has an instruction for it.
register_op_attr("tirx.nearbyint", "TVectorizable", True)
