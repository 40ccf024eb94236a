"""Reads JSON and YAML that others wrote: of bounded size and depth, with finite numbers, and with one kind of error."""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")
_MAX_BYTES = 2**28
_MAX_DEPTH = 64
"""Half of what Python's stack carries where each level takes a few calls, and far more than anybody writes."""
_MAX_VALUES = 10**7
_MAX_BITS = 64  # largest size of an integer: NumPy and TVM have no larger one
_TOO_DEEP = f"it is nested deeper than {_MAX_DEPTH}"


def read_json(text: str | bytes) -> Any:
    """The value of a JSON document; as for all functions here, what is wrong with it is a ValueError."""
    import pydantic_core  # its parser does not recurse, and keeps no more than what a document says

    _check_size(text)
    try:
        encoded = text.encode() if isinstance(text, str) else text
        return plain_value(pydantic_core.from_json(encoded, allow_inf_nan=False))
    except UnicodeEncodeError as err:
        raise ValueError("a character is only half there") from err


def read_yaml(text: bytes) -> Any:
    """The value of a YAML document. It may have infinite numbers, as YAML has."""
    import yaml

    _check_size(text)
    try:
        loaded = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 - both are safe
    except RecursionError as err:
        raise ValueError(_TOO_DEEP) from err
    except (yaml.YAMLError, TypeError, AttributeError, LookupError, OverflowError) as err:  # PyYAML checks little
        raise ValueError(" ".join(str(err).split())) from err
    return plain_value(loaded, is_finite=False)


def typed(kind: type[T], fields: Any) -> T:
    """A dataclass, with those below it, from plain values. Each must be of the type that its field says, or be what
    Pydantic converts to it without loss: "2" and 2.0 to a whole number, 1 to True, a text to what it is the value of.
    """
    from pydantic import ValidationError

    try:
        made: T = _adapter(cast(Any, kind)).validate_python(fields)
    except ValidationError as err:
        first = err.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"{place[:200]}: {first['msg']}") from err
    return made


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def plain_value(value: Any, *, is_finite: bool = True) -> Any:
    """A value of lists, dictionaries, texts and numbers, once it is known to be within bounds."""
    num_values, level = 1, [value]
    for _ in range(_MAX_DEPTH):
        below: list[Any] = []
        for item in level:
            if isinstance(item, str):
                if not item.isascii():
                    item.encode()  # half of a pair of surrogates: UnicodeEncodeError is a kind of ValueError
            elif isinstance(item, list | dict | tuple | set):
                num_values += len(item)
                if num_values > _MAX_VALUES:  # before there is a list of them: a few lines of YAML stand for millions
                    raise ValueError(f"it has more than {_MAX_VALUES} values")
                below += item
                if isinstance(item, dict):
                    below += item.values()
            elif isinstance(item, float) and is_finite and not math.isfinite(item):
                raise ValueError(f"{item} is no finite number")
            elif isinstance(item, int) and item.bit_length() > _MAX_BITS:
                raise ValueError(f"a whole number has more than {_MAX_BITS} bits")
        if not below:
            return value
        level = below
    raise ValueError(_TOO_DEEP)


def _check_size(text: str | bytes) -> None:
    if len(text) > _MAX_BYTES:
        raise ValueError(f"it is larger than {_MAX_BYTES >> 20} MiB")
