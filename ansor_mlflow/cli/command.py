"""Makes commands from option classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, get_type_hints

import click
from click.core import ParameterSource
from pydantic.fields import FieldInfo

from ansor_mlflow.errors import UserInputError
from ansor_mlflow.parameters import (
    NetworkOptions,
    Options,
    declared,
    default_text,
    grouped,
    is_uri,
    load_options,
    read_settings,
)

_CONFIG_HELP = "YAML file with values for any of these parameters; what is given here wins over the file."
_SET_HELP = "Parameters for experts, such as measure.repeat=3; several are separated by commas: {keys}."
OptionsT = TypeVar("OptionsT", bound=Options)

COMMANDS: dict[str, type[Options]] = {}
"""The commands that have options, by their whole names, such as "records show"."""


def checked_options(cls: type[OptionsT], given: Mapping[str, Any], config: str | None = None) -> OptionsT:
    """Does what `load_options` does, and checks the network, too: before TVM and MLflow, which take seconds to load.

    Raises:
        UserInputError: A value breaks its rule, or there is no such network; what MLflow would fetch is not asked for.
    """
    options = load_options(cls, given, config)
    if isinstance(options, NetworkOptions) and options.decides_network and not is_uri(options.network):
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
                given.update(read_settings(options_class, settings))
            function(checked_options(options_class, given, config or None))

        params = [_param(options_class, field, info) for field, info in options_class.model_fields.items()]
        if keys := ", ".join(grouped(options_class)):
            help_ = _SET_HELP.format(keys=keys)
            params.append(click.Option(["--set", "set_"], multiple=True, metavar="GROUP.KEY=VALUE", help=help_))
        params.append(click.Option(["--config"], default="", help=_CONFIG_HELP))
        made = click.Command(name, params=params, callback=callback, help=function.__doc__)
        group.add_command(made)
        COMMANDS[name if group.name == "cli" else f"{group.name} {name}"] = options_class
        return made

    return decorate


def _param(options_class: type[Options], name: str, info: FieldInfo) -> click.Parameter:
    extra = declared(options_class, name)
    if extra["metavar"]:
        num_values = -1 if info.annotation is not str else 1
        default = "" if num_values == 1 else None
        return click.Argument([name], default=default, nargs=num_values, required=False, metavar=extra["metavar"])
    default = default_text(options_class, name)
    text = f"{info.description}  [default: {default}]" if default else info.description
    # For experts; `mlflow run -P measure_timeout_s=5` passes the name with its underscores.
    is_hidden = bool(extra["under"])
    flags = [
        extra["flag"] or f"--{name.replace('_', '-')}",
        name,
        *([f"--{name}"] if is_hidden and "_" in name else []),
    ]
    if extra["is_switch"]:
        return click.Option(flags, is_flag=True, default=None, help=info.description)
    # A boolean that is given alone is true.
    alone: dict[str, Any] = {"is_flag": False, "flag_value": "true"} if info.annotation is bool else {}
    return click.Option(flags, default="", metavar="VALUE", help=text, hidden=is_hidden, **alone)
