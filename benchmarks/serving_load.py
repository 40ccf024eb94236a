"""What a served model does under load: requests lost, memory, and latencies against the library alone."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import mlflow
import numpy as np
import numpy.typing as npt
import psutil
import requests
from rich.console import Console
from rich.table import Table
from serving_parts.server import BODIES, memory_mib, model_server

from ansor_mlflow import flavor
from ansor_mlflow.model import TunedModel
from ansor_mlflow.serving import get_signature
from ansor_mlflow.tensors import random_inputs

_ANSWER_S = 120.0
_SAMPLES_PER_S = 2
_WARM_UP_SHARE = 0.2
"""Of the time, after which memory may not grow any more."""
_GROWTH_LIMIT = 0.02
_GROWTH_LIMIT_MIB = 8.0
"""Growth that the allocators of Python and of C have anyway: the larger of the two."""
_TOLERANCE = 1e-4

Tensors = dict[str, npt.NDArray[Any]]


@dataclass
class _Client:
    """One that sends a request as soon as it has the answer to the last, each with the same inputs."""

    url: str
    body: bytes
    expected: Tensors
    latencies_s: list[float] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def run(self, seconds: float) -> None:
        """Sends requests for so long; notes those that were not answered, or not rightly."""
        session, deadline = requests.Session(), time.perf_counter() + seconds
        headers = {"Content-Type": "application/json"}
        while (start := time.perf_counter()) < deadline:
            try:
                response = session.post(self.url, data=self.body, headers=headers, timeout=_ANSWER_S)
                self.latencies_s.append(time.perf_counter() - start)
                self._check(response)
            except requests.RequestException as err:
                self.lost.append(repr(err))

    def _check(self, response: requests.Response) -> None:
        if response.status_code != requests.codes.ok:
            self.lost.append(f"{response.status_code} {response.text[-500:]}")
            return
        predictions = response.json()["predictions"]
        outputs = predictions if isinstance(predictions, dict) else dict.fromkeys(self.expected, predictions)
        for name, expected in self.expected.items():
            if not np.allclose(outputs[name], expected, rtol=0, atol=_TOLERANCE * abs(expected).max()):
                self.lost.append(f"output {name} is that of other inputs")


@click.command()
@click.option("--model", "model_uri", required=True, help="The model: a directory, models:/… or runs:/….")
@click.option("--seconds", default=60.0, show_default=True, help="How long the clients send requests.")
@click.option("--clients", "num_clients", default=8, show_default=True)
@click.option("--workers", default=1, show_default=True, help="Processes of the server.")
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Where to write the figures."
)
def main(model_uri: str, seconds: float, num_clients: int, workers: int, json_file: Path | None) -> None:
    """Serves a model, sends it base64 from several clients, and fails where an answer is lost or memory grows."""
    with tempfile.TemporaryDirectory(prefix="serving-load-") as scratch:
        directory = Path(mlflow.artifacts.download_artifacts(model_uri, dst_path=str(Path(scratch, "download"))))
        model = flavor.load_model(str(directory))
        mlflow.models.set_signature(str(directory), get_signature(model.inputs, model.outputs, "binary"))
        library_ms = _time_library(model)
        with model_server(directory, Path(scratch), workers) as (root, process, _ready_s):
            url = f"{root}/invocations"
            alone = _load(url, process, model, 1, min(seconds, 10.0))
            figures = {"library_ms": library_ms, "alone": alone, **_load(url, process, model, num_clients, seconds)}
    figures |= {"workers": workers, "over_library": figures["alone"]["latency_ms"] / library_ms}
    _show(figures)
    if json_file:
        json_file.write_text(json.dumps(figures, indent=1))
    if figures["lost"] or figures["memory_grew"]:
        sys.exit(1)


def _time_library(model: TunedModel) -> float:
    """Median of a call in this process, before there is a server."""
    inputs, times_s = random_inputs(model.inputs, seed=0), []
    for _ in range(30):
        start = time.perf_counter()
        model.run(inputs)
        times_s.append(time.perf_counter() - start)
    return statistics.median(times_s[5:]) * 1e3


def _load(url: str, server: psutil.Process, model: TunedModel, num_clients: int, seconds: float) -> dict[str, Any]:
    """Figures of clients that send requests at the same time; the first request of each process counts, too."""
    clients = [_client(url, model, seed) for seed in range(num_clients)]
    threads = [threading.Thread(target=client.run, args=(seconds,)) for client in clients]
    samples_mib: list[float] = []
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        samples_mib.append(memory_mib(server))
        time.sleep(1 / _SAMPLES_PER_S)
    wall_s = time.perf_counter() - start
    latencies_ms = np.array([latency for client in clients for latency in client.latencies_s]) * 1e3
    lost = [reason for client in clients for reason in client.lost]
    return {
        "clients": num_clients,
        "seconds": wall_s,
        "requests": len(latencies_ms),
        "lost": len(lost),
        "lost_because": lost[:5],
        "requests_per_s": len(latencies_ms) / wall_s,
        "latency_ms": float(np.median(latencies_ms)),
        "latency_p90_ms": float(np.percentile(latencies_ms, 90)),
        "latency_p99_ms": float(np.percentile(latencies_ms, 99)),
        "latency_max_ms": float(latencies_ms.max()),
        "memory_mib": samples_mib,
        **_growth(samples_mib),
    }


def _client(url: str, model: TunedModel, seed: int) -> _Client:
    inputs = random_inputs(model.inputs, seed)
    return _Client(url, json.dumps(BODIES["binary"](inputs)).encode(), model.run(inputs))


def _growth(memory_mib: list[float]) -> dict[str, Any]:
    """How much more memory the last fifth of the time has than the second, the first one being warm-up."""
    fifth = max(1, int(len(memory_mib) * _WARM_UP_SHARE))
    before, after = (
        statistics.median(memory_mib[fifth : 2 * fifth] or memory_mib),
        statistics.median(memory_mib[-fifth:]),
    )
    growth = after - before
    return {"memory_growth_mib": growth, "memory_grew": growth > max(_GROWTH_LIMIT_MIB, _GROWTH_LIMIT * before)}


def _show(figures: dict[str, Any]) -> None:
    alone = figures["alone"]
    table = Table("", "1 client", f"{figures['clients']} clients")
    table.add_row("library alone", f"{figures['library_ms']:.2f} ms", "")
    for key in ("latency_ms", "latency_p90_ms", "latency_p99_ms", "latency_max_ms"):
        table.add_row(key.replace("_", " ").removesuffix(" ms"), f"{alone[key]:.1f} ms", f"{figures[key]:.1f} ms")
    table.add_row("requests per second", f"{alone['requests_per_s']:.1f}", f"{figures['requests_per_s']:.1f}")
    table.add_row(
        "requests, lost", f"{alone['requests']}, {alone['lost']}", f"{figures['requests']}, {figures['lost']}"
    )
    table.add_row("memory", "", f"{figures['memory_mib'][-1]:.0f} MiB")
    table.add_row("growth of memory", "", f"{figures['memory_growth_mib']:+.1f} MiB")
    Console().print(table)
    for reason in figures["lost_because"]:
        click.echo(reason, err=True)


if __name__ == "__main__":
    main()
