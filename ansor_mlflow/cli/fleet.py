"""The commands `fleet`, and what they print."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ansor_mlflow.cli.command import command
from ansor_mlflow.cli.console import console, say, table
from ansor_mlflow.cli.json_file import STANDARD_OUTPUT, report
from ansor_mlflow.options import FleetOptions, FleetTestOptions, ServerOptions, TrackerOptions

if TYPE_CHECKING:
    from ansor_mlflow.steps.fleet import FleetStatus, FleetTest, TestedServer


@click.group("fleet")
def fleet() -> None:
    """Run TVM's RPC tracker and servers, and see whether they are fit to measure.

    A tuning measures on them with --rpc-tracker and --rpc-key.
    """


@command(fleet, "tracker")
def fleet_tracker(options: TrackerOptions) -> None:
    """Run a tracker, which servers report to and tunings ask, until an interrupt."""
    from ansor_mlflow.tuning import run_tracker

    run_tracker(options.host, options.port)


@command(fleet, "server")
def fleet_server(options: ServerOptions) -> None:
    """Run a server on a device, which measures what tunings send, until an interrupt.

    A program that crashes or hangs ends its session and nothing else.
    """
    from ansor_mlflow.tuning import HostPort, run_server

    tracker = HostPort.parse(options.tracker, "tracker")
    run_server(options.host, options.port, tracker, options.key, known_as=options.known_as)


@command(fleet, "status")
def fleet_status(options: FleetOptions) -> None:
    """List the servers that a tracker knows, and who waits for them."""
    from ansor_mlflow.steps.fleet import fleet_status as ask

    report(ask(options), options.json_file, _print_status)


@command(fleet, "test")
def fleet_test(options: FleetTestOptions) -> None:
    """Run a known program on every server of a key: are its results right, how long does it take, how evenly.

    A server that cannot measure ends it with exit code 3.
    """
    from ansor_mlflow.steps.fleet import self_test

    is_text = options.json_file != STANDARD_OUTPUT
    result = self_test(options, _print_tested if is_text else lambda _: None)
    report(result, options.json_file, _print_test)
    result.require_pass()


def _print_status(status: FleetStatus) -> None:
    rows = (
        (key, str(len(known.servers)), str(known.num_free), str(known.num_waiting), ", ".join(map(str, known.servers)))
        for key, known in status.keys.items()
    )
    listed = table(["~key", ">servers", ">free", ">waiting", "~where"], rows)
    console().print(listed if status.keys else f"no server has reported to the tracker at {status.tracker}")


def _print_tested(server: TestedServer) -> None:
    if server.error:
        say(f"{server.server}  {server.error}")
        return
    assert server.calibration_ms is not None
    assert server.noise is not None
    assert server.upload_mib_per_s is not None
    say(
        f"{server.server}  right, {server.calibration_ms:.3f} ms ± {server.noise:.0%}, "
        f"{server.upload_mib_per_s:.0f} MiB/s{'' if server.has_own_code else ', TVM’s own server'}"
    )


def _print_test(result: FleetTest) -> None:
    times = sorted(server.calibration_ms for server in result.servers if server.calibration_ms)
    parts = [f"{sum(not server.error for server in result.servers)} of {len(result.servers)} servers can measure"]
    if len(times) > 1:
        parts.append(f"the slowest takes {times[-1] / times[0]:.2f} times as long as the fastest")
    if result.num_busy:
        parts.append(f"{result.num_busy} were busy all the time")
    say("; ".join(parts))
