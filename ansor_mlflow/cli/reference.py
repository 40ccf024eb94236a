"""The reference of all parameters as Markdown, which is `docs/parameters.md`."""

from __future__ import annotations

from collections.abc import Mapping

from ansor_mlflow.options import Options, declared, default_text

_HEAD = """# Parameters

Every parameter of every entry point and command, made by `ansor-mlflow parameters`. With `mlflow run` they are given
as `-P num_threads=2`; on the command line of `ansor-mlflow` the names have dashes: `--num-threads 2`. `plan`,
`bisect`, `explain`, `diff`, `doctor` and `records …` are commands only; there `json_file` is
the flag `--json`, `source`, `sources`, the two `runs` of `diff` and the `network` of `bisect` are given without
a flag, and `repair` is a flag without a value.

Each of them also takes `config`, a YAML file with values for any of its parameters; an unknown key is an error.
What is given on the command line wins over the file, unless it equals the default: MLflow passes every parameter,
given or not.
"""


def parameters_markdown(commands: Mapping[str, type[Options]]) -> str:
    """A table of parameters for each entry point or command."""
    return _HEAD + "".join(_section(name, options) for name, options in commands.items())


def _section(name: str, options: type[Options]) -> str:
    rows = "".join(_row(options, field) for field in options.model_fields)
    return f"\n## {name}\n\n| parameter | default | meaning | must be |\n|---|---|---|---|\n{rows}"


def _row(options: type[Options], field: str) -> str:
    default = default_text(options, field)
    cells = [
        f"`{field}`",
        f"`{default}`" if default else "",
        str(options.model_fields[field].description),
        declared(options, field)["rule"],
    ]
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |\n"
