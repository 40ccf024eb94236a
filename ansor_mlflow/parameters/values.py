"""Types of parameters: how a text becomes a value, and what is no value."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from ansor_mlflow.foreign import plain_value, read_json
from ansor_mlflow.settings import Rival

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


def _parse_rivals(value: Any) -> Any:
    return value if value in ("auto", "none") else _parse_list(value)


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
Share = Annotated[float, BeforeValidator(_parse_share)]
"""A number, or a percentage such as 3%."""
Dimension = Annotated[int, Field(gt=0)]
Shape = list[Dimension | list[Dimension]]
Shapes = Annotated[dict[str, Shape], BeforeValidator(_parse_json)]
InputValue = Annotated[Any, AfterValidator(_plain_numbers)]
InputValues = Annotated[dict[str, InputValue], BeforeValidator(_parse_json), AfterValidator(_check_length)]
NumberByName = Annotated[dict[str, float], BeforeValidator(_parse_json)]
NonEmptyList = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_parse_list)]
Rivals = Annotated[
    Literal["auto", "none"] | Annotated[tuple[Rival, ...], Field(min_length=1)], BeforeValidator(_parse_rivals)
]
AliasName = Annotated[str, AfterValidator(_check_alias)]
ModelName = Annotated[str, AfterValidator(_check_model_name)]
ModelAddress = Annotated[str, AfterValidator(_check_model)]
