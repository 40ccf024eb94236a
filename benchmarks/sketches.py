"""How near to the peak the programs of our sketches come, the first and the best of a few, and what the network takes.

python benchmarks/sketches.py --networks resnet-18,resnet-50 --json result.json
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import mlflow
from rich.console import Console
from rich.table import Table

import ansor_mlflow
from ansor_mlflow.device import Device
from ansor_mlflow.tuning import measure_roofline

_SEED = 0
_MIN_FLOPS = 1e6
"""Operations of a task whose share of the peak is shown."""


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A task after a few trials."""

    name: str
    weight: int
    flops: float
    first_us: float
    """Of the program that comes first."""
    best_us: float

    @property
    def is_sum(self) -> bool:
        """Whether it is a convolution or a product of matrices."""
        return self.flops >= _MIN_FLOPS and any(word in self.name for word in ("conv", "matmul", "dense"))

    def gflops(self, microseconds: float) -> float:
        """GFLOP/s of a call that takes so long."""
        return self.flops / microseconds / 1e3


@click.command(context_settings={"show_default": True})
@click.option("--networks", default="resnet-18,resnet-50", help="Networks, with commas between them.")
@click.option("--trials-per-task", default=8, help="Trials of each task.")
@click.option("--space", default="sketches", help="Where they are searched; see the parameter of tune.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="File for all figures.")
def main(networks: str, trials_per_task: int, space: str, json_file: Path | None) -> None:
    """Tune each network a little, and show what share of the peak its kernels reach."""
    peak = measure_roofline(Device.resolve("auto", "auto")).peak_flops_per_s / 1e9
    found: dict[str, object] = {"peak_gflops": peak}
    for network in networks.split(","):
        kernels = _tune(network, trials_per_task, space)
        Console().print(_table(network, kernels, peak))
        found[network] = {"kernels": [asdict(kernel) for kernel in kernels], **_together(kernels, peak)}
        if json_file is not None:
            json_file.write_text(json.dumps(found, indent=1))


def _tune(network: str, trials_per_task: int, space: str) -> list[Kernel]:
    """The tasks, after a tuning with a tracking store of its own."""
    with tempfile.TemporaryDirectory() as directory:
        mlflow.set_tracking_uri(f"sqlite:///{directory}/mlflow.db")
        mlflow.create_experiment(network, artifact_location=Path(directory, "artifacts").as_uri())
        mlflow.set_experiment(network)
        num_tasks = len(ansor_mlflow.plan(network).tasks)
        tuned = ansor_mlflow.tune(
            network,
            trials=trials_per_task * num_tasks,
            trials_per_task=trials_per_task,
            num_trials_per_round=trials_per_task,
            space=space,
            seed=_SEED,
        )
        trials = ansor_mlflow.load_trials(tuned.run_id)
        tasks = json.loads(mlflow.artifacts.load_text(f"runs:/{tuned.run_id}/tasks.json"))
    measured = trials[trials["status"] == "ok"]
    of_task = {name: list(rows["latency_us"]) for name, rows in measured.groupby("task")}
    return [
        Kernel(
            name=task["task"],
            weight=task["weight"],
            flops=task["flops"],
            first_us=of_task[task["task"]][0],
            best_us=min(of_task[task["task"]]),
        )
        for task in tasks
    ]


def _together(kernels: Sequence[Kernel], peak: float) -> dict[str, float]:
    """Milliseconds of the network as the sum of its kernels, and shares of the peak of all that compute by sums."""
    summing = [kernel for kernel in kernels if kernel.is_sum]
    flops = sum(kernel.weight * kernel.flops for kernel in summing)
    return {
        "first_ms": sum(kernel.weight * kernel.first_us for kernel in kernels) / 1e3,
        "best_ms": sum(kernel.weight * kernel.best_us for kernel in kernels) / 1e3,
        "first_share": flops / sum(kernel.weight * kernel.first_us for kernel in summing) / 1e3 / peak,
        "best_share": flops / sum(kernel.weight * kernel.best_us for kernel in summing) / 1e3 / peak,
    }


def _table(network: str, kernels: Sequence[Kernel], peak: float) -> Table:
    together = _together(kernels, peak)
    title = (
        f"{network}, peak {peak:.0f} GFLOP/s: convolutions and products {together['first_share']:.0%} of it with the "
        f"first programs, {together['best_share']:.0%} with the best; the network {together['first_ms']:.3g} and "
        f"{together['best_ms']:.3g} ms"
    )
    table = Table("task", "weight", "MFLOP", "first µs", "of peak", "best µs", "of peak", title=title)
    for kernel in (kernel for kernel in kernels if kernel.is_sum):
        table.add_row(
            kernel.name,
            str(kernel.weight),
            f"{kernel.flops / 1e6:.1f}",
            f"{kernel.first_us:.1f}",
            f"{kernel.gflops(kernel.first_us) / peak:.0%}",
            f"{kernel.best_us:.1f}",
            f"{kernel.gflops(kernel.best_us) / peak:.0%}",
        )
    return table


if __name__ == "__main__":
    main()
