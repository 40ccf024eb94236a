"""Computes the sizes of an exported program's tensors from those of its inputs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ansor_mlflow.networks.inputs.expressions import Sizes
from ansor_mlflow.networks.shapes import DeclaredShape, resolve_shapes

Json = dict[str, Any]

_INTEGERS = (1, 2, 3, 4, 5, 12)
"""Integers and booleans among the dtypes, `ScalarType` of torch/_export/serde/schema.py."""
_MAX_IMPLIED = 4096
_SYMBOL = re.compile(r"Symbol\('(\w+)'[^)]*\)")


class UnusableProgramError(Exception):
    """Says why a program cannot be used, and what to do."""


def fix_sizes(
    exported: Json, inputs: Sequence[str], network: str, given: Mapping[str, Sequence[int]], batch_size: int = 1
) -> Sizes:
    """Binds the symbols of a program to the shapes of its inputs, and checks what it requires of them.

    Args:
        exported: The JSON of the program.
        inputs: Names of its inputs.
        network: What messages call it.
        given: Shapes that dynamic dimensions get.
        batch_size: Size of a dynamic batch.

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
    integers = frozenset(name for name in inputs if values[name]["dtype"] in _INTEGERS)
    trial = _ProgramTrial(exported, declared, integers)
    shapes = resolve_shapes(network, shown, given, batch_size=batch_size, trial=lambda: trial)
    return _checked_sizes(exported, declared, shapes)


@dataclass(frozen=True)
class _ProgramTrial:
    """A `ShapeTrial` of a program, which says itself what it is made for."""

    exported: Json
    declared: Mapping[str, Sequence[int | str]]
    integers: frozenset[str]

    @property
    def implied(self) -> Sequence[int]:
        """See `ShapeTrial`: the bounds of its sizes."""
        ranges = self.exported["range_constraints"].values()
        bounds = (constraint.get(bound) for bound in ("max_val", "min_val") for constraint in ranges)
        return [bound for bound in bounds if isinstance(bound, int) and 1 < bound <= _MAX_IMPLIED]

    def infers(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """See `ShapeTrial`."""
        try:
            _checked_sizes(self.exported, self.declared, shapes)
        except UnusableProgramError:
            return False
        return True

    def runs(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """See `ShapeTrial`: its conditions leave nothing that could fail."""
        return self.infers(shapes)


def _checked_sizes(
    exported: Json, declared: Mapping[str, Sequence[int | str]], shapes: Mapping[str, Sequence[int]]
) -> Sizes:
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
