"""How fast networks run: untuned, tuned by us, and in every runtime that could be taken instead.

    python benchmarks/latency.py --networks resnet-18,mobilenet_v2 --json result.json --picture latency.png

Each contender runs in a process of its own, in alternating turns; see benchmarks/README.md for what the figures mean.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import click
from latency_parts.contenders import Turn, contenders_of, time_turn
from rich.console import Console
from rich.table import Table

from ansor_mlflow.device import Device
from ansor_mlflow.errors import AnsorMlflowError
from ansor_mlflow.foreign import figure
from ansor_mlflow.measuring import (
    MachineNoise,
    MakeInference,
    allowed_error,
    call_once,
    deviation_of,
    expected_of,
    version_of,
)
from ansor_mlflow.measuring.rivals import RIVALS, rival_titles
from ansor_mlflow.model import Manifest
from ansor_mlflow.names import NETWORK_FILE
from ansor_mlflow.processes import in_child_process
from ansor_mlflow.settings import LoweringSettings
from ansor_mlflow.tensors import Arrays, random_inputs

if TYPE_CHECKING:
    from ansor_mlflow.tuning import Roofline

_SEED = 0
_TOLERANCE = 1e-3
"""What a contender may be off at least."""
_COLUMNS = {
    "latency_ms": ("ms", "{:.4g}"),
    "spread": ("±", "{:.1%}"),
    "ratio_to_best": ("/ best rival", "{:.2f}"),
    "gflops_per_s": ("GFLOP/s", "{:.1f}"),
    "roofline_share": ("roofline", "{:.0%}"),
    "load_s": ("load s", "{:.2f}"),
    "peak_memory_mib": ("MiB", "{:.0f}"),
}


@dataclass
class Measured:
    """The turns of a contender."""

    samples_s: list[list[float]] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)


@click.command(context_settings={"show_default": True})
@click.option("--networks", default="resnet-18,mobilenet_v2,bert-tiny", help="Networks, with commas between them.")
@click.option("--trials", default="auto", help="Trials of each tuning, as of tune.")
@click.option("--dtype", default="float32", help="Type that the networks are computed in, as of tune.")
@click.option("--turns", default=5, type=click.IntRange(min=1))
@click.option("--untuned/--no-untuned", default=True, help="Whether TVM's own build is timed, which may take minutes.")
@click.option(
    "--work-directory",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where tuned models stay for the next time; by default they are not kept.",
)
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="File for all figures.")
@click.option("--picture", type=click.Path(dir_okay=False, path_type=Path), help="PNG file for the ratios.")
def main(
    networks: str,
    trials: str,
    dtype: str,
    turns: int,
    untuned: bool,
    work_directory: Path | None,
    json_file: Path | None,
    picture: Path | None,
) -> None:
    """Tune networks, and time them against their rivals."""
    from serving_parts.models import tuned_model  # loads much, and every process that is timed imports this file

    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="latency-") as scratch:
        directory = (work_directory or Path(scratch, "work")).resolve()
        directory.mkdir(parents=True, exist_ok=True)
        for network in networks.split(","):
            own = Path(scratch, f"network{len(results)}")
            own.mkdir()
            model = tuned_model(network, trials, directory, dtype)
            builds = {"untuned": untuned, "no trials": trials != "0"}
            results.append(_measure(network, model, [name for name in builds if builds[name]], turns, own, directory))
            _show(results[-1])
            if json_file:
                json_file.write_text(json.dumps(results, indent=1))
    if picture:
        _draw(results, picture)


def _measure(
    network: str, model: Path, builds: Sequence[str], turns: int, scratch: Path, work_directory: Path
) -> dict[str, Any]:
    from ansor_mlflow.tuning import measure_roofline  # as above

    manifest = Manifest.read(model)
    (entry,) = manifest.libraries
    num_threads = entry.fingerprint.num_threads
    inputs = random_inputs(manifest.inputs, _SEED)
    settings = LoweringSettings.among(entry.provenance)
    device = Device.resolve("auto", num_threads)
    roofline = measure_roofline(device)
    flops, bound_s = in_child_process(call_once, partial(_cost, model / NETWORK_FILE, num_threads, settings, roofline))
    (expected,) = expected_of(model / NETWORK_FILE, num_threads, [inputs])
    timed: dict[str, MakeInference] = {}
    absent: dict[str, str] = {}
    for name, make_inference in contenders_of(model, builds, scratch):
        try:
            error = deviation_of(make_inference, [inputs], [expected]).max_rel_error
        except AnsorMlflowError as err:
            absent[name] = str(err)
            continue
        if error <= max(
            _TOLERANCE, allowed_error(error, "auto", model / NETWORK_FILE, settings.dtype, num_threads, [inputs])
        ):
            timed[name] = make_inference
        else:
            absent[name] = f"its outputs are wrong: max_rel_error={error:.3g}"
    noise = MachineNoise()
    measured = _in_turns(timed, inputs, turns, noise)
    figures = {name: _figures(found, flops, bound_s) for name, found in measured.items()}
    rivals = [name for name in figures if name in RIVALS]  # none where the outputs of all are wrong
    best = min(rivals, key=lambda name: figures[name]["latency_ms"], default=None)
    for name, found in figures.items():
        found["ratio_to_best"] = None if best is None else _ratio(measured[name], measured[best])
        found["version"] = version_of(name) if name in RIVALS else None
    return {
        "network": network,
        "num_threads": num_threads,
        "target": entry.fingerprint.target,
        "tuning_s": _tuning_s(entry.provenance, work_directory),
        "gflop": flops / 1e9,
        "peak_gflops_per_s": roofline.peak_flops_per_s / 1e9,
        "bandwidth_gb_per_s": roofline.bandwidth_bytes_per_s / 1e9,
        "best_rival": best,
        "contenders": figures,
        "absent": absent,
        "probe_spread": noise.spread,
        "unreliable": noise.unreliable,
    }


def _in_turns(
    contenders: Mapping[str, MakeInference], inputs: Arrays, turns: int, noise: MachineNoise
) -> dict[str, Measured]:
    """Times every contender once in each turn; every second turn begins with the last one."""
    measured = {name: Measured() for name in contenders}
    for turn in range(turns):
        click.echo(f"turn {turn + 1} of {turns}", err=True)
        for name in list(contenders)[:: 1 if turn % 2 == 0 else -1]:
            samples_s = noise.measure(partial(_time, contenders[name], inputs, measured[name].turns))
            measured[name].samples_s.append(samples_s)
    return measured


def _time(make_inference: MakeInference, inputs: Arrays, turns: list[Turn]) -> tuple[list[float], float]:
    turns.append(time_turn(make_inference, inputs))
    return turns[-1].samples_s, turns[-1].waited


def _figures(measured: Measured, flops: float, bound_s: float) -> dict[str, Any]:
    medians_s = [median(samples_s) for samples_s in measured.samples_s]
    latency_s = median(medians_s)
    return {
        "latency_ms": latency_s * 1e3,
        "spread": (max(medians_s) - min(medians_s)) / latency_s / 2,
        "turns_ms": [seconds * 1e3 for seconds in medians_s],
        "gflops_per_s": flops / latency_s / 1e9,
        "roofline_share": bound_s / latency_s,
        "load_s": median(turn.load_s for turn in measured.turns),
        "peak_memory_mib": max(turn.peak_memory_bytes for turn in measured.turns) / 2**20,
    }


def _ratio(measured: Measured, best: Measured) -> float:
    """The median of the ratios in each turn, which the machine's drift leaves alone."""
    pairs = zip(measured.samples_s, best.samples_s, strict=True)
    return median(median(own) / median(of_best) for own, of_best in pairs)


