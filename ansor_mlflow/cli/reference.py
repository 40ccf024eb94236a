"""The reference of all parameters as Markdown, which is `docs/parameters.md`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ansor_mlflow.parameters import Options, declared, default_text

_HEAD = """# Parameters

Made by `ansor-mlflow parameters`. With `mlflow run` a parameter is given as `-P num_threads=2`, on the command line as
`--num-threads 2`, from Python as `num_threads=2`. On the command line `json_file` is the flag `--json`; `source`,
`sources`, the two `runs` of `diff` and the `network` of `bisect` have no flag; `repair` is a flag without a value.

A parameter with a key such as `measure.repeat` is one for experts, which `--help` does not list. It is given as
`--set measure.repeat=3` (`-P set=measure.repeat=3,search.strategy=random`), or in a configuration file as
`measure: {repeat: 3}`; its own name is taken, too.

Every command also takes `config`, a YAML file with values for any of its parameters; an unknown name is an error.
What is given on the command line wins over the file, unless it equals the default: MLflow passes every parameter,
given or not.
"""


def parameters_markdown(commands: Mapping[str, type[Options]]) -> str:
    """A table for each option class: the parameters that it adds, and the commands that take them."""
    classes = dict.fromkeys(cls for options in commands.values() for cls in reversed(options.__mro__))
    return _HEAD + "".join(line for cls in classes for line in _section(cls, commands))


def _section(cls: type, commands: Mapping[str, type[Options]]) -> Iterator[str]:
    if not issubclass(cls, Options) or not (fields := [*filter(cls.model_fields.get, cls.__annotations__)]):
        return
    title, _, _ = (cls.__doc__ or "").partition("\n")
    takers = ", ".join(f"`{name}`" for name, options in commands.items() if issubclass(options, cls))
    yield f"\n## {title.rstrip('.')}\n\n{takers}\n\n| parameter | default | meaning | must be |\n|---|---|---|---|\n"
    yield from (_row(cls, field) for field in fields)


def _row(options: type[Options], field: str) -> str:
    default = default_text(options, field)
    extra = declared(options, field)
    cells = [
        f"`{field}`" + (f", `{extra['under']}`" if extra["under"] else ""),
        f"`{default}`" if default else "",
        str(options.model_fields[field].description),
        extra["rule"],
    ]
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |\n"
