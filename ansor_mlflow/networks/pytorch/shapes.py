"""Computes the sizes of an exported program's tensors from those of its inputs.

A program with dynamic dimensions writes its sizes as expressions of symbols in SymPy's notation, such as
`Mul(Integer(2), Symbol('s0', positive=True, integer=True))`, and the conditions that it holds under in Python's, such
as `L['x'].size()[1] % 2 == 0`. PyTorch gives both to `eval`. Here they are parsed, and computed by these functions and
operators alone, so that an expression can do nothing but arithmetic.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from ansor_mlflow.networks.shapes import DeclaredShape, resolve_shapes

Json = dict[str, Any]

_SYMBOL = re.compile(r"Symbol\('(\w+)'[^)]*\)")
_MAX_LENGTH = 10_000
_MAX_EXPONENT = 64


def _power(base: Any, exponent: Any) -> Any:
    if abs(exponent) > _MAX_EXPONENT:
        raise ValueError(f"exponent {exponent}")
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


class UnusableProgramError(Exception):
    """Says why a program cannot be used, and what to do."""


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


def fix_sizes(exported: Json, inputs: Sequence[str], network: str, given: Mapping[str, Sequence[int]]) -> Sizes:
    """Binds the symbols of a program to the shapes of its inputs, and checks what it requires of them.

    Args:
        exported: The JSON of the program.
        inputs: Names of its inputs.
        network: What messages call it.
        given: Shapes that dynamic dimensions get.

    Raises:
        UnusableProgramError: The program is not made for these shapes.
        UserInputError: A shape does not fit its input, or an input is still dynamic.
    """
    values = exported["graph_module"]["graph"]["tensor_values"]
    declared = {name: [_dimension(size) for size in values[name]["sizes"]] for name in inputs}
    shown: dict[str, DeclaredShape | None] = {
        name: tuple(short(size) if isinstance(size, str) else size for size in shape)
        for name, shape in declared.items()
    }
    shapes = resolve_shapes(network, shown, given)
    symbols: dict[str, int] = {}
    for name, shape in declared.items():
        for size, actual in zip(shape, shapes[name], strict=True):
            if isinstance(size, str) and (symbol := _SYMBOL.fullmatch(size)):
                symbols.setdefault(symbol[1], actual)
    sizes = Sizes(symbols, _by_argument(exported, shapes))
    _require_declared(sizes, declared, shapes)
    _require_ranges(exported["range_constraints"], symbols)
    _require_conditions(sizes, exported.get("guards_code", []))
    return sizes


def _dimension(size: Json) -> int | str:
    return int(size["as_int"]) if "as_int" in size else str(size["as_expr"]["expr_str"])


def short(expression: str) -> str:
    """An expression for a message."""
    return _SYMBOL.sub(r"\1", expression)[:100]


def _by_argument(exported: Json, shapes: Mapping[str, Sequence[int]]) -> dict[str, Sequence[int]]:
    """Shapes by the names of the arguments of `forward`, which conditions use."""
    (signature,) = (entry["signature"] for entry in exported["graph_module"]["module_call_graph"] if not entry["fqn"])
    names = signature.get("forward_arg_names") or []
    renamed = dict(zip(names, shapes.values(), strict=True)) if len(names) == len(shapes) else {}
    return {**shapes, **renamed}


def _require_declared(
    sizes: Sizes, declared: Mapping[str, Sequence[int | str]], shapes: Mapping[str, Sequence[int]]
) -> None:
    for name, shape in declared.items():
        for axis, (size, actual) in enumerate(zip(shape, shapes[name], strict=True)):
            try:
                expected = sizes.evaluate(size) if isinstance(size, str) else size
            except ValueError as err:
                raise UnusableProgramError(
                    f"dimension {axis} of its input {name!r} is {short(str(size))}, but no dimension is that symbol "
                    "alone; export it with dimensions of their own"
                ) from err
            if expected != actual:
                raise UnusableProgramError(
                    f"dimension {axis} of its input {name!r} must be {expected} and not {actual}; give that in "
                    "input_shapes, or export it with dynamic_shapes"
                )


def _require_ranges(ranges: Mapping[str, Json], symbols: Mapping[str, int]) -> None:
    for symbol, size in symbols.items():
        low, high = (ranges.get(symbol, {}).get(bound) for bound in ("min_val", "max_val"))
        # PyTorch, too, takes 0 and 1 where the least is 2: that only says that the graph is not made for one of them.
        if (low is not None and low > 2 and size < low) or (high is not None and size > high):
            raise UnusableProgramError(
                f"its size {symbol} is {size}, but it was exported for {low or 0} to {high or 'any'}; give "
                "input_shapes within, or export it with other dynamic_shapes"
            )


def _require_conditions(sizes: Sizes, conditions: Sequence[str]) -> None:
    for condition in conditions:
        try:
            holds = sizes.evaluate(condition)
        except ValueError as err:
            raise UnusableProgramError(
                f"whether the shapes fit its condition {condition[:100]} cannot be said ({err}); export it with fixed "
                "shapes"
            ) from err
        if not holds:
            raise UnusableProgramError(
                f"the shapes break its condition {condition[:100]}; give other input_shapes, or export it with these"
            )
