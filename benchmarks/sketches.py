"""How near to the peak the programs of our sketches come, the first and the best of a few, and what the network takes.

python benchmarks/sketches.py --networks resnet-18,resnet-50 --json result.json
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Literal, cast

import click
import mlflow
import numpy as np
from rich.console import Console
from rich.table import Table

import ansor_mlflow
from ansor_mlflow import names
from ansor_mlflow.device import Device
from ansor_mlflow.lowering import TuningTask, lower
from ansor_mlflow.networks import load_network
from ansor_mlflow.settings import Dtype, LoweringSettings
from ansor_mlflow.sketches import Products, find_programs, products_of
from ansor_mlflow.tensors import random_inputs
from ansor_mlflow.tuning import Outcome, Roofline, measure_roofline
from ansor_mlflow.workers import Builder, LocalBuilder, RunJob
from ansor_mlflow.workers.measure import MeasureSettings, arg_info
from ansor_mlflow.workers.runner import LocalRunner

if TYPE_CHECKING:
    from tvm.s_tir.meta_schedule.database import JSONDatabase
    from tvm.target import Target

_SEED = 0
_TURNS = 5
_NUM_INPUTS = 8
"""Inputs to quantise with."""
_MIN_FLOPS = 1e6
"""Operations of a task whose share of the peak is shown."""


Space = Literal["sketches", "metaschedule", "both"]


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A task and its programs, as they were measured in turns after a tuning: single measurements mislead."""

    name: str
    weight: int
    flops: float
    first_us: float
    """Of the program that comes first."""
    best_us: float
    """Of the fastest of a few."""
    peak_gflops: float
    """Of products of its types."""

    @property
    def is_sum(self) -> bool:
        """Whether it is a convolution or a product of matrices."""
        return self.flops >= _MIN_FLOPS and any(word in self.name for word in ("conv", "matmul", "dense"))

    @property
    def shortest_us(self) -> float:
        """What it takes at the peak."""
        return self.flops / self.peak_gflops / 1e3


@click.command(context_settings={"show_default": True})
@click.option("--networks", default="resnet-18,resnet-50", help="Networks, with commas between them.")
@click.option("--trials-per-task", default=8, help="Trials of each task.")
@click.option("--space", default="sketches", help="Where they are searched; see the parameter of tune.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "int8"]), default="float32", help="int8 quantises.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="File for all figures.")
def main(networks: str, trials_per_task: int, space: Space, dtype: Products, json_file: Path | None) -> None:
    """Tune each network a little, and show what share of the peak its kernels reach."""
    device = Device.resolve("auto", "auto")
    roofline = measure_roofline(device)
    found: dict[str, object] = {"roofline": asdict(roofline)}
    for network in networks.split(","):
        with tempfile.TemporaryDirectory() as directory:
            file = _quantized(network, Path(directory)) if dtype == "int8" else network
            computed: Dtype = "bfloat16" if dtype == "bfloat16" else "float32"
            kernels = _kernels(file, trials_per_task, space, device, computed, roofline)
        Console().print(_table(network, kernels))
        found[network] = {"kernels": [asdict(kernel) for kernel in kernels], **_together(kernels)}
        if json_file is not None:
            json_file.write_text(json.dumps(found, indent=1))


def _quantized(network: str, directory: Path) -> str:
    """The network in 8 bits, whatever it loses, as its random weights are no evidence of that."""
    data, output = directory / "data.npz", directory / f"{Path(network).stem}.onnx"
    specs = load_network(network).inputs
    rows = [random_inputs(specs, _SEED + row) for row in range(_NUM_INPUTS)]
    inputs = {spec.name: np.concatenate([row[spec.name] for row in rows]) for spec in specs}
    np.savez(data, allow_pickle=False, **inputs)
    ansor_mlflow.quantize(network=network, data=str(data), output=str(output), quantize_max_loss=1e9)
    return str(output)


def _kernels(
    network: str, trials_per_task: int, space: Space, device: Device, dtype: Dtype, roofline: Roofline
) -> list[Kernel]:
    """The tasks with their programs, after a tuning with a few trials."""
    tasks = lower(load_network(network).model, device.target, LoweringSettings(algorithm="direct", dtype=dtype)).tasks
    with tempfile.TemporaryDirectory() as directory:
        database = _tune(network, trials_per_task * len(tasks), trials_per_task, space, dtype, Path(directory))
        builder = LocalBuilder(device.target, max_workers=device.num_threads, timeout_s=60, as_in_models=True)
        settings = MeasureSettings(
            number=3, repeat=1, min_repeat_ms=20, cache_flush=False, num_threads=device.num_threads, timeout_s=30
        )
        with closing(builder), closing(LocalRunner(settings)) as runner:
            jobs = [_jobs(task, database, device.target, builder) for task in tasks]
            turns = [[runner.run(of_task) for of_task in jobs] for _ in range(_TURNS)]
    return [_kernel(task, outcomes, roofline) for task, outcomes in zip(tasks, zip(*turns, strict=True), strict=True)]


