"""The tracking server as the memory: how long `warm_start=auto` searches among many finished tuning runs.

    python benchmarks/earlier_tunings.py --json result.json

A sqlite store is filled with copies of one run, each with workloads of its own: SQL writes them in seconds, MLflow
would take minutes. Then a network is searched that was tuned long ago, and one of which no run knows a task.
"""

from __future__ import annotations

import json
import random
import sqlite3
import statistics
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import click
import mlflow
from mlflow.entities import Metric, Param, RunTag

from ansor_mlflow import names
from ansor_mlflow.device import DeviceFingerprint
from ansor_mlflow.records import Provenance
from ansor_mlflow.tracking import find_tunings, memory_tags

_NUM_METRICS, _NUM_PARAMS = 110, 60
"""As a tuning of ResNet-18 logs them."""
_COPIED = {"runs": "run_uuid", "latest_metrics": "run_uuid", "params": "run_uuid", "tags": "run_uuid"}
"""Tables of MLflow that a search reads, and where they have the run's ID."""
_DEVICE = DeviceFingerprint(
    target={"kind": "llvm", "mcpu": "znver4", "num-cores": 2},
    machine="x86_64",
    cpu_model="AMD EPYC",
    features=("avx2", "fma"),
    num_threads=2,
)


@click.command(context_settings={"show_default": True})
@click.option("--runs", default=1000, type=click.IntRange(min=1), help="Finished tuning runs in the store.")
@click.option("--tasks", default=36, type=click.IntRange(min=1), help="Tasks of a network.")
@click.option("--repeat", default=5, type=click.IntRange(min=1), help="Searches; the median counts.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="File for the figures.")
def main(runs: int, tasks: int, repeat: int, json_file: Path | None) -> None:
    """Time the search for earlier tunings."""
    with tempfile.TemporaryDirectory(prefix="runs-") as scratch:
        networks = _fill(Path(scratch, "mlflow.db"), runs, tasks)
        figures: dict[str, Any] = {
            "runs": runs,
            "tasks": tasks,
            "known_s": _search(networks[0], repeat, must_know=True),
            "partly_known_s": _search([*networks[0][::2], *_hashes(tasks // 2, "half")], repeat, must_know=True),
            "unknown_s": _search(_hashes(tasks, "unknown"), repeat, must_know=False),
        }
    for name, value in figures.items():
        click.echo(f"{name:16} {value:.3g}")
    if json_file:
        json_file.write_text(json.dumps(figures, indent=1))


def _search(hashes: list[str], repeat: int, *, must_know: bool) -> float:
    seconds = []
    for _ in range(repeat):
        started_s = time.perf_counter()
        found = find_tunings(_DEVICE, hashes)
        seconds.append(time.perf_counter() - started_s)
        if must_know != any(tuning.knows(hashes[0]) for tuning in found):
            raise click.ClickException("the search found something else than was there")
    return statistics.median(seconds)


def _hashes(number: int, network: str) -> list[str]:
    generator = random.Random(network)
    return [f"{generator.getrandbits(64):#018x}" for _ in range(number)]


def _fill(path: Path, runs: int, tasks: int) -> list[list[str]]:
    """Fills a store, which becomes MLflow's; returns the workloads of its runs, the oldest first."""
    mlflow.set_tracking_uri(f"sqlite:///{path}")
    template = _log_one()
    networks = [_hashes(tasks, f"network {number}") for number in range(runs)]
    with sqlite3.connect(path) as database:
        for number, hashes in enumerate(networks):
            run_id = uuid.UUID(int=number + 1).hex
            for table, column in _COPIED.items():
                columns = [row[1] for row in database.execute(f"PRAGMA table_info({table})")]
                values = ", ".join("?" if name == column else name for name in columns)
                copy = f"INSERT INTO {table} SELECT {values} FROM {table} WHERE {column} = ?"  # noqa: S608 - names of the store itself
                database.execute(copy, (run_id, template))
            database.execute("UPDATE runs SET start_time = ?, status = 'FINISHED' WHERE run_uuid = ?", (number, run_id))
            for name, value in _tags(hashes).items():
                database.execute("UPDATE tags SET value = ? WHERE run_uuid = ? AND key = ?", (value, run_id, name))
    return networks


def _log_one() -> str:
    """Logs a run that has what a tuning logs; returns its ID."""
    client = mlflow.MlflowClient()
    run_id = str(client.create_run(client.create_experiment("tunings")).info.run_id)
    client.log_batch(
        run_id,
        metrics=[Metric(f"metric/{number}", number, 1, 1) for number in range(_NUM_METRICS)]
        + [Metric(names.TRIALS_MEASURED, 168, 1, 168)],
        params=[Param(f"param_{number}", "value") for number in range(_NUM_PARAMS)],
        tags=[RunTag(name, value) for name, value in {**_tags(["0x0"]), "mlflow.note.content": "word " * 600}.items()],
    )
    return run_id


def _tags(hashes: list[str]) -> dict[str, str]:
    provenance = Provenance(
        network="",
        network_sha256="",
        from_file=False,
        batch_size=1,
        input_shapes={},
        seed=0,
        layout="",
        dtype="",
        pad_channels="auto",
        target="",
        host="",
        measure={},
        num_threads=2,
        lowering_version=6,
        tvm_version="0.27.0",
    )
    return {**memory_tags(_DEVICE, provenance, hashes), names.TAG_TRIALS_PER_TASK: "4.67"}


if __name__ == "__main__":
    main()
