"""Parameters from a command line, a configuration file or Python; what is gone; and what is made of them."""

from __future__ import annotations

import difflib
import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from ansor_mlflow.errors import UserInputError
from ansor_mlflow.foreign import read_yaml
from ansor_mlflow.parameters.declaring import Options, declared, default_text, grouped, listed

_MEMORY = "the tracking server has a team's records"
GONE_COMMANDS = {
    "pool": f"{_MEMORY}; give warm_start=auto to tune and main, and the IDs of tuning runs to records …",
    "recompile": "`ansor-mlflow compile --tune-run RUN --allow-missing` does it; RUN is the tag ansor.tune_run of the "
    "run whose model is built again",
    "runs": "`mlflow runs list --experiment-id ID` lists runs, and the view Leaderboard of the experiment sorts them",
}
"""What to use instead of a command."""
GONE_PARAMETERS = {"record_pool": f"{_MEMORY}; give warm_start=auto"}
"""What to use instead of a parameter."""
_VALUES = {
    ("build_workers", "ray"): "candidates are built on this host, and no longer on a Ray cluster; give auto, or how "
    "many are built at a time, and start whole tunings on the cluster's nodes instead"
}
"""What to use instead of a value, which is given by its parameter and its beginning."""


def why_gone(name: str, value: object) -> str:
    """Why a parameter no longer takes a value that it took once, and what to give instead; empty where it takes it."""
    return next((why for (gone, start), why in _VALUES.items() if name == gone and str(value).startswith(start)), "")


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
        elif name not in GONE_PARAMETERS or name in cls.model_fields:
            _check_names([name], cls.model_fields, source)
            values[name] = value
        elif value:
            raise UserInputError(f"{name} is gone: {GONE_PARAMETERS[name]}")
    return values


def _check_names(given: Iterable[str], known: Iterable[str], source: str) -> None:
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"perhaps you meant {near[0]}" if near else f"known are {', '.join(known)}"
            raise UserInputError(f"{source}: unknown key {name!r}; {hint}")


_PROJECT = """\
# Made by `ansor-mlflow parameters --mlproject`. The parameters for experts are not listed, but taken, too:
# -P set=measure.repeat=3,search.strategy=random; docs/parameters.md has all.
name: ansor_mlflow

conda_env: conda.yaml

entry_points:
"""


def mlproject(entry_points: Mapping[str, type[Options]]) -> str:
    """The file's text, for the option classes of its entry points by name."""
    return _PROJECT + "".join(line for name, cls in entry_points.items() for line in _entry_point(name, cls))


def _entry_point(name: str, cls: type[Options]) -> Iterator[str]:
    names = [*listed(cls), "set", "config"]
    yield f"  {name}:\n    parameters:\n"
    for parameter in names:
        yield f"      {parameter}: {_type_and_default(cls, parameter)}\n"
    flags = " ".join(f"{flag_of(cls, parameter)}\0{{{parameter}}}".lstrip("\0") for parameter in names)
    command = textwrap.fill(flags, 112, break_long_words=False, break_on_hyphens=False).replace("\0", " ")
    yield f"    command: >-\n      python -m pipelines.{name}\n{textwrap.indent(command, ' ' * 6)}\n"


def flag_of(cls: type[Options], parameter: str) -> str:
    """The flag of a parameter on the command line; empty where it has none, as it is the command's argument."""
    extra = declared(cls, parameter) if parameter in cls.model_fields else {"metavar": "", "flag": ""}
    return "" if extra["metavar"] else extra["flag"] or f"--{parameter.replace('_', '-')}"


def _type_and_default(cls: type[Options], parameter: str) -> str:
    field = cls.model_fields.get(parameter)
    if field is not None and isinstance(field.default, int | float) and not isinstance(field.default, bool):
        return f"{{type: float, default: {field.default}}}"
    return f"{{type: string, default: {json.dumps(default_text(cls, parameter) if field else '')}}}"


_REFERENCE = """# Parameters

Made by `ansor-mlflow parameters`. A parameter is `-P num_threads=2` of `mlflow run`, `--num-threads 2` of a command,
`num_threads=2` from Python. The flag of `json_file` is `--json`, those of a sweep's `dry_run` and `cluster` are
`--plan` and `--on`; `source`, `sources`, `sweep`, the two `runs` of `diff` and the `network` of `bisect` have no flag;
`repair` is a flag without a value.

A parameter with a key such as `measure.repeat` is one for experts, which `--help` does not list. Give it as
`--set measure.repeat=3` (`-P set=measure.repeat=3,search.strategy=random`), or in a configuration file as
`measure: {repeat: 3}`; its own name is taken, too.

Every command also takes `config`, a YAML file with any of its parameters; an unknown name is an error. The command
line wins over the file, unless it gives the default: MLflow passes every parameter, given or not.
"""


def parameters_markdown(commands: Mapping[str, type[Options]]) -> str:
    """A table for each option class: the parameters that it adds, and the commands that take them."""
    classes = dict.fromkeys(cls for options in commands.values() for cls in reversed(options.__mro__))
    seen: set[tuple[str, ...]] = set()
    return _REFERENCE + "".join(line for cls in classes for line in _section(cls, commands, seen))


def _section(cls: type, commands: Mapping[str, type[Options]], seen: set[tuple[str, ...]]) -> Iterator[str]:
    if not issubclass(cls, Options) or not (fields := [*filter(cls.model_fields.get, cls.__annotations__)]):
        return
    title, _, _ = (cls.__doc__ or "").partition("\n")
    takers = ", ".join(f"`{name}`" for name, options in commands.items() if issubclass(options, cls))
    yield f"\n## {title.rstrip('.')}\n\n{takers}\n"
    rows = [_cells(cls, field) for field in fields]
    if again := ", ".join(cells[0] for cells in rows if cells in seen):
        yield f"\nAs above: {again}.\n"
    if new := [cells for cells in rows if cells not in seen]:
        yield "\n| parameter | default | meaning | must be |\n|---|---|---|---|\n"
        seen.update(new)
        yield from (f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |\n" for cells in new)


def _cells(options: type[Options], field: str) -> tuple[str, str, str, str]:
    default = default_text(options, field)
    extra = declared(options, field)
    return (
        f"`{field}`" + (f", `{extra['under']}`" if extra["under"] else ""),
        f"`{default}`" if default else "",
        str(options.model_fields[field].description),
        "" if extra["rule"] in ("a text", "true or false") else extra["rule"],
    )
