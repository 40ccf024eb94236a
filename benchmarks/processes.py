"""How far processes that run the same model differ, with huge pages and without.

    python benchmarks/processes.py --model models:/resnet-18/1 --json result.json

A process may be slow for as long as it lives, by where its pages of 4 KiB happen to lie. All processes of a kind load
the model and live until the end. They are timed one after the other, in several rounds, so that what a shared machine
does for some seconds hits all of them: a process counts with the median of its rounds. Rounds in which its threads
shared a CPU do not count: a virtual machine may leave the other one idle for as long as a round takes, which has
nothing to do with pages.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from ansor_mlflow.measuring import measure_watched, watched
from ansor_mlflow.model import TunedModel
from ansor_mlflow.tensors import random_inputs

_MEASURE_S, _WARM_UP_S = 0.4, 0.1
_SHARED = 0.3
"""Share of a round for which a thread waited from which it had no CPU of its own."""
_SIDES = {"huge pages": True, "pages of 4 KiB": False}


@click.command(context_settings={"show_default": True})
@click.option("--model", required=True, help="Directory or URI of a model.")
@click.option("--processes", default=20, type=click.IntRange(min=1), help="Number of each kind; they live together.")
@click.option("--rounds", default=7, type=click.IntRange(min=1), help="How often each of them is timed.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="File for the figures.")
def main(model: str, processes: int, rounds: int, json_file: Path | None) -> None:
    """Time the calls of a model in many processes."""
    from mlflow.artifacts import download_artifacts

    with tempfile.TemporaryDirectory(prefix="processes-") as scratch:
        directory = Path(model if Path(model).is_dir() else download_artifacts(artifact_uri=model, dst_path=scratch))
        found = {side: _times(partial(_time, directory, huge), processes, rounds) for side, huge in _SIDES.items()}
    figures = {side: {**_figures(of_side), "processes": of_side} for side, of_side in found.items()}
    _print(figures)
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=1))


def _child() -> ProcessPoolExecutor:
    """A process that lives on between two calls."""
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def _times(time: Callable[[], dict[str, float]], processes: int, rounds: int) -> list[dict[str, float]]:
    """Medians of the rounds of each process."""
    with ExitStack() as stack:
        children = [stack.enter_context(_child()) for _ in range(processes)]
        timed = [[child.submit(time).result() for child in children] for _ in range(rounds)]
    found = []
    for of_process in zip(*timed, strict=True):
        whole = [round_ for round_ in of_process if round_["waited"] < _SHARED]
        figures = {name: median(round_[name] for round_ in whole or of_process) for name in of_process[0]}
        found.append({**figures, "left_out": len(of_process) - len(whole)})
    return found


def _time(directory: Path, huge_pages: bool) -> dict[str, float]:
    """Times a model in this process."""
    model = _model(directory, huge_pages)
    inputs = random_inputs(model.inputs, 0)
    with watched() as waiting:
        calls_s, _ = measure_watched(lambda: model.run(inputs), warm_up_s=_WARM_UP_S, measure_s=_MEASURE_S)
    return {
        "latency_ms": median(calls_s) * 1e3,
        "waited": waiting.share,
        "huge_mib": model.huge_pages.got_bytes / 2**20,
        "memory_mib": psutil.Process().memory_info().rss / 2**20,
    }


@cache
def _model(directory: Path, huge_pages: bool) -> TunedModel:
    """The model, which a process loads once."""
    from ansor_mlflow import flavor

    return flavor.load_model(str(directory), huge_pages=huge_pages)


def _figures(processes: list[dict[str, float]]) -> dict[str, float]:
    medians = [process["latency_ms"] for process in processes]
    return {
        "median_ms": median(medians),
        "p90_over_median": float(np.percentile(medians, 90)) / median(medians),
        "max_over_median": max(medians) / median(medians),
        "memory_mib": median(process["memory_mib"] for process in processes),
        "huge_mib": median(process["huge_mib"] for process in processes),
        "left_out": sum(process["left_out"] for process in processes),
    }


def _print(figures: dict[str, dict[str, Any]]) -> None:
    table = Table("", "median ms", "p90 / median", "max / median", "memory MiB", "huge MiB", "left out")
    for side, found in figures.items():
        table.add_row(
            side,
            f"{found['median_ms']:.4g}",
            f"{found['p90_over_median']:.3f}",
            f"{found['max_over_median']:.3f}",
            f"{found['memory_mib']:.0f}",
            f"{found['huge_mib']:.0f}",
            str(found["left_out"]),
        )
    Console().print(table)


if __name__ == "__main__":
    main()
