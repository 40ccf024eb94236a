"""What a command prints, and how it ends: text, JSON, and an error as one line."""

from __future__ import annotations

import errno
import os
import platform
import shlex
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import distributions
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

import click
import pydantic_core
from click.core import ParameterSource
from pydantic.fields import FieldInfo
from rich.console import Console
from rich.segment import Segment
from rich.table import Table as RichTable
from rich.text import Text

from ansor_mlflow import parameters
from ansor_mlflow.errors import AnsorMlflowError, MachineError, UserInputError, add_note, notes_of, one_line, shortened
from ansor_mlflow.files import translated_disk_errors, write_text
from ansor_mlflow.foreign import (
    Code,
    Image,
    Report,
    Table,
    printable,
    printable_json,
    printable_line,
    without_credentials,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_PIPE_WIDTH = 1000
"""Columns where there is no terminal: lines are not broken."""


def say(text: object = "", *, err: bool = False) -> None:
    """Prints a line to standard output, or to standard error."""
    click.echo(printable(str(text)), err=err)


def say_marked(mark: str, text: str) -> None:
    """Prints a line behind a word in the colour that it names."""
    console().print(Text.assemble((f"{mark:<8}", mark), printable(text)), soft_wrap=True)


class PlainConsole(Console):
    """A console that every `str` passes as `printable`, in the cells of tables, too, and nothing with control
    characters. Whoever makes a `Text` hides the credentials in it.
    """

    def render_str(self, text: str, **kwargs: Any) -> Text:
        return super().render_str(printable(text), **kwargs)  # as a whole, before it is broken into lines

    def render(self, *args: Any, **kwargs: Any) -> Iterator[Segment]:
        for segment in super().render(*args, **kwargs):
            is_sound = segment.control or segment.text.strip("\n").isprintable()
            yield segment if is_sound else segment._replace(text=printable(segment.text))


def console() -> Console:
    """Standard output, for text as it is."""
    return PlainConsole(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False, markup=False)


def show(report: Report) -> None:
    """Prints a report: its title, its parts with empty lines around tables and programs, and where things are."""
    out, is_line = console(), True
    for part in (report.title, *report.parts):
        if isinstance(part, Image):
            continue
        if not (is_line and isinstance(part, str)):
            out.print()
        is_line = isinstance(part, str)
        if isinstance(part, str):
            out.print(part, soft_wrap=True)
            continue
        if part.title:
            out.print(Text(printable(part.title), style="bold"), soft_wrap=True)
        if isinstance(part, Code):
            say(part.text)
        else:
            out.print(table(part))
    if report.where and not is_line:
        out.print()
    for label, where in report.where.items():
        say(f"{label:<6} {where}")


def table(description: Table) -> RichTable:
    """A table without lines, see `Table`."""
    made = RichTable(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=bool(description.headers))
    for header in description.headers or ("", "~"):
        justify = "right" if header.startswith(">") else "left"
        made.add_column(header.lstrip(">~"), justify=justify, no_wrap=not header.startswith("~"))  # type: ignore[arg-type]
    for cells, style in zip_longest(description.rows, description.marks, fillvalue=""):
        made.add_row(*map(printable_line, cells), style=str(style))
    return made


_OF_USER = {errno.ENAMETOOLONG, errno.ELOOP, errno.EISDIR, errno.ENOTDIR}
"""What the system says of a path that was given."""
STANDARD_OUTPUT = "-"
"""The path that means standard output."""
_PACKAGES = ("ansor_mlflow", "apache-tvm", "mlflow", "numpy", "onnx")


def known_error(err: Exception) -> AnsorMlflowError:
    """The error to end a command with: that of the system or of the machine's memory in our kinds, or a crash."""
    if isinstance(err, MemoryError):
        return MachineError("there is not enough memory; give a smaller network or batch, or take a larger machine")
    if isinstance(err, OSError) and err.errno in _OF_USER:
        name = shortened(str(err.filename or "a file"), 100)
        return UserInputError(f"{name}: {err.strerror}; give another name")
    found = AnsorMlflowError(
        f"{type(err).__name__}: {one_line(err)}: this is a bug; to have it mended, report it with the file "
        f"{_written(err)}, which says where it happened"
    )
    for note in notes_of(err):
        add_note(found, note)
    return found


def _written(err: Exception) -> str:
    """The path of a file with the traceback, the versions and the command, as they may be shown."""
    installed = {found.name.lower(): found.version for found in distributions()}
    versions = ", ".join(f"{name} {installed.get(name, 'is missing')}" for name in _PACKAGES)
    head = f"{shlex.join(sys.argv)}\n{versions}, Python {platform.python_version()}, {platform.platform()}\n\n"
    text = printable(head + "".join(traceback.format_exception(err)))
    try:
        number, path = tempfile.mkstemp(prefix="ansor-mlflow-", suffix=".txt")
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError:  # no place for it
        sys.stderr.write(text)
        return "above"
    return path


def report(result: Any, json_file: str) -> None:
    """Prints a result's report, and writes its fields to a file; to standard output they go in place of the text."""
    if json_file != STANDARD_OUTPUT:
        show(result.report())
    write_json(json_file, result)


def write_json(path: str, result: DataclassInstance) -> None:
    """Writes the fields of a result, with null for a number that is not finite; nothing where `path` is empty."""
    if not path:
        return
    plain = _without_credentials(pydantic_core.to_jsonable_python(result))
    text = printable_json(pydantic_core.to_json(plain, indent=1, inf_nan_mode="null").decode())
    if path == STANDARD_OUTPUT:
        click.echo(text)
        return
    write_output("json_file", path, text)


def write_output(parameter: str, path: str, text: str) -> None:
    """Writes a file that the user named, whole or not at all.

    A pipe or a device, and a file in a folder that may not be written, is written to as it is.
    """
    file = Path(path)
    try:
        with translated_disk_errors():
            if file.exists() and not (file.is_file() and os.access(file.resolve().parent, os.W_OK)):
                file.write_text(text, encoding="utf-8")
            else:
                write_text(file.resolve(), text)  # a link stays one
    except OSError as err:
        raise UserInputError(f"{parameter}={path}: it cannot be written ({err.strerror}); give another path") from err


def _without_credentials(value: Any) -> Any:
    """Plain JSON with its texts, names among them, as they may be shown."""
    if isinstance(value, dict):
        return {without_credentials(key): _without_credentials(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_credentials(item) for item in value]
    return without_credentials(value) if isinstance(value, str) else value


_CONFIG_HELP = "YAML file with values for any of these parameters; what is given here wins over the file."
_SET_HELP = "Parameters for experts, such as measure.repeat=3; several are separated by commas: {keys}."
OptionsT = TypeVar("OptionsT", bound=parameters.Options)

COMMANDS: dict[str, type[parameters.Options]] = {}
"""The commands that have options, by their whole names, such as "records show"."""


def checked_options(cls: type[OptionsT], given: Mapping[str, Any], config: str | None = None) -> OptionsT:
    """Does what `load_options` does, and checks the network, too: before TVM and MLflow, which take seconds to load."""
    options = parameters.load_options(cls, given, config)
    has_own = bool(getattr(options, "tune_run", "") or getattr(options, "resume_run", ""))  # a run knows its network
    if isinstance(options, parameters.NetworkOptions) and not has_own and not parameters.is_uri(options.network):
        from ansor_mlflow.networks import require_network  # ONNX, which --help can do without

        require_network(options.network, trust=options.trust)
    return options


def command(group: click.Group, name: str) -> Callable[[Callable[[OptionsT], None]], click.Command]:
    """Makes a command of `group` whose flags are the fields of the option class that the function takes."""

    def decorate(function: Callable[[OptionsT], None]) -> click.Command:
        options_class: type[OptionsT] = get_type_hints(function)["options"]

        def callback(config: str, set_: tuple[str, ...] = (), **given: Any) -> None:
            source = click.get_current_context().get_parameter_source("network")
            if source is ParameterSource.COMMANDLINE and not given["network"]:  # an unset variable of a shell
                raise UserInputError("network='': it is empty; give the name of a network, a file or a URI")
            for settings in set_:
                given.update(parameters.read_settings(options_class, settings))
            function(checked_options(options_class, given, config or None))

        params = [_param(options_class, field, info) for field, info in options_class.model_fields.items()]
        if keys := ", ".join(parameters.grouped(options_class)):
            help_ = _SET_HELP.format(keys=keys)
            params.append(click.Option(["--set", "set_"], multiple=True, metavar="GROUP.KEY=VALUE", help=help_))
        params.append(click.Option(["--config"], default="", help=_CONFIG_HELP))
        made = click.Command(name, params=params, callback=callback, help=function.__doc__)
        group.add_command(made)
        COMMANDS[name if group.name == "cli" else f"{group.name} {name}"] = options_class
        return made

    return decorate


def _param(options_class: type[parameters.Options], name: str, info: FieldInfo) -> click.Parameter:
    extra = parameters.declared(options_class, name)
    if extra["metavar"]:
        num_values = -1 if info.annotation is not str else 1
        default = "" if num_values == 1 else None
        return click.Argument([name], default=default, nargs=num_values, required=False, metavar=extra["metavar"])
    default = parameters.default_text(options_class, name)
    text = f"{info.description}  [default: {default}]" if default else info.description
    # For experts; `mlflow run -P measure_timeout_s=5` passes the name with its underscores.
    is_hidden = bool(extra["under"])
    flags = [extra["flag"] or f"--{name.replace('_', '-')}", name]
    flags += [f"--{name}"] if is_hidden and "_" in name else []
    if extra["is_switch"]:
        return click.Option(flags, is_flag=True, default=None, help=info.description)
    # A boolean that is given alone is true.
    alone: dict[str, Any] = {"is_flag": False, "flag_value": "true"} if info.annotation is bool else {}
    return click.Option(flags, default="", metavar="VALUE", help=text, hidden=is_hidden, **alone)
