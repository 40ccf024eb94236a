"""What tracking costs: the share of the tuning time that the tuner waits for an MLflow server."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import requests
from mlflow import MlflowClient
from rich.console import Console
from rich.table import Table

from ansor_mlflow import names

_SCRIPTS = Path(sys.executable).parent
_READY_S = 120.0


@click.command()
@click.option("--backend-store-uri", help="Store of the server, such as postgresql://…; a new sqlite file by default.")
@click.option("--network", default="resnet-18", show_default=True)
@click.option("--trials", default=320, show_default=True)
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Where to write the figures."
)
def main(backend_store_uri: str | None, network: str, trials: int, json_file: Path | None) -> None:
    """Tunes with a tracking server on this machine, and shows what logging took of the time."""
    with tempfile.TemporaryDirectory(prefix="tracking-overhead-") as scratch:
        directory = Path(scratch)
        store = backend_store_uri or f"sqlite:///{directory / 'mlflow.db'}"
        with _server(store, directory) as (url, log):
            _tune(url, network, trials, directory)
            figures = {
                "store": store.partition(":")[0],
                "network": network,
                **_figures(url, trials),
                "num_log_batch_requests": len(re.findall(r"POST \S*/runs/log-batch ", log.read_text())),
            }
    _show(figures)
    if json_file:
        json_file.write_text(json.dumps(figures, indent=1))


@contextmanager
def _server(store: str, directory: Path) -> Iterator[tuple[str, Path]]:
    """A tracking server of one worker; yields its URL and its log."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = int(sock.getsockname()[1])
    url, log = f"http://127.0.0.1:{port}", directory / "server.log"
    command = [str(_SCRIPTS / "mlflow"), "server", "--host=127.0.0.1", f"--port={port}", "--workers=1"]
    command += [f"--backend-store-uri={store}", f"--default-artifact-root={directory / 'artifacts'}"]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + _READY_S
        while not _answers(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise click.ClickException(f"the server did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.2)
        yield url, log
    finally:
        process.terminate()
        process.wait()


def _answers(url: str) -> bool:
    try:
        return requests.get(f"{url}/health", timeout=5).ok
    except requests.RequestException:
        return False


def _tune(url: str, network: str, trials: int, directory: Path) -> None:
    command = [str(_SCRIPTS / "ansor-mlflow"), "tune", "--network", network, "--trials", str(trials)]
    environment = {**os.environ, "MLFLOW_TRACKING_URI": url}
    finished = subprocess.run(command, cwd=directory, env=environment, check=False)
    if finished.returncode:
        raise click.ClickException("the tuning failed; see above")


def _figures(url: str, trials: int) -> dict[str, Any]:
    client = MlflowClient(url)
    (run,) = client.search_runs([e.experiment_id for e in client.search_experiments()], max_results=1)
    metrics = run.data.metrics
    tuning_s = trials / metrics[names.TRIALS_PER_MINUTE] * 60
    rounds = client.get_metric_history(run.info.run_id, names.TRIALS_MEASURED)
    return {
        "trials": trials,
        "num_rounds": len(rounds),
        "tuning_s": tuning_s,
        "log_s": metrics[names.TIME_LOG_S],
        "share": metrics[names.TIME_LOG_S] / tuning_s,
    }


def _show(figures: dict[str, Any]) -> None:
    table = Table("figure", "value")
    for name, value in figures.items():
        table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    Console().print(table)


if __name__ == "__main__":
    main()