def _cost(
    network: Path, num_threads: int, settings: LoweringSettings, roofline: Roofline
) -> Callable[[], tuple[float, float]]:
    """FLOPs of a call, and the least seconds that the roofline leaves for its tasks, computed as they are defined."""

    def count() -> tuple[float, float]:
        import onnx

        from ansor_mlflow.lowering import lower
        from ansor_mlflow.sketches import products_of
        from ansor_mlflow.workers import argument_bytes

        target, directly = Device.resolve("auto", num_threads).target, replace(settings, algorithm="direct")
        tasks = lower(onnx.load(network), target, directly).tasks
        flops = sum(task.info.weight * task.info.flops for task in tasks)
        bounds = (
            task.info.weight
            * roofline.bound(task.info.flops, argument_bytes(task.mod), products_of(task.mod)).shortest_s
            for task in tasks
        )
        return flops, sum(bounds)

    return count


def _tuning_s(provenance: Mapping[str, Any], work_directory: Path) -> float:
    """Seconds from the start to the end of the tuning's run."""
    import mlflow

    run = mlflow.MlflowClient(f"sqlite:///{work_directory / 'mlflow.db'}").get_run(provenance["tune_run"])
    return float(run.info.end_time - run.info.start_time) / 1e3


def _show(result: Mapping[str, Any]) -> None:
    title = (
        f"{result['network']}, {result['num_threads']} threads, {result['gflop']:.2f} GFLOP, tuned in "
        f"{result['tuning_s'] / 60:.1f} minutes"
    )
    table = Table("", *(header for header, _ in _COLUMNS.values()), title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, figures in result["contenders"].items():
        table.add_row(_called(name), *(figure(figures[key], form) for key, (_, form) in _COLUMNS.items()))
    console = Console()
    console.print(table)
    for name, reason in result["absent"].items():
        console.print(f"{_called(name)} is not timed: {reason}", markup=False)
    if result["unreliable"]:
        console.print(f"the times cannot be trusted: {result['unreliable']}", markup=False)


def _called(name: str) -> str:
    return rival_titles().get(name, name)


def _draw(results: list[dict[str, Any]], path: Path) -> None:
    """Draws for each network how long each contender takes over the best rival; shorter bars are faster."""
    import numpy as np
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for result in results for name in result["contenders"]))
    figure = Figure(figsize=(10, 1.5 + 0.3 * len(results) * len(names)), dpi=110, layout="constrained")
    axes = figure.subplots()
    height = 0.8 / len(names)
    for number, name in enumerate(names):
        rows = [row for row, result in enumerate(results) if name in result["contenders"] and result["best_rival"]]
        ratios = [results[row]["contenders"][name]["ratio_to_best"] for row in rows]
        bars = axes.barh(np.array(rows) + number * height, ratios, height, label=_called(name))
        axes.bar_label(bars, [f"{ratio:.2f}" for ratio in ratios], padding=3, fontsize=8)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(np.arange(len(results)) + 0.4 - height / 2, [result["network"] for result in results])
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="latency over that of the best rival; shorter is faster")
    axes.margins(x=0.15)
    figure.legend(loc="outside lower center", ncols=len(names))
    figure.savefig(path, format="png", facecolor="white")


if __name__ == "__main__":
    main()
