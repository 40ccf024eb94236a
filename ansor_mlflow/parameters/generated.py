"""What is made of the parameters: the file `MLproject`, and the reference `docs/parameters.md`."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping

from ansor_mlflow.parameters.declaring import Options, declared, default_text, listed

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
    flags = " ".join(f"--{parameter.replace('_', '-')}\0{{{parameter}}}" for parameter in names)
    command = textwrap.fill(flags, 112, break_long_words=False, break_on_hyphens=False).replace("\0", " ")
    yield f"    command: >-\n      python -m pipelines.{name}\n{textwrap.indent(command, ' ' * 6)}\n"


def _type_and_default(cls: type[Options], parameter: str) -> str:
    field = cls.model_fields.get(parameter)
    if field is not None and isinstance(field.default, int | float) and not isinstance(field.default, bool):
        return f"{{type: float, default: {field.default}}}"
    return f"{{type: string, default: {json.dumps(default_text(cls, parameter) if field else '')}}}"


_REFERENCE = """# Parameters

Made by `ansor-mlflow parameters`. A parameter is `-P num_threads=2` of `mlflow run`, `--num-threads 2` of a command,
`num_threads=2` from Python. The flag of `json_file` is `--json`; `source`, `sources`, the two `runs` of `diff` and the
`network` of `bisect` have no flag; `repair` is a flag without a value.

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
    yield f"\n## {title.rstrip('.')}\n\n{takers}\n\n| parameter | default | meaning | must be |\n|---|---|---|---|\n"
    for field in fields:
        cells = _cells(cls, field)
        shown = (cells[0], "", "as above", "") if cells in seen else cells
        seen.add(cells)
        yield f"| {' | '.join(cell.replace('|', '&#124;') for cell in shown)} |\n"


def _cells(options: type[Options], field: str) -> tuple[str, str, str, str]:
    default = default_text(options, field)
    extra = declared(options, field)
    return (
        f"`{field}`" + (f", `{extra['under']}`" if extra["under"] else ""),
        f"`{default}`" if default else "",
        str(options.model_fields[field].description),
        "" if extra["rule"] in ("a text", "true or false") else extra["rule"],
    )
