"""From what a user gave to checked options: the command line, a configuration file, groups, and names that are gone."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from ansor_mlflow.errors import UserInputError
from ansor_mlflow.foreign import read_yaml
from ansor_mlflow.parameters.declaring import Options, declared, default_text, grouped
from ansor_mlflow.parameters.gone import PARAMETERS, why_gone

_HALF = re.compile("[\ud800-\udfff]")
"""Halves of characters, which stand for bytes that are not UTF-8."""
OptionsT = TypeVar("OptionsT", bound=Options)


def load_options(cls: type[OptionsT], given: Mapping[str, Any], config: str | None = None) -> OptionsT:
    """Checks what the user gave and fills in defaults.

    A value that is empty or equal to the parameter's default counts as not given (MLflow passes every parameter of an
    entry point, given or not), so that the configuration file decides it.
    """
    values = _read_config(cls, config) if config else {}
    for name, value in _by_name(cls, given, "parameters").items():
        if value not in (None, "", ()) and not (name in values and value == default_text(cls, name)):
            values[name] = value
    for name, value in values.items():
        if why := why_gone(name, value):
            raise UserInputError(f"{name}={value!r}: {why}")
        for text in value if isinstance(value, list | tuple) else [value]:
            if isinstance(text, str) and ("\0" in text or (not text.isascii() and _HALF.search(text))):
                raise UserInputError(f"{name}={text!r}: it has characters that UTF-8 lacks, or NUL; leave them out")
    try:
        return cls(**values)
    except ValidationError as err:
        name = str(err.errors()[0]["loc"][0])
        raise UserInputError(f"{name}={values.get(name, '')!r}: it must be {declared(cls, name)['rule']}") from err


def read_settings(cls: type[Options], text: str) -> dict[str, str]:
    """Reads `--set`: "measure.number=5,search.threads=1" is {"number": "5", "search_threads": "1"}."""
    by_key = grouped(cls)
    settings = {}
    for part in re.split(r",(?=[a-z_]+\.[a-z_]+=)", text) if text else []:
        key, is_given, value = part.partition("=")
        if not is_given:
            raise UserInputError(f"set={part!r}: it must be GROUP.KEY=VALUE, such as measure.repeat=3")
        _check_names([key.strip()], by_key, "set")
        settings[by_key[key.strip()]] = value
    return settings


def _read_config(cls: type[Options], config: str) -> dict[str, Any]:
    try:
        values = read_yaml(Path(config).read_bytes())
    except OSError as err:
        raise UserInputError(f"config={config}: the file cannot be read ({err.strerror}); give a YAML file") from err
    except ValueError as err:
        raise UserInputError(f"config={config}: the file is not valid YAML ({err}); correct it") from err
    if not isinstance(values, dict):
        raise UserInputError(f"config={config}: expected a mapping of parameters to values, such as `trials: 640`")
    return _by_name(cls, values, f"config={config}")


def _by_name(cls: type[Options], given: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The values with those of groups under their own names, of which all are known."""
    by_group = grouped(cls)
    groups = {under.split(".")[0] for under in by_group}
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name in groups and isinstance(value, Mapping):
            keys = {f"{name}.{key}": item for key, item in value.items()}
            _check_names(keys, [key for key in by_group if key.startswith(f"{name}.")], source)
            values.update({by_group[key]: item for key, item in keys.items()})
        elif name not in PARAMETERS or name in cls.model_fields:
            _check_names([name], cls.model_fields, source)
            values[name] = value
        elif value:
            raise UserInputError(f"{name} is gone: {PARAMETERS[name]}")
    return values


def _check_names(given: Iterable[str], known: Iterable[str], source: str) -> None:
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"perhaps you meant {near[0]}" if near else f"known are {', '.join(known)}"
            raise UserInputError(f"{source}: unknown key {name!r}; {hint}")
