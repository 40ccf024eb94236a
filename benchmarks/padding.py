"""Channel padding: a convolution of AlexNet with 384 and with 386 output channels, padded and not.

    python benchmarks/padding.py --json result.json

Each variant is tuned with the same number of trials and the same seeds; the compiled layers are timed in alternating
turns.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import click
from rich.console import Console
from rich.table import Table

from ansor_mlflow.device import Device, resolve_num_threads, set_num_threads
from ansor_mlflow.measuring import call_once, measure_in_turns
from ansor_mlflow.networks import load_network
from ansor_mlflow.processes import in_child_process
from ansor_mlflow.settings import LoweringSettings
from ansor_mlflow.tensors import random_inputs

_SPEC = "conv2d:1,13,13,{channels},192,3,3,1,1"
"""The third convolution of AlexNet has 384 (Krizhevsky et al., 2012)."""
_VARIANTS: dict[str, tuple[int, Literal["auto", "off"]]] = {
    "384 channels": (384, "off"),
    "386 channels": (386, "off"),
    "386 channels, padded": (386, "auto"),
}


@click.command(context_settings={"show_default": True})
@click.option("--trials", default=256, type=click.IntRange(min=1), help="Programs that are measured in each tuning.")
@click.option("--seeds", default="0,1,2", help="Seeds of the tunings of each variant, with commas between them.")
@click.option("--turns", default=7, type=click.IntRange(min=1), help="Fresh processes in which each variant is timed.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="File for the figures.")
def main(trials: int, seeds: str, turns: int, json_file: Path | None) -> None:
    """Compare a layer whose channels tile well with one whose channels do not.

    A search may have luck, so that each variant is tuned with several seeds and its median counts.
    """
    numbers = [int(seed) for seed in seeds.split(",")]
    with tempfile.TemporaryDirectory(prefix="padding-") as directory:
        calls: dict[str, Callable[[], Callable[[], Any]]] = {}
        for name, (channels, padding) in _VARIANTS.items():
            for seed in numbers:
                click.echo(f"tuning: {name}, seed {seed}", err=True)
                library = Path(directory) / f"{len(calls)}" / "model.so"
                in_child_process(call_once, partial(_tuning, channels, padding, trials, seed, library))
                calls[f"{name}, {seed}"] = partial(_call, channels, seed, library)
        latencies = measure_in_turns(calls, turns)
    tuned_ms = {name: [latencies[f"{name}, {seed}"].median_ms for seed in numbers] for name in _VARIANTS}
    plain_ms = median(tuned_ms["384 channels"])
    figures = {
        name: {"tuned_ms": values, "latency_ms": median(values), "ratio_to_384": median(values) / plain_ms}
        for name, values in tuned_ms.items()
    }
    _show(figures)
    if json_file is not None:
        settings = {"trials": trials, "seeds": numbers, "turns": turns}
        json_file.write_text(json.dumps({**settings, "variants": figures}, indent=1))


def _tuning(
    channels: int, padding: Literal["auto", "off"], trials: int, seed: int, library: Path
) -> Callable[[], None]:
    return partial(_tune, channels, padding, trials, seed, library)


def _tune(channels: int, padding: Literal["auto", "off"], trials: int, seed: int, library: Path) -> None:
    """Runs in a child process."""
    from ansor_mlflow import names
    from ansor_mlflow.device import resolve_target
    from ansor_mlflow.lowering import lower
    from ansor_mlflow.model import compile_tuned
    from ansor_mlflow.parameters import MeasureOptions, SearchOptions
    from ansor_mlflow.tuning import TuningJob, tune_job

    num_threads = resolve_num_threads("auto")
    target = resolve_target("auto", num_threads)
    network = load_network(_SPEC.format(channels=channels), seed=seed)
    lowered = lower(network.model, target, LoweringSettings(pad_channels=padding))
    records = library.parent / names.RECORDS_DIR
    records.mkdir(parents=True)
    job = TuningJob(network=network.name, lowered=lowered, device=Device.of(target, num_threads), records=records)
    tune_job(job, SearchOptions(trials=trials, seed=seed), MeasureOptions())
    compile_tuned(lowered, target, records / names.BEST_DIR, library)


def _call(channels: int, seed: int, library: Path) -> Callable[[], Any]:
    """Runs in a child process."""
    from tvm import cpu, relax, runtime

    set_num_threads(resolve_num_threads("auto"))
    network = load_network(_SPEC.format(channels=channels), seed=seed)
    machine = relax.VirtualMachine(runtime.load_module(str(library)), cpu())
    return partial(
        machine["main"], *[runtime.tensor(values) for values in random_inputs(network.inputs, seed).values()]
    )


def _show(figures: dict[str, dict[str, Any]]) -> None:
    table = Table("layer", "latency, ms", "over 384 channels")
    for name, row in figures.items():
        table.add_row(name, f"{row['latency_ms']:.3f}", f"{row['ratio_to_384']:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
