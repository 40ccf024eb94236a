"""The text of the file `MLproject`, which says to `mlflow run` what the entry points take."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping

from ansor_mlflow.parameters.declaring import Options, default_text, listed

_HEAD = """\
# Made by `ansor-mlflow parameters --mlproject`. The parameters for experts are not listed, but taken, too:
# -P set=measure.repeat=3,search.strategy=random; docs/parameters.md has all.
name: ansor_mlflow

conda_env: conda.yaml

entry_points:
"""


def mlproject(entry_points: Mapping[str, type[Options]]) -> str:
    """The file's text, for the option classes of its entry points by name."""
    return _HEAD + "".join(line for name, cls in entry_points.items() for line in _entry_point(name, cls))


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
