"""Commands: parse parameters, call a step, turn an error into one line and an exit code.

MLflow and TVM are imported by the commands that need them, so that `--help` answers at once.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from pydantic.fields import FieldInfo

from ansor_mlflow.errors import AnsorMlflowError, UserInputError
from ansor_mlflow.options import (
    CompileOptions,
    EvaluateOptions,
    ExplainOptions,
    Options,
    PipelineOptions,
    PlanOptions,
    TuneOptions,
    default_text,
    load_options,
)

OptionsT = TypeVar("OptionsT", bound=Options)

ENTRY_POINTS: dict[str, type[Options]] = {
    "main": PipelineOptions,
    "tune": TuneOptions,
    "compile": CompileOptions,
    "evaluate": EvaluateOptions,
}
"""The entry points of `MLproject`, which are commands, too."""
COMMANDS: dict[str, type[Options]] = {**ENTRY_POINTS, "plan": PlanOptions, "explain": ExplainOptions}
"""The commands that have options."""
_FLAGS = {"json_file": "--json"}
"""Flags that are not the name of their parameter."""
_ARGUMENTS = {"source": "RUN|RECORDS"}
"""Parameters without a flag, and what stands for them in the help."""
_CONFIG_HELP = "YAML file with values for any of these parameters; what is given here wins over the file."


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ansor_mlflow")
def cli() -> None:
    """Auto-tune neural networks with Apache TVM; MLflow remembers and serves the result."""


def _command(name: str, options_class: type[OptionsT]) -> Callable[[Callable[[OptionsT], None]], click.Command]:
    """Makes a command whose flags are the fields of an option class."""

    def decorate(function: Callable[[OptionsT], None]) -> click.Command:
        def callback(config: str, **given: str) -> None:
            function(load_options(options_class, given, config or None))

        params: list[click.Parameter] = [
            _param(options_class, field, info) for field, info in options_class.model_fields.items()
        ]
        params.append(click.Option(["--config"], default="", help=_CONFIG_HELP))
        command = click.Command(name, params=params, callback=callback, help=function.__doc__)
        cli.add_command(command)
        return command

    return decorate


def _param(options_class: type[Options], name: str, info: FieldInfo) -> click.Parameter:
    if name in _ARGUMENTS:
        return click.Argument([name], default="", required=False, metavar=_ARGUMENTS[name])
    default = default_text(options_class, name)
    text = f"{info.description}  [default: {default}]" if default else info.description
    flag = _FLAGS.get(name, f"--{name.replace('_', '-')}")
    return click.Option([flag, name], default="", metavar="VALUE", help=text)


@_command("tune", TuneOptions)
def tune(options: TuneOptions) -> None:
    """Search the best schedule for every kernel of a network."""
    from ansor_mlflow.cli.progress import progress_observers
    from ansor_mlflow.steps import tune as tune_step

    with progress_observers() as observers:
        run_id = tune_step(options, observers)
    click.echo(f"tuning run {run_id}")


@_command("compile", CompileOptions)
def compile_(options: CompileOptions) -> None:
    """Build a network with tuning records and log it as a model."""
    from ansor_mlflow.steps import compile_network

    result = compile_network(options)
    tasks, flops = result.coverage.task_share, result.coverage.flops_share
    click.echo(f"model {result.model_uri}  coverage {tasks:.0%} of tasks, {flops:.1%} of operations")


@_command("evaluate", EvaluateOptions)
def evaluate(options: EvaluateOptions) -> None:
    """Check a model against ONNX Runtime and measure its latency."""
    from ansor_mlflow.cli.summary import print_latencies
    from ansor_mlflow.steps import evaluate as evaluate_step

    print_latencies(evaluate_step(options))


@_command("main", PipelineOptions)
def pipeline(options: PipelineOptions) -> None:
    """Tune, compile, evaluate and, with --register-as, register a network."""
    from ansor_mlflow.cli.summary import print_pipeline
    from ansor_mlflow.steps import run_pipeline

    print_pipeline(run_pipeline(options, Path.cwd()))


@_command("plan", PlanOptions)
def plan(options: PlanOptions) -> None:
    """List the kernels that tuning a network would search, the trials that each would get, and what is known.

    Nothing is measured, and no run is started.
    """
    from ansor_mlflow.cli.json_file import write_json
    from ansor_mlflow.cli.plan import print_plan
    from ansor_mlflow.steps import plan_tuning

    result = plan_tuning(options)
    print_plan(result)
    write_json(options.json_file, result)


@_command("explain", ExplainOptions)
def explain(options: ExplainOptions) -> None:
    """Show what a tuned kernel computes, its schedule, and how far it is from what this host can do.

    RUN is the ID of a tuning run. RECORDS is a directory, a tuning-record file or an artifact URI; give the network,
    layout, target and threads that they were made with.
    """
    from ansor_mlflow.cli.explain import print_explanation
    from ansor_mlflow.cli.json_file import write_json
    from ansor_mlflow.steps import explain_task

    result = explain_task(options)
    print_explanation(result)
    write_json(options.json_file, result)


@cli.command("sync")
def sync() -> None:
    """Tell MLflow what earlier steps in this directory could not, because a server was away."""
    from ansor_mlflow.steps import sync as sync_step

    num_runs = 0
    for num_runs, delivered in enumerate(sync_step(), start=1):
        click.echo(f"run {delivered.run_id}: {delivered.num_messages} messages delivered")
    if not num_runs:
        click.echo("nothing is left to deliver")


@cli.command("networks")
def networks() -> None:
    """List the built-in networks and operators."""
    from ansor_mlflow.cli.networks import print_networks

    print_networks()


@cli.command("parameters")
def parameters() -> None:
    """Print the reference of all parameters as Markdown."""
    from ansor_mlflow.cli.reference import parameters_markdown

    click.echo(parameters_markdown(COMMANDS), nl=False)


def main(args: Sequence[str] | None = None) -> None:
    """Runs a command line and exits: 0, or the code of the error's kind (see `errors.py`)."""
    _set_up_logging()
    _shorten_mlflow_retries()
    try:
        cli.main(args=args, prog_name="ansor-mlflow", standalone_mode=False)
    except click.Abort:
        sys.exit(130)
    except click.exceptions.Exit as err:
        sys.exit(err.exit_code)
    except click.ClickException as err:
        _fail(UserInputError(err.format_message()))
    except AnsorMlflowError as err:
        _fail(err)


def _fail(err: AnsorMlflowError) -> Any:
    """Prints one line, tells the run that `mlflow run` opened, and exits."""
    click.echo(f"Error: {err}", err=True)
    if os.environ.get("MLFLOW_RUN_ID"):
        from ansor_mlflow.tracking import fail_project_run

        fail_project_run(err)
    sys.exit(err.exit_code)


def _set_up_logging() -> None:
    log = logging.getLogger("ansor_mlflow")
    log.setLevel(logging.INFO)
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(handler)


def _shorten_mlflow_retries() -> None:
    """Lets an unreachable server be an error after seconds; MLflow's default of 7 doubling waits takes minutes."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
