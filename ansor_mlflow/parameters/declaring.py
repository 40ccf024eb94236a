"""Types of parameters: how a text becomes a value, and what is no value."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from ansor_mlflow.foreign import plain_value, read_json

MAX_PARAM_LENGTH = 6000
"""Characters of a param that MLflow keeps."""
_ALIAS = re.compile(r"(?!(v?\d+|latest)$)[A-Za-z0-9_-]*", re.IGNORECASE)
"""What MLflow takes, without numbers, which are versions here."""
_URI = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]+):/|(models|runs):", re.IGNORECASE)
"""A scheme has two letters at least, so that no drive of Windows is one."""


def is_uri(value: str) -> bool:
    """Whether a parameter names something that MLflow has to fetch, and no name or path."""
    return _URI.match(value) is not None


def _parse_share(value: Any) -> Any:
    is_percentage = isinstance(value, str) and value.endswith("%")
    return float(value[:-1]) / 100 if is_percentage else value


def _parse_list(value: Any) -> Any:
    return tuple(item.strip() for item in value.split(",")) if isinstance(value, str) else value


def _parse_json(value: Any) -> Any:
    return read_json(value) if isinstance(value, str) else value


def _check_alias(value: str) -> str:
    if not _ALIAS.fullmatch(value):
        raise ValueError("MLflow allows no such alias")
    return value


def _check_model_name(value: str) -> str:
    if set(value) & {"/", ":"} or value == "." or value.startswith("..") or value.isspace():
        raise ValueError("MLflow allows no such name")
    return value


def _check_model(value: str) -> str:
    if not is_uri(value) and not Path(value).is_dir():
        raise ValueError("there is no such directory")
    return value


def _check_tags(value: dict[str, str]) -> dict[str, str]:
    if any(name.startswith("ansor.") for name in value):
        raise ValueError("these are ours")
    return value


def _check_length(value: dict[str, Any]) -> dict[str, Any]:
    if len(json.dumps(value)) > MAX_PARAM_LENGTH:
        raise ValueError("MLflow would cut it short")
    return value


def _plain_numbers(value: Any) -> Any:
    """Numbers, or nested lists of them, as JSON has them; an array of NumPy becomes lists."""
    value = plain_value(value.tolist() if hasattr(value, "tolist") else value)
    if isinstance(value, list | tuple):
        return [_plain_numbers(item) for item in value]
    if not isinstance(value, bool | int | float):
        raise ValueError("not a number")
    return value


Auto = Literal["auto"]
PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonEmpty = Annotated[str, Field(min_length=1)]
Share = Annotated[float, BeforeValidator(_parse_share)]
"""A number, or a percentage such as 3%."""
SizeRange = Annotated[str, Field(pattern=r"\.\.")]
"""Such as 16..512; what is wrong with another is said where it is read, beside the axis."""
Shapes = Annotated[dict[str, list[PositiveInt | list[PositiveInt] | SizeRange]], BeforeValidator(_parse_json)]
InputValues = Annotated[
    dict[str, Annotated[Any, AfterValidator(_plain_numbers)]],
    BeforeValidator(_parse_json),
    AfterValidator(_check_length),
]
NumberByName = Annotated[dict[str, float], BeforeValidator(_parse_json)]
Tags = Annotated[dict[str, str], BeforeValidator(_parse_json), AfterValidator(_check_tags)]
NonEmptyList = Annotated[tuple[NonEmpty, ...], BeforeValidator(_parse_list)]
Rivals = (
    Literal["auto", "none"]
    | Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_parse_list), Field(min_length=1)]
)
AliasName = Annotated[str, AfterValidator(_check_alias)]
ModelName = Annotated[str, AfterValidator(_check_model_name)]
ModelAddress = Annotated[str, AfterValidator(_check_model)]


def parameter(
    default: Any = PydanticUndefined,
    rule: str = "",
    *,
    help_: str = "",
    under: str = "",
    flag: str = "",
    metavar: str = "",
    is_switch: bool = False,
    **constraints: Any,
) -> Any:
    """Declares a parameter; `constraints` are pydantic's.

    What it is for, as `--help` says it, stands under `Attributes` of its class, or, for a type that several classes
    use, in `help_`. `rule` completes the sentence "NAME is …; it must be …", where the type does not say enough. With
    `under`, a group and key such as "measure.number", it is one for experts, which `--help` and `MLproject` leave out.
    `metavar` is what it is called where it is given without a flag.
    """
    extra: dict[str, Any] = {"rule": rule, "under": under, "flag": flag, "metavar": metavar, "is_switch": is_switch}
    return Field(default=default, description=help_, json_schema_extra=extra, **constraints)


class Options(BaseModel):
    """Base of the option classes: frozen, and strict about names."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Takes what parameters are for from the docstring, so that each is described once."""
        attributes = inspect.cleandoc(cls.__doc__ or "").partition("\nAttributes:\n")[2]
        for name, text in re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", attributes, re.MULTILINE):
            cls.model_fields[name].description = " ".join(text.split())

    def changed(self) -> dict[str, str]:
        """The parameters that differ from their defaults, as text for a command line."""
        fields = type(self).model_fields
        return {
            name: as_text(value) for name, value in self if value != fields[name].get_default(call_default_factory=True)
        }


def declared(cls: type[Options], name: str) -> dict[str, Any]:
    """What `parameter` was given, with the rule of the type where it was given none."""
    field = cls.model_fields[name]
    given: dict[str, Any] = dict(field.json_schema_extra) if isinstance(field.json_schema_extra, dict) else {}
    extra: dict[str, Any] = {"rule": "", "under": "", "flag": "", "metavar": "", "is_switch": False, **given}
    return {**extra, "rule": extra["rule"] or _rule_of_type(field)}


def listed(cls: type[Options]) -> list[str]:
    """The parameters that `--help` and `MLproject` list: all that stand under no group."""
    return [name for name in cls.model_fields if not declared(cls, name)["under"]]


def grouped(cls: type[Options]) -> dict[str, str]:
    """The parameters for experts by group and key: {"measure.number": "number", …}."""
    return {under: name for name in cls.model_fields if (under := declared(cls, name)["under"])}


def _rule_of_type(field: FieldInfo) -> str:
    """What a value must be, of a type with closed choices, of a number with a lower bound, or of a text."""
    kinds = get_args(field.annotation) if get_origin(field.annotation) in (Union, UnionType) else [field.annotation]
    words = [str(word) for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    words = ["true", "false"] if field.annotation is bool else words
    choices = " or ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))
    numbers = (get_args(kind) for kind in kinds if get_origin(kind) is Annotated)
    base, bounds = next(((base, info.metadata) for base, info in numbers), (field.annotation, field.metadata))
    if base not in (int, float):
        return choices or "a text"
    least = next(bound.ge if hasattr(bound, "ge") else bound.gt + 1 for bound in bounds)
    number = "a positive number" if base is float else f"a whole number of at least {least}"
    return number + (f", or {choices}" if choices else "")


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
