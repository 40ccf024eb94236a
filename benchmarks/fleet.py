"""How many devices one tuning host can keep busy.

    python benchmarks/fleet.py --devices 1,2,4,8,16 --trial-ms 100 --json fleet.json

Devices are real RPC servers on loopback, and programs are really searched, built and uploaded; only the time of a
program is replaced by a sleep. See benchmarks/README.md for what the figures mean.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import psutil
from rich.console import Console
from rich.table import Table

_PROGRAM = str(Path(sys.executable).with_name("ansor-mlflow"))
_SERVER = Path(__file__).parent / "fleet_parts" / "sleeping_server.py"
_LISTENS = re.compile(r"listens at (\S+?);? ")
_KEY = "simulated"
_START_S = 60.0
_SAMPLE_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Row:
    """What so many devices did."""

    num_devices: int
    trials: int
    trials_per_minute: float
    utilisation: float
    """Share of the devices' time in which they had a program."""
    host_cpu_s_per_trial: float
    """CPU time of the tuner and its workers."""
    search_s: float
    build_s: float
    wait_s: float
    """Time in which the tuner waited for devices."""


@click.command()
@click.option("--devices", default="1,2,4,8,16", help="Numbers of devices.")
@click.option("--trial-ms", default=100.0, help="Time that a device takes for a program.")
@click.option("--trials-per-device", default=60, help="Programs for each device.")
@click.option("--network", default="resnet-18", help="What is tuned.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="File for the figures.")
def main(devices: str, trial_ms: float, trials_per_device: int, network: str, json_file: Path | None) -> None:
    """Tune with fleets of different sizes."""
    console = Console()
    rows = []
    for number in (int(word) for word in devices.split(",")):
        rows.append(_tune(network, number, trial_ms / 1e3, number * trials_per_device))
        console.print(f"{number} devices: {rows[-1].trials_per_minute:.0f} trials per minute")
        if json_file is not None:
            json_file.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    console.print(_table(rows, network, trial_ms))


def _tune(network: str, num_devices: int, trial_s: float, trials: int) -> Row:
    import mlflow

    with (
        tempfile.TemporaryDirectory(prefix="fleet-") as scratch,
        _fleet(Path(scratch), num_devices, trial_s) as tracker,
    ):
        store = f"sqlite:///{scratch}/mlflow.db"
        given = ["--rpc-tracker", tracker, "--rpc-key", _KEY, "--trials", str(trials), "--network", network]
        with Path(scratch, "tune.log").open("w") as log:
            process = subprocess.Popen(
                [_PROGRAM, "tune", *given],
                cwd=scratch,
                env={**os.environ, "MLFLOW_TRACKING_URI": store},
                stdout=log,
                stderr=log,
            )
            cpu_s = _cpu_s_until_end(process)
        if process.returncode:
            raise click.ClickException(Path(scratch, "tune.log").read_text())
        client = mlflow.MlflowClient(store)
        (run,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    metrics = run.data.metrics
    return Row(
        num_devices=num_devices,
        trials=trials,
        trials_per_minute=metrics["speed/trials_per_minute"],
        utilisation=metrics["fleet/utilisation"],
        host_cpu_s_per_trial=cpu_s / trials,
        search_s=metrics["time/search_s"],
        build_s=metrics["time/build_s"],
        wait_s=metrics["time/run_s"],
    )


def _cpu_s_until_end(process: subprocess.Popen[bytes]) -> float:
    """CPU time of a process and of all that it starts, but for what they do in their last moments."""
    used: dict[int, float] = {}
    while process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(process.pid)
            for member in (root, *root.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    times = member.cpu_times()
                    used[member.pid] = times.user + times.system
        time.sleep(_SAMPLE_S)
    return sum(used.values())


@contextlib.contextmanager
def _fleet(directory: Path, num_devices: int, trial_s: float) -> Iterator[str]:
    """A tracker and its devices."""
    with contextlib.ExitStack() as stack:
        tracker = stack.enter_context(
            _listening([_PROGRAM, "fleet", "tracker", "--port", "0"], directory / "tracker.log")
        )
        command = [sys.executable, str(_SERVER), str(trial_s), "--tracker", tracker, "--key", _KEY]
        for number in range(num_devices):
            stack.enter_context(_listening(command, directory / f"device-{number}.log"))
        yield tracker


@contextlib.contextmanager
def _listening(command: Sequence[str], log: Path) -> Iterator[str]:
    """A process that says where it listens."""
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        until_s = time.monotonic() + _START_S
        while not (found := _LISTENS.search(log.read_text())):
            if process.poll() is not None or time.monotonic() > until_s:
                raise click.ClickException(log.read_text())
            time.sleep(0.05)
        yield found[1]
    finally:
        process.kill()
        process.wait()


def _table(rows: Sequence[Row], network: str, trial_ms: float) -> Table:
    table = Table(title=f"{network}, {trial_ms:g} ms for a trial, {os.cpu_count()} CPUs")
    for name in ("devices", "trials / min", "utilisation", "host CPU s / trial", "search s", "build s", "waited s"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            str(row.num_devices),
            f"{row.trials_per_minute:.0f}",
            f"{row.utilisation:.0%}",
            f"{row.host_cpu_s_per_trial:.2f}",
            f"{row.search_s:.0f}",
            f"{row.build_s:.0f}",
            f"{row.wait_s:.0f}",
        )
    return table


if __name__ == "__main__":
    main()
