"""How a parameter is declared: in the class of its options, or as a named type that several classes list.

    MeasureTimeout = Annotated[PositiveFloat, parameter("Seconds after which a program is given up.")]

    class MeasureOptions(Options):
        number: PositiveInt = parameter("Calls averaged in one measurement.", default=3, under="measure.number")
        measure_timeout_s: MeasureTimeout = 30.0

Flags, `MLproject`, the functions of `ansor_mlflow` and `docs/parameters.md` are made from these classes.
"""

from __future__ import annotations

import json
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined


def parameter(
    help_: str,
    rule: str = "",
    *,
    default: Any = PydanticUndefined,
    under: str = "",
    flag: str = "",
    metavar: str = "",
    is_switch: bool = False,
    **constraints: Any,
) -> Any:
    """Declares a parameter.

    Args:
        help_: What it is for, as `--help` says it.
        rule: Completes the sentence "NAME is …; it must be …"; by default what the type says.
        default: Its default; without one it must be given, or its class says the default.
        under: Group and key, such as "measure.number", of a parameter for experts. It is given as `--set
            measure.number=5` or in a mapping of a configuration file, and `--help` and `MLproject` leave it out.
        flag: Its flag, where that is not its name.
        metavar: What it is called where it is given without a flag.
        is_switch: Whether its flag has no value.
        constraints: Of pydantic.
    """
    extra: dict[str, Any] = {"rule": rule, "under": under, "flag": flag, "metavar": metavar, "is_switch": is_switch}
    return Field(default=default, description=help_, json_schema_extra=extra, **constraints)


class Options(BaseModel):
    """Base of the option classes: frozen, and strict about names."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def changed(self) -> dict[str, str]:
        """The parameters that differ from their defaults, as text for a command line."""
        fields = type(self).model_fields
        return {
            name: as_text(value) for name, value in self if value != fields[name].get_default(call_default_factory=True)
        }


def declared(cls: type[Options], name: str) -> dict[str, Any]:
    """What `parameter` was given, with the rule of the type where it was given none."""
    field = cls.model_fields[name]
    extra: dict[str, Any] = dict(field.json_schema_extra) if isinstance(field.json_schema_extra, dict) else {}
    return {**extra, "rule": extra["rule"] or _rule_of_type(field)}


def listed(cls: type[Options]) -> list[str]:
    """The parameters that `--help` and `MLproject` list: all that stand under no group."""
    return [name for name in cls.model_fields if not declared(cls, name)["under"]]


def grouped(cls: type[Options]) -> dict[str, str]:
    """The parameters for experts by group and key: {"measure.number": "number", …}."""
    return {under: name for name in cls.model_fields if (under := declared(cls, name)["under"])}


def _rule_of_type(field: FieldInfo) -> str:
    """What a value must be, of a type with closed choices, or of a whole number with a lower bound."""
    kinds = get_args(field.annotation) if get_origin(field.annotation) in (Union, UnionType) else [field.annotation]
    words = [str(word) for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    words = ["true", "false"] if field.annotation is bool else words
    choices = " or ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))
    numbers = (get_args(kind)[1].metadata for kind in kinds if get_origin(kind) is Annotated)
    bounds = next(numbers, field.metadata)
    least = next((bound.ge if hasattr(bound, "ge") else bound.gt + 1 for bound in bounds), None)
    if least is None:
        return choices
    return f"a whole number of at least {least}" + (f", or {choices}" if choices else "")


def default_text(cls: type[Options], name: str) -> str:
    """A parameter's default as it is written on the command line and in `MLproject`; empty for "not given"."""
    field = cls.model_fields[name]
    return "" if field.is_required() else as_text(field.get_default(call_default_factory=True))


def as_text(value: Any) -> str:
    """A parameter's value as it is written on the command line."""
    if value in (None, {}, ()):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, tuple):
        return ",".join(value)
    return str(value)