def _tune(network: str, trials: int, trials_per_task: int, space: Space, dtype: Dtype, directory: Path) -> JSONDatabase:
    """The records of a tuning with a tracking store of its own."""
    from tvm.s_tir.meta_schedule.database import JSONDatabase

    mlflow.set_tracking_uri(f"sqlite:///{directory}/mlflow.db")
    mlflow.create_experiment(Path(network).stem, artifact_location=Path(directory, "artifacts").as_uri())
    mlflow.set_experiment(Path(network).stem)
    tuned = ansor_mlflow.tune(
        network,
        trials=trials,
        trials_per_task=trials_per_task,
        num_trials_per_round=trials_per_task,
        space=space,
        dtype=dtype,
        seed=_SEED,
    )
    records = mlflow.artifacts.download_artifacts(run_id=tuned.run_id, artifact_path=names.RECORDS_DIR)
    return JSONDatabase(work_dir=records)


def _jobs(task: TuningTask, database: JSONDatabase, target: Target, builder: Builder) -> list[RunJob]:
    """The first program of a task and the fastest record, built."""
    from tvm.s_tir.meta_schedule.arg_info import ArgInfo

    programs = find_programs(task.mod, target)
    first = programs.first() if programs else None
    best = database.query_schedule(task.mod, target, task.info.name)
    mods = [schedule.mod for schedule in (first or best, best)]
    return [
        RunJob(cast("Path", built.value), tuple(map(arg_info, ArgInfo.from_entry_func(mod, remove_preproc=True))))
        for mod, built in zip(mods, builder.build(mods), strict=True)
    ]


def _kernel(task: TuningTask, turns: Sequence[Sequence[Outcome[tuple[float, ...]]]], roofline: Roofline) -> Kernel:
    """A task's programs in their fastest turns: what disturbs a measurement only slows it down."""
    first_s, best_s = (min(fmean(cast("tuple[float, ...]", turn[number].value)) for turn in turns) for number in (0, 1))
    return Kernel(
        name=task.info.name,
        weight=task.info.weight,
        flops=task.info.flops,
        first_us=first_s * 1e6,
        best_us=best_s * 1e6,
        peak_gflops=roofline.peak(products_of(task.mod)) / 1e9,
    )


def _together(kernels: Sequence[Kernel]) -> dict[str, float]:
    """Milliseconds of the network as the sum of its kernels, and shares of the peak of all that compute by sums."""
    together = {
        "first_ms": sum(kernel.weight * kernel.first_us for kernel in kernels) / 1e3,
        "best_ms": sum(kernel.weight * kernel.best_us for kernel in kernels) / 1e3,
    }
    summing = [kernel for kernel in kernels if kernel.is_sum]
    if not summing:
        return together
    shortest_us = sum(kernel.weight * kernel.shortest_us for kernel in summing)
    return together | {
        "first_share": shortest_us / sum(kernel.weight * kernel.first_us for kernel in summing),
        "best_share": shortest_us / sum(kernel.weight * kernel.best_us for kernel in summing),
    }


def _table(network: str, kernels: Sequence[Kernel]) -> Table:
    together = _together(kernels)
    title = f"{network}: {together['first_ms']:.3g} ms with the first programs, {together['best_ms']:.3g} with the best"
    if "best_share" in together:
        shares = f"{together['first_share']:.0%} and {together['best_share']:.0%}"
        title += f"; convolutions and products reach {shares} of their peaks"
    table = Table("task", "weight", "MFLOP", "first µs", "of peak", "best µs", "of peak", title=title)
    for kernel in (kernel for kernel in kernels if kernel.is_sum):
        table.add_row(
            kernel.name,
            str(kernel.weight),
            f"{kernel.flops / 1e6:.1f}",
            f"{kernel.first_us:.1f}",
            f"{kernel.shortest_us / kernel.first_us:.0%}",
            f"{kernel.best_us:.1f}",
            f"{kernel.shortest_us / kernel.best_us:.0%}",
        )
    return table


if __name__ == "__main__":
    main()
