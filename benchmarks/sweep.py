"""How well `ansor-mlflow sweep --on ray` keeps the nodes of a cluster busy, and what it costs the driver.

    python benchmarks/sweep.py --nodes 1,2,4,8,16 --json result.json

The cluster is a real one: raylets on this host. A pipeline sleeps for as long as was predicted, and logs a run as real
ones do to a real tracking server; everything else is that of a sweep.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import mlflow
import psutil
import requests
from rich.console import Console
from rich.table import Table

from ansor_mlflow import tracking
from ansor_mlflow.commands.sweep.declaration import Declaration, Entry
from ansor_mlflow.commands.sweep.driver import Driver
from ansor_mlflow.commands.sweep.nodes import Ended, SweepJob
from ansor_mlflow.commands.sweep.plans import EntryPlan
from ansor_mlflow.commands.sweep.ray_nodes import RayNodes
from ansor_mlflow.parameters import PipelineOptions, SweepOptions

_SEED = 0
_START_S = 300.0
_NODE_BYTES = 80 << 20
"""Object store of a raylet, the least that Ray takes."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A sweep on so many nodes."""

    nodes: int
    pipelines: int
    makespan_s: float
    ideal_s: float
    """What all pipelines take over the nodes, or the longest of them, if that is more."""
    utilisation: float
    """Share of the makespan in which a node runs a pipeline, to its end with the run that it logs, 0 to 1."""
    driver_cpu_s: float
    driver_mib: float
    driver_requests: int
    """Requests of the driver to the tracking server; the pipelines' are not among them."""


def pipeline(job: SweepJob) -> Ended:
    """Sleeps as long as the name says, and logs the run of a pipeline."""
    import time

    from mlflow import MlflowClient
    from mlflow.entities import Metric, RunTag

    began_s = time.monotonic()
    time.sleep(float(job.name.rpartition(" ")[2]))
    client, now_ms = MlflowClient(job.store), int(time.time() * 1000)
    tags = {**job.tags, "mlflow.parentRunId": job.options.parent_run, "ansor.step": "main"}
    run = client.create_run(client.get_run(job.options.parent_run).info.experiment_id, run_name=job.name, tags=tags)
    metrics = {"latency_ms": 1.0, "speedup_vs_best": 1.5, "trials/measured": float(job.options.trials or 0)}
    logged = [Metric(name, value, now_ms, 0) for name, value in metrics.items()]
    client.log_batch(run.info.run_id, metrics=logged, tags=[RunTag("ansor.network", job.name)])
    client.set_terminated(run.info.run_id)
    client.log_metric(run.info.run_id, "busy_s", time.monotonic() - began_s)
    return Ended(run_id=run.info.run_id)


