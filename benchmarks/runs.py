"""How long it takes to find a run among many: `ansor-mlflow runs` as a process, and the request behind it."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import click
import requests
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag
from rich.console import Console
from rich.table import Table

from ansor_mlflow import names
from ansor_mlflow.options import RunsOptions, TuneOptions, as_text
from ansor_mlflow.steps.reports import find_runs
from ansor_mlflow.trials import TrialStatus

_SCRIPTS = Path(sys.executable).parent
_READY_S = 120.0
_LIMIT_S = 2.0
"""For the command."""
_REPEATS = 5
_NETWORKS = ("resnet-18", "resnet-50", "mobilenet_v2", "bert-base", "vgg-16")
_TARGETS = ("llvm znver4 ×2", "llvm skylake-avx512 ×8", "llvm rocketlake ×4")
_POINTS = 20
"""Of a tuning's curve."""


@click.command()
@click.option("--num-runs", default=300, show_default=True)
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Where to write the figures."
)
def main(num_runs: int, json_file: Path | None) -> None:
    """Fills a new MLflow server (sqlite) with tuning runs, and times how they are found."""
    with tempfile.TemporaryDirectory(prefix="runs-") as scratch, _server(Path(scratch)) as url:
        os.environ |= {"MLFLOW_TRACKING_URI": url, "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true"}
        began_s = time.perf_counter()
        _fill(MlflowClient(), num_runs)
        figures = {"num_runs": num_runs, "fill_s": time.perf_counter() - began_s, **_figures(num_runs)}
    _show(figures)
    if json_file:
        json_file.write_text(json.dumps(figures, indent=1))
    if figures["command_s"] > _LIMIT_S:
        raise click.ClickException(f"the command takes more than {_LIMIT_S:g} s")


@contextmanager
def _server(directory: Path) -> Iterator[str]:
    """A tracking server of one worker; yields its URL."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = int(sock.getsockname()[1])
    url, log = f"http://127.0.0.1:{port}", directory / "server.log"
    command = [str(_SCRIPTS / "mlflow"), "server", "--host=127.0.0.1", f"--port={port}", "--workers=1"]
    command += [f"--backend-store-uri=sqlite:///{directory / 'mlflow.db'}"]
    command += [f"--default-artifact-root={directory / 'artifacts'}"]
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
    try:
        deadline = time.monotonic() + _READY_S
        while not _answers(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise click.ClickException(f"the server did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


def _answers(url: str) -> bool:
    try:
        return requests.get(f"{url}/health", timeout=5).ok
    except requests.RequestException:
        return False


def _fill(client: MlflowClient, num_runs: int) -> None:
    """Adds runs such as `tune` makes."""
    chance = random.Random(0)
    for number in range(num_runs):
        network, target = chance.choice(_NETWORKS), chance.choice(_TARGETS)
        run_id = client.create_run("0", run_name=f"tune {network} · {target} · {640 + number} trials").info.run_id
        options = TuneOptions(network=network, seed=number, trials=640 + number)
        tags = {names.TAG_STEP: "tune", names.TAG_NETWORK: network, names.TAG_TARGET: target}
        client.log_batch(
            run_id,
            metrics=_metrics(chance, number),
            params=[Param(name, as_text(value)) for name, value in options],
            tags=[RunTag(name, value) for name, value in tags.items()],
        )
        client.set_terminated(run_id, "FAILED" if number % 17 == 0 else "FINISHED")


def _metrics(chance: random.Random, number: int) -> list[Metric]:
    """The curves of a tuning; two of three runs have a latency."""
    now_ms, best_ms, metrics = int(time.time() * 1000), chance.uniform(20, 40), []
    for point in range(1, _POINTS + 1):
        best_ms *= chance.uniform(0.9, 1.0)
        step = 32 * point
        values = {names.BEST_LATENCY_MS: best_ms, names.TRIALS_MEASURED: step, names.TRIALS_PER_MINUTE: 280.0}
        values |= {names.trials_with(status): step // 40 for status in TrialStatus}
        metrics += [Metric(name, value, now_ms, step) for name, value in values.items()]
    if number % 3:
        speedup = chance.uniform(50, 300)
        metrics += [Metric(names.LATENCY_MS, best_ms * 1.1, now_ms, 0)]
        metrics += [Metric(names.SPEEDUP_VS_UNTUNED, speedup, now_ms, 0)]
    return metrics


def _figures(num_runs: int) -> dict[str, Any]:
    """Medians of several calls. The command's time holds Python's start and all imports."""
    leaderboard = RunsOptions(sort="latency_ms")
    command = [str(_SCRIPTS / "ansor-mlflow"), "runs", "--sort", "latency_ms"]
    return {
        "command_s": _median_s(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL)),
        "import_mlflow_s": _median_s(lambda: subprocess.run([sys.executable, "-c", "import mlflow"], check=True)),
        "search_20_s": _median_s(lambda: find_runs(leaderboard)),
        "search_all_s": _median_s(lambda: find_runs(leaderboard.model_copy(update={"limit": num_runs}))),
    }


def _median_s(call: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_REPEATS):
        began_s = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began_s)
    return median(seconds)


def _show(figures: dict[str, Any]) -> None:
    table = Table("figure", "value")
    for name, value in figures.items():
        table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    Console().print(table)


if __name__ == "__main__":
    main()
