"""The record store: a large database distilled to its best, and a network compiled from one.

    python benchmarks/records.py --json result.json

Real records of ResNet-18 are repeated, with other times, for as many made-up workloads as the size asks for.
"""

from __future__ import annotations

import json
import random
import re
import resource
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from ansor_mlflow.measuring import call_once
from ansor_mlflow.processes import in_child_process
from ansor_mlflow.records import RecordPair, distill

_NETWORK = "resnet-18"
_PER_WORKLOAD = 1000
_PROGRAMS_PER_TASK = 8
_RECORD = re.compile(r'\[(?P<index>\d+),(?P<trace>.*),\[[^\[\]]*\],(?P<rest>\{".*)')


@click.command(context_settings={"show_default": True})
@click.option("--records", default=100_000, type=click.IntRange(min=1), help="Records that are distilled.")
@click.option("--keep", default=3, type=click.IntRange(min=1), help="Records of a workload that are kept.")
@click.option("--compiled", default=20_000, type=click.IntRange(min=1), help="Records that a network is compiled from.")
@click.option("--seed", default=0)
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="File for the figures.")
def main(records: int, keep: int, compiled: int, seed: int, json_file: Path | None) -> None:
    """Time the record store on a large database."""
    with tempfile.TemporaryDirectory(prefix="records-") as scratch:
        directory = Path(scratch)
        in_child_process(call_once, partial(_making, directory / "real", seed))
        size = _repeat(directory / "real", directory / "large", records, seed)
        distilled = in_child_process(call_once, partial(_distilling, directory / "large", directory / "best", keep))
        _repeat(directory / "real", directory / "log", compiled, seed, fresh_workloads=False)
        compiling = {
            name: in_child_process(call_once, partial(_compiling, directory / "log", name == "distilled"))
            for name in ("log", "distilled", "log", "distilled")
        }
    figures = {
        "records": records,
        "megabytes": size / 1e6,
        "kept": distilled["kept"],
        "distill_s": distilled["seconds"],
        "megabytes_per_s": size / 1e6 / distilled["seconds"],
        "peak_memory_mib": distilled["peak_memory_mib"],
        "compile_s_from_log": compiling["log"],
        "compile_s_from_distilled": compiling["distilled"],
        "compiled_records": compiled,
    }
    table = Table("figure", "value")
    for name, value in figures.items():
        table.add_row(name, f"{value:.5g}")
    Console().print(table)
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=1))


def _making(directory: Path, seed: int) -> Callable[[], None]:
    """Random programs of every task, as records with made-up times."""

    def make() -> None:
        from ansor_mlflow.device import resolve_target
        from ansor_mlflow.lowering import lower
        from ansor_mlflow.networks import load_network
        from ansor_mlflow.records import RecordLog
        from ansor_mlflow.tuning import TaskSearch, log_lines, make_cost_model

        target = resolve_target("auto", 1)
        log = RecordLog(directory, target.export())
        for task in lower(load_network(_NETWORK).model, target).tasks:
            search = TaskSearch(
                task,
                target=target,
                strategy="random",
                num_trials_per_round=_PROGRAMS_PER_TASK,
                num_threads=1,
                seed=seed + 1,
                log=log,
                cost_model=make_cost_model("none", 1, seed),
            )
            candidates = search.propose(_PROGRAMS_PER_TASK)
            log.append(*log_lines(task.mod, target, candidates, [(1e-3,)] * len(candidates)))
            search.close()

    return make


def _repeat(source: Path, destination: Path, num_records: int, seed: int, *, fresh_workloads: bool = True) -> int:
    """Writes that many records with random times; returns the size of the record file in bytes."""
    draw = random.Random(seed)
    pair, large = RecordPair.in_directory(source), RecordPair.in_directory(destination)
    destination.mkdir()
    workloads = pair.workloads.read_text().splitlines()
    real = [_RECORD.fullmatch(line) for line in pair.records.read_text().splitlines()]
    modules = [json.loads(line)[1] for line in workloads]
    if fresh_workloads:
        indices = range(-(-num_records // _PER_WORKLOAD))
        workloads = [json.dumps([str(draw.getrandbits(64)), modules[i % len(modules)]]) for i in indices]
    large.workloads.write_text("".join(f"{line}\n" for line in workloads))
    with large.records.open("w") as file:
        for number in range(num_records):
            match = real[number % len(real)]
            assert match is not None
            index = number // _PER_WORKLOAD if fresh_workloads else int(match["index"])
            file.write(f"[{index},{match['trace']},[{draw.uniform(1e-4, 1e-2)!r}],{match['rest']}\n")
    return large.records.stat().st_size


def _distilling(source: Path, destination: Path, keep: int) -> Callable[[], dict[str, Any]]:
    def run() -> dict[str, Any]:
        from ansor_mlflow.device import resolve_target

        target = resolve_target("auto", 1).export()
        before_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        started_s = time.monotonic()
        kept = distill(RecordPair.in_directory(source), destination, target, keep)
        seconds = time.monotonic() - started_s
        peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return {"kept": kept, "seconds": seconds, "peak_memory_mib": peak_mib, "before_mib": before_mib}

    return run


def _compiling(log: Path, is_distilled: bool) -> Callable[[], float]:
    """Seconds from the records to the library, with the distilling or without."""

    def run() -> float:
        from ansor_mlflow.device import resolve_target
        from ansor_mlflow.lowering import lower
        from ansor_mlflow.model import compile_tuned
        from ansor_mlflow.networks import load_network

        target = resolve_target("auto", 1)
        lowered = lower(load_network(_NETWORK).model, target)
        best = log.with_name("best-of-log")
        started_s = time.monotonic()
        if not is_distilled:
            distill(RecordPair.in_directory(log), best, target.export())
        compile_tuned(lowered, target, best, log.with_name("model.so"))
        return time.monotonic() - started_s

    return run


if __name__ == "__main__":
    main()