@contextmanager
def server(directory: Path) -> Iterator[str]:
    """A tracking server."""
    port = 5000 + random.randrange(20000)
    options = ["--backend-store-uri", f"sqlite:///{directory}/mlflow.db", "--port", str(port), "--workers", "1"]
    address = f"http://127.0.0.1:{port}"
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--artifacts-destination",
        str(directory / "artifacts"),
        *options,
    ]
    with (directory / "server.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        deadline_s = time.monotonic() + _START_S
        while time.monotonic() < deadline_s:
            with suppress(requests.RequestException):
                if requests.get(f"{address}/health", timeout=5).ok:
                    break
            time.sleep(0.5)
        yield address
    finally:
        psutil.Process(process.pid).terminate()
        process.wait()


@contextmanager
def counted() -> Iterator[list[str]]:
    """The addresses of all requests of this process."""
    seen: list[str] = []
    send = requests.Session.send

    def counting(session: requests.Session, request: Any, **others: Any) -> requests.Response:
        seen.append(re.sub(r"\?.*", "", str(request.url)))
        return send(session, request, **others)

    requests.Session.send = counting  # type: ignore[method-assign, assignment]
    try:
        yield seen
    finally:
        requests.Session.send = send  # type: ignore[method-assign]


def measure(num_nodes: int, num_pipelines: int, scale_s: float, cluster: Any) -> Row:
    """Runs a sweep on the nodes that a cluster has now."""
    draw = random.Random(_SEED)
    seconds = [round(scale_s * draw.uniform(0.5, 2.0), 2) for _ in range(num_pipelines)]
    entries = [
        Entry(name=f"network-{number} {text}", options=PipelineOptions(network="mlp", trials=0), weight=1.0)
        for number, text in enumerate(seconds)
    ]
    nodes = RayNodes(cluster.address, entries, pipeline)
    try:
        deadline_s = time.monotonic() + _START_S
        while len(nodes.known) < num_nodes and time.monotonic() < deadline_s:
            nodes.look()
            time.sleep(0.5)
        device = nodes.device_of(entries[0]).name
        plans = [
            EntryPlan(digest=f"{num_nodes}-{number}", device=device, expected_minutes=each / 60)
            for number, each in enumerate(seconds)
        ]
        name = f"simulated-{num_nodes}"
        options = SweepOptions(sweep=name, cluster="ray")
        me = psutil.Process()
        with tracking.step_run("sweep", options, name) as run, counted() as requested:
            driver = Driver(Declaration(name=name, entries=tuple(entries)), plans, options, run, nodes)
            driver.look_up()
            began_s, cpu_s, num_before = time.monotonic(), sum(me.cpu_times()[:2]), len(requested)
            driver.run()
            makespan_s = time.monotonic() - began_s
            result = driver.compared({})
            cpu_s = sum(me.cpu_times()[:2]) - cpu_s
        result.require_done()
        return Row(
            nodes=num_nodes,
            pipelines=num_pipelines,
            makespan_s=makespan_s,
            ideal_s=max(sum(seconds) / num_nodes, *seconds),
            utilisation=sum(entry.metrics["busy_s"] for entry in result.entries) / (num_nodes * makespan_s),
            driver_cpu_s=cpu_s,
            driver_mib=me.memory_info().rss / 2**20,
            driver_requests=len(requested) - num_before,
        )
    finally:
        nodes.close()


def show(rows: list[Row]) -> None:
    """Prints a table."""
    table = Table(box=None)
    for header in ("nodes", "pipelines", "makespan s", "ideal s", "utilisation", "driver CPU s", "MiB", "requests"):
        table.add_column(header, justify="right")
    for row in rows:
        cells = (f"{row.makespan_s:.1f}", f"{row.ideal_s:.1f}", f"{row.utilisation:.1%}", f"{row.driver_cpu_s:.1f}")
        table.add_row(str(row.nodes), str(row.pipelines), *cells, f"{row.driver_mib:.0f}", str(row.driver_requests))
    Console().print(table)


@click.command()
@click.option("--nodes", default="1,2,4,8,16", show_default=True, help="Numbers of nodes, from few to many.")
@click.option("--pipelines", default=64, show_default=True)
@click.option("--seconds", default=8.0, show_default=True, help="A pipeline sleeps half as long to twice as long.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="File that the figures are written to.")
def main(nodes: str, pipelines: int, seconds: float, json_file: Path | None) -> None:
    """Measures sweeps on clusters of raylets on this host."""
    from ray.cluster_utils import Cluster

    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as directory, server(Path(directory)) as address:
        mlflow.set_tracking_uri(address)
        cluster: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        try:
            for number in sorted(map(int, nodes.split(","))):
                while len(cluster.worker_nodes) < number:
                    place: Mapping[str, str] = {"place": f"rack-{len(cluster.worker_nodes)}"}
                    cluster.add_node(num_cpus=1, labels=place, object_store_memory=_NODE_BYTES, wait=False)
                rows.append(measure(number, pipelines, seconds, cluster))
                show(rows[-1:])
        finally:
            cluster.shutdown()
    show(rows)
    if json_file:
        json_file.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
