"""The commands `fleet`."""

from __future__ import annotations

import click

from ansor_mlflow.cli.command import STANDARD_OUTPUT, command, report
from ansor_mlflow.cli.console import say
from ansor_mlflow.parameters import FleetOptions, FleetTestOptions, ServerOptions, TrackerOptions


@click.group("fleet")
def fleet() -> None:
    """Run TVM's RPC tracker and servers, and see whether they are fit to measure.

    A tuning measures on them with --rpc-tracker and --rpc-key.
    """


@command(fleet, "tracker")
def fleet_tracker(options: TrackerOptions) -> None:
    """Run a tracker, which servers report to and tunings ask, until an interrupt."""
    from ansor_mlflow.fleet import run_tracker

    run_tracker(options.host, options.port)


@command(fleet, "server")
def fleet_server(options: ServerOptions) -> None:
    """Run a server on a device, which measures what tunings send, until an interrupt.

    A program that crashes or hangs ends its session and nothing else.
    """
    from ansor_mlflow.fleet import HostPort, run_server

    tracker = HostPort.parse(options.tracker, "tracker")
    run_server(options.host, options.port, tracker, options.key, known_as=options.known_as)


@command(fleet, "status")
def fleet_status(options: FleetOptions) -> None:
    """List the servers that a tracker knows, and who waits for them."""
    from ansor_mlflow.commands.fleet import fleet_status as ask

    report(ask(options), options.json_file)


@command(fleet, "test")
def fleet_test(options: FleetTestOptions) -> None:
    """Run a known program on every server of a key: are its results right, how long does it take, how evenly.

    A server that cannot measure ends it with exit code 3.
    """
    from ansor_mlflow.commands.fleet import self_test

    is_text = options.json_file != STANDARD_OUTPUT
    result = self_test(options, say if is_text else lambda _: None)
    report(result, options.json_file)
    result.require_pass()
