"""Arithmetic of sizes, as files write it; an expression can do nothing else.

A program of PyTorch with dynamic dimensions writes its sizes as expressions of symbols in SymPy's notation, such as
`Mul(Integer(2), Symbol('s0', positive=True, integer=True))`, and the conditions that it holds under in Python's, such
as `L['x'].size()[1] % 2 == 0`; ONNX files have sizes such as `past_length + 1`. PyTorch gives its own to `eval`. Here
they are parsed, and computed by these functions and operators alone.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

_MAX_LENGTH = 10_000
_MAX_EXPONENT = 64
_MAX_BASE = 2**63


def _power(base: Any, exponent: Any) -> Any:
    if abs(exponent) > _MAX_EXPONENT or abs(base) > _MAX_BASE:
        raise ValueError("a power that is too large for a size")
    return Fraction(base) ** exponent if exponent < 0 else base**exponent


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Integer": int,
    "Rational": Fraction,
    "Add": lambda *terms: sum(terms),
    "Mul": lambda *factors: math.prod(factors),
    "Pow": _power,
    "PowByNatural": _power,
    "FloatPow": _power,
    "Max": max,
    "max": max,
    "Min": min,
    "min": min,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "CeilDiv": lambda a, b: -(-a // b),
    "IntTrueDiv": operator.truediv,
    "FloatTrueDiv": operator.truediv,
    "ModularIndexing": lambda value, divisor, modulus: value // divisor % modulus,
    "Identity": lambda value: value,
    "ToFloat": float,
    "TruncToInt": math.trunc,
    "FloorToInt": math.floor,
    "CeilToInt": math.ceil,
    "RoundToInt": round,
    "Where": lambda condition, a, b: a if condition else b,
    "Equality": operator.eq,
    "Unequality": operator.ne,
    "LessThan": operator.le,
    "StrictLessThan": operator.lt,
    "GreaterThan": operator.ge,
    "StrictGreaterThan": operator.gt,
    "And": lambda *values: all(values),
    "Or": lambda *values: any(values),
    "Not": operator.not_,
}
"""Functions of `torch/utils/_sympy/functions.py` and of SymPy that sizes are made of."""

_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
    ast.USub: operator.neg,
    ast.Not: operator.not_,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_CONSTANTS = {"true": True, "false": False, "True": True, "False": False}


@dataclass(frozen=True)
class Sizes:
    """What expressions are made of."""

    symbols: Mapping[str, int]
    shapes: Mapping[str, Sequence[int]]
    """Shapes of the inputs, by the names that conditions call them."""

    def evaluate(self, expression: str) -> bool | int | float:
        """The value of an expression.

        Raises:
            ValueError: It is not made of known symbols, inputs, functions and operators, or has no value.
        """
        if len(expression) > _MAX_LENGTH:
            raise ValueError("an expression of more than 10,000 characters")
        try:
            value = self._evaluate(ast.parse(expression.strip(), mode="eval").body)
        except (ArithmeticError, LookupError, MemoryError, RecursionError, SyntaxError, TypeError) as err:
            raise ValueError(f"{type(err).__name__}: {err}") from err
        if isinstance(value, Fraction):
            return value.numerator if value.denominator == 1 else float(value)
        if not isinstance(value, bool | int | float):
            raise TypeError
        return value

    def _evaluate(self, node: ast.expr) -> Any:  # noqa: PLR0911 (one line for each kind)
        match node:
            case ast.Constant(value=bool() | int() | float() as value):
                return value
            case ast.Name(id=name) if name in _CONSTANTS:
                return _CONSTANTS[name]
            case ast.Name(id=name) if name in self.symbols:
                return self.symbols[name]
            case ast.Call(func=ast.Name(id="Symbol"), args=[ast.Constant(value=str(name))]):
                if name not in self.symbols:
                    raise ValueError(f"{name} is not a dimension of an input")
                return self.symbols[name]
            case ast.Call(func=ast.Name(id="Float"), args=[ast.Constant(value=str(digits))]):
                return float(digits)
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
                return _FUNCTIONS[name](*map(self._evaluate, args))
            case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](self._evaluate(operand))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](self._evaluate(left), self._evaluate(right))
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](self._evaluate(left), self._evaluate(right))
            case ast.BoolOp(op=op, values=values):
                return (all if isinstance(op, ast.And) else any)(map(self._evaluate, values))
            case ast.Subscript(
                value=ast.Call(
                    func=ast.Attribute(
                        value=ast.Subscript(value=ast.Name(id="L"), slice=ast.Constant(value=str(name))), attr="size"
                    ),
                    args=[],
                ),
                slice=ast.Constant(value=int(axis)),
            ):
                return self.shapes[name][axis]
        raise ValueError(f"{ast.unparse(node)[:100]} is not arithmetic")
