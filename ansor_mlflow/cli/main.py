"""Commands: parse parameters, call a step, turn an error into one line and an exit code.

MLflow and TVM are imported by the commands that need them, so that `--help` answers at once.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from ansor_mlflow import parameters
from ansor_mlflow.cli.command import (
    COMMANDS,
    STANDARD_OUTPUT,
    command,
    known_error,
    report,
    say,
    say_marked,
    show,
    write_output,
)
from ansor_mlflow.errors import AnsorMlflowError, UserInputError, notes_of
from ansor_mlflow.files import translated_disk_errors
from ansor_mlflow.foreign import Code, PrintableFormatter, Report, Table
from ansor_mlflow.settings import set_defaults_of_clients

ENTRY_POINTS = ("main", "tune", "compile", "evaluate", "promote", "sweep")
"""The commands that `mlflow run` starts, too."""


class _Commands(click.Group):
    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if instead := parameters.GONE_COMMANDS.get(args[0]):
            raise UserInputError(f"the command {args[0]} is gone: {instead}")
        return super().resolve_command(ctx, args)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ansor_mlflow")
def cli() -> None:
    """Auto-tune neural networks with Apache TVM; MLflow remembers and serves the result."""


@command(cli, "main")
def pipeline(options: parameters.PipelineOptions) -> None:
    """Tune, compile, evaluate and, with --register-as, register a network; with --promote, promote it.

    In a folder whose MLproject file has these steps as entry points, each is run as one, in a process of its own.
    """
    from ansor_mlflow.cli.progress import progress_observers
    from ansor_mlflow.commands.pipeline import has_our_entry_points, run_pipeline

    if has_our_entry_points(Path.cwd()):
        show(run_pipeline(options, Path.cwd()).report())
        return
    with progress_observers() as observers:
        result = run_pipeline(options, observers=observers)
    show(result.report())


@command(cli, "tune")
def tune(options: parameters.TuneOptions) -> None:
    """Search the best schedule for every task of a network."""
    from ansor_mlflow.cli.progress import progress_observers
    from ansor_mlflow.steps.tuning import tune as tune_step

    with progress_observers() as observers:
        result = tune_step(options, observers)
    show(result.report())


@command(cli, "compile")
def compile_(options: parameters.CompileOptions) -> None:
    """Build a network with tuning records and log it as a model."""
    from ansor_mlflow.steps.compiling import compile_network

    show(compile_network(options).report())


@command(cli, "evaluate")
def evaluate(options: parameters.EvaluateOptions) -> None:
    """Check a model against ONNX Runtime and measure its latency."""
    from ansor_mlflow.steps.evaluation import evaluate as evaluate_step

    show(evaluate_step(options).report())


@command(cli, "promote")
def promote(options: parameters.PromoteOptions) -> None:
    """Make a version of a registered model the champion if it is right and faster than the champion on this host.

    Moves champion-<target>, and --alias with it. A candidate that is not promoted ends with exit code 9 if it lost, 10
    if it was not decided, 7 if its outputs are wrong, and 6 if the champion does not run here.
    """
    from ansor_mlflow.steps.promotion import promote as promote_step
    from ansor_mlflow.steps.promotion import roll_back

    if options.rollback:
        show(roll_back(options).report())
        return
    promotion = promote_step(options)
    show(promotion.report())
    promotion.require_won()


@command(cli, "plan")
def plan(options: parameters.PlanOptions) -> None:
    """List the tasks that tuning a network would search, the trials that each would get, and what is known.

    Nothing is measured, and no run is started.
    """
    from ansor_mlflow.commands.plan import plan_tuning

    report(plan_tuning(options), options.json_file)


@command(cli, "sweep")
def sweep(options: parameters.SweepOptions) -> None:
    """Tune many networks: each gets a model first, then the trials go where they gain most.

    SWEEP is a YAML file. Started again it goes on: what was made stays, what failed is tried again, and entries may be
    added. Entries without a model end it with exit code 4, and models that are slower than --fail-if-slower allows with
    8.
    """
    from ansor_mlflow.cli.progress import sweep_table
    from ansor_mlflow.commands.sweep import run_sweep

    with sweep_table() as watch:
        run_sweep(options, lambda found: report(found, options.json_file), watch)


@command(cli, "bisect")
def bisect(options: parameters.BisectOptions) -> None:
    """Find the first tensor of a network that is not what ONNX Runtime computes, and the smallest model that shows it.

    NETWORK is compiled without tuning, whole and in parts. The model is saved with its inputs, for a bug report, and
    the exit code is then 7; it is 0 where nothing differs.
    """
    from ansor_mlflow.commands.bisect import bisect_network

    bisection = bisect_network(options)
    report(bisection, options.json_file)
    bisection.require_equal()


@command(cli, "quantize")
def quantize(options: parameters.QuantizeNetworkOptions) -> None:
    """Quantise a float network to 8 bits so that it loses no more than it may, into an ONNX file.

    No run is started; tune, compile and main do the same with --quantize int8.
    """
    from ansor_mlflow.steps.quantizing import quantize_network

    report(quantize_network(options), options.json_file)


@command(cli, "explain")
def explain(options: parameters.ExplainOptions) -> None:
    """Show what a tuned task computes, its schedule, and how far it is from what this host can do.

    SOURCE is the ID of a tuning run, or a directory, a tuning-record file or an artifact URI; then give the network,
    layout, target and threads that the records were made with.
    """
    from ansor_mlflow.commands.explain import explain_task

    report(explain_task(options), options.json_file)


@command(cli, "diff")
def diff(options: parameters.DiffOptions) -> None:
    """Compare two tunings task by task: which is faster, by how much, and is that more than noise.

    RUN_A and RUN_B are runs of tune, compile, evaluate or main, or models.
    """
    from ansor_mlflow.commands.diff import diff_runs
    from ansor_mlflow.tracking import html_page

    difference = diff_runs(options)
    report(difference, options.json_file)
    if options.html:
        write_output("html", options.html, html_page(difference.report()))
    if options.fail_if_slower is not None:
        difference.require_not_slower(options.fail_if_slower, force=options.force)


@cli.group("records")
def records() -> None:
    """Look at tuning records, merge them, keep the best, and replay them.

    SOURCE is a directory, a tuning-record file, an artifact URI or the ID of a tuning run.
    """


@command(records, "show")
def records_show(options: parameters.ShowRecordsOptions) -> None:
    """Count the records of a database, by target and workload."""
    from ansor_mlflow.commands.databases import show_records

    report(show_records(options), options.json_file)


@command(records, "merge")
def records_merge(options: parameters.MergeRecordsOptions) -> None:
    """Write the records of several databases to a new one, each once."""
    from ansor_mlflow.commands.databases import merge_records

    show(merge_records(options).report())


@command(records, "distill")
def records_distill(options: parameters.DistillRecordsOptions) -> None:
    """Write the fastest records of each workload and target to a new database."""
    from ansor_mlflow.commands.databases import distill_records

    show(distill_records(options).report())


@command(records, "verify")
def records_verify(options: parameters.VerifyRecordsOptions) -> None:
    """Replay the fastest records of each task: do they apply, build, run, and compute what the task computes.

    With another SOURCE than a tuning run, give the network, layout, target and threads that the records were made with.
    With --repair and no network, damaged lines are set aside and nothing is replayed.
    """
    from ansor_mlflow.commands.verify import repair_records, verify_records

    if options.repair and "network" not in options.model_fields_set:
        report(repair_records(options.source), options.json_file)
        return
    is_text = options.json_file != STANDARD_OUTPUT
    result = verify_records(options, say if is_text else lambda _: None)
    report(result, options.json_file)
    result.require_pass()


@cli.group("fleet")
def fleet() -> None:
    """Run TVM's RPC tracker and servers, and see whether they are fit to measure.

    A tuning measures on them with --rpc-tracker and --rpc-key.
    """


@command(fleet, "tracker")
def fleet_tracker(options: parameters.TrackerOptions) -> None:
    """Run a tracker, which servers report to and tunings ask, until an interrupt."""
    from ansor_mlflow.fleet import run_tracker

    run_tracker(options.host, options.port)


@command(fleet, "server")
def fleet_server(options: parameters.ServerOptions) -> None:
    """Run a server on a device, which measures what tunings send, until an interrupt.

    A program that crashes or hangs ends its session and nothing else.
    """
    from ansor_mlflow.fleet import HostPort, run_server

    tracker = HostPort.parse(options.tracker, "tracker")
    run_server(options.host, options.port, tracker, options.key, known_as=options.known_as)


@command(fleet, "status")
def fleet_status(options: parameters.FleetOptions) -> None:
    """List the servers that a tracker knows, and who waits for them."""
    from ansor_mlflow.commands.fleet import fleet_status as ask

    report(ask(options), options.json_file)


@command(fleet, "test")
def fleet_test(options: parameters.FleetTestOptions) -> None:
    """Run a known program on every server of a key: are its results right, how long does it take, how evenly.

    A server that cannot measure ends it with exit code 3.
    """
    from ansor_mlflow.commands.fleet import self_test

    is_text = options.json_file != STANDARD_OUTPUT
    result = self_test(options, say if is_text else lambda _: None)
    report(result, options.json_file)
    result.require_pass()


@command(cli, "doctor")
def doctor(options: parameters.DoctorOptions) -> None:
    """Check this machine, the tracking server and the stores: a line for each thing, with the fix where it needs one.

    Red means that a tuning would fail or measure nonsense, and ends with exit code 3. Nothing is left anywhere.
    """
    from ansor_mlflow.commands.doctor import examine

    is_text = options.json_file != STANDARD_OUTPUT
    diagnosis = examine(options, (lambda check: say_marked(check.status, str(check))) if is_text else lambda _: None)
    report(diagnosis, options.json_file)
    diagnosis.require_no_red()


@cli.command("sync")
@click.option("--drop", default="", metavar="RUN_ID", help="Remove what is left here of this run, records and all.")
def sync(drop: str) -> None:
    """Tell MLflow what earlier steps in this directory could not, because a server was away."""
    from ansor_mlflow.commands import sync as sync_step

    if drop:
        sync_step.drop(drop)
        say(f"run {drop}: nothing of it is left here")
        return
    all_delivered = []
    for delivered in sync_step.sync():
        all_delivered.append(delivered)
        told = "" if delivered.error else f"{delivered.num_messages} messages delivered"
        say(f"run {delivered.run_id}: {'; '.join(filter(None, [told, delivered.left]))}")
    if not all_delivered:
        say("nothing is left to deliver")
    sync_step.require_all_delivered(all_delivered)


@cli.command("networks")
def networks() -> None:
    """List the built-in networks and operators."""
    from ansor_mlflow.networks import BUILTIN_NETWORKS, OPERATORS, read_catalogue

    rows = [
        (
            name,
            ", ".join("×".join(map(str, shape)) for shape in size.inputs.values()),
            f"{size.parameters / 1e6:.2f} M",
            f"{size.flops / 1e9:.2f}",
            str(size.tasks),
        )
        for name, size in read_catalogue().items()
    ]
    rows += [(name, "", "", "", "") for name in BUILTIN_NETWORKS.plugins]
    sizes = Table(rows, ["network", "~input", ">parameters", ">GFLOP", ">tasks"])
    show(Report("Networks", [sizes, Code("\n".join(OPERATORS.values()), "Operators")]))


@cli.command("parameters")
@click.option("--mlproject", "is_mlproject", is_flag=True, help="Print the file MLproject instead.")
def print_parameters(is_mlproject: bool) -> None:
    """Print the reference of all parameters as Markdown."""
    entry_points = {name: COMMANDS[name] for name in ENTRY_POINTS}
    click.echo(
        parameters.mlproject(entry_points)
        if is_mlproject
        else parameters.parameters_markdown({**entry_points, **COMMANDS}),
        nl=False,
    )


def main(args: Sequence[str] | None = None) -> None:
    """Runs a command line and exits: 0, or the code of the error's kind (see `errors.py`)."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a run is told how it ended
    _set_up_logging()
    set_defaults_of_clients()  # entry points that `main` starts inherit them
    try:
        with translated_disk_errors():
            cli.main(args=args, prog_name="ansor-mlflow", standalone_mode=False)
    except click.Abort as err:
        say("interrupted by the user", err=True)
        _say_where(err.__cause__)
        sys.exit(130)
    except click.exceptions.Exit as err:
        sys.exit(err.exit_code)
    except click.NoSuchOption as err:
        name = err.option_name.lstrip("-").replace("-", "_")
        why = parameters.GONE_PARAMETERS.get(name)
        _fail(UserInputError(f"{name} is gone: {why}" if why else err.format_message()))
    except click.ClickException as err:
        _fail(UserInputError(err.format_message()))
    except AnsorMlflowError as err:
        _fail(err)
    except Exception as err:  # noqa: BLE001 - what nobody thought of is one line, too
        _fail(known_error(err))


def _fail(err: AnsorMlflowError) -> Any:
    """Prints one line, and what its run is if there is one; tells the run that `mlflow run` opened, and exits."""
    say(f"Error: {err}", err=True)
    _say_where(err)
    if os.environ.get("MLFLOW_RUN_ID"):
        from ansor_mlflow.tracking import fail_project_run

        fail_project_run(err)
    sys.exit(err.exit_code)


def _say_where(err: BaseException | None) -> None:
    for note in notes_of(err):
        say(note, err=True)


def _set_up_logging() -> None:
    log = logging.getLogger("ansor_mlflow")
    log.setLevel(logging.INFO)
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(PrintableFormatter("%(message)s"))
        log.addHandler(handler)
