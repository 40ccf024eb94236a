"""The zoo: every built-in network and operator is lowered in both layouts, run untuned, and compared with ONNX Runtime.

    python benchmarks/zoo.py --json result.json --markdown table.md
    python benchmarks/zoo.py --catalogue ansor_mlflow/networks/families/catalogue.json

Some are tuned as well, with a few trials for each task, and compared again. With `--catalogue` the built-in networks
are only counted: parameters, floating point operations and tasks, which `ansor-mlflow networks` lists.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import click
import numpy as np
from rich.console import Console

from ansor_mlflow.device import Device, resolve_num_threads
from ansor_mlflow.measuring import TOLERANCES, call_once, compare_outputs
from ansor_mlflow.networks import BUILTIN_NETWORKS, Network, load_network
from ansor_mlflow.processes import in_child_process
from ansor_mlflow.settings import LoweringSettings

OPERATORS = (
    "conv2d:1,7,7,512,512,3,3,1,1",
    "conv2d:1,28,28,64,64,3,3,1,2,dilation=2,groups=4,bias,relu",
    "depthwise_conv2d:1,56,56,64,3,3,1,1",
    "conv3d:1,8,28,28,32,16,3,3,3,1,1",
    "dense:16,512,512",
    "batch_matmul:8,64,64,64",
    "softmax:64,1000",
)
"""One of each kind."""
TUNED = ("resnet-18", "mobilenet_v2", "squeezenet_v1.1", "bert-tiny", OPERATORS[0])
_LAYOUTS: tuple[Literal["NHWC", "NCHW"], ...] = ("NHWC", "NCHW")
_SEED = 0


@click.command(context_settings={"show_default": True})
@click.option("--names", default=",,".join((*BUILTIN_NETWORKS, *OPERATORS)), help="What to check, with ,, between.")
@click.option("--tuned", default=",,".join(TUNED), help="Which of them to tune as well.")
@click.option("--trials-per-task", default=8, type=click.IntRange(min=1))
@click.option("--dtypes", default="float32", help="Types to compute in, with commas between them.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="File for all figures.")
@click.option("--markdown", type=click.Path(dir_okay=False, path_type=Path), help="File for the table.")
@click.option("--catalogue", type=click.Path(dir_okay=False, path_type=Path), help="File for the counts; no checks.")
def main(
    names: str,
    tuned: str,
    trials_per_task: int,
    dtypes: str,
    json_file: Path | None,
    markdown: Path | None,
    catalogue: Path | None,
) -> None:
    """Check networks and operators against ONNX Runtime."""
    console = Console()
    if catalogue is not None:
        counts = {name: in_child_process(call_once, partial(_counting, name)) for name in BUILTIN_NETWORKS}
        catalogue.write_text(json.dumps(counts, indent=1) + "\n")
        return
    rows: list[dict[str, Any]] = []
    for name in names.split(",,"):
        trials = trials_per_task if name in tuned.split(",,") else 0
        rows.append(_row(name, trials, dtypes.split(",")))
        console.print(_line(rows[-1]), markup=False, highlight=False)
        if json_file is not None:
            json_file.write_text(json.dumps(rows, indent=1))
        if markdown is not None:
            markdown.write_text("\n".join([*_HEAD, *map(_line, rows)]) + "\n")
    failed = [row["name"] for row in rows if not row["equal"]]
    if failed:
        raise click.ClickException(f"not equal to ONNX Runtime: {', '.join(failed)}")


def _row(name: str, trials_per_task: int, dtypes: Sequence[str]) -> dict[str, Any]:
    """Checks one network or operator, each way in a process of its own."""
    row: dict[str, Any] = {"name": name, **in_child_process(call_once, partial(_counting, name))}
    for dtype in dtypes:
        for layout in _LAYOUTS:
            way = in_child_process(call_once, partial(_untuned, name, layout, dtype))
            row[f"{layout}/{dtype}"] = way
            row["equal"] = row.get("equal", True) and way["max_rel_error"] <= TOLERANCES[dtype]
    row["tuned"] = None
    if trials_per_task:
        row["tuned"] = in_child_process(call_once, partial(_tuned, name, trials_per_task))
        row["equal"] &= row["tuned"]["max_rel_error"] <= TOLERANCES["float32"]
    return row


# -- in child processes ----------------------------------------------------------------------------------------------


def _counting(name: str) -> Callable[[], dict[str, Any]]:
    def count() -> dict[str, Any]:
        from ansor_mlflow.device import resolve_target
        from ansor_mlflow.lowering import lower

        network = load_network(name, seed=_SEED)
        lowered = lower(network.model, resolve_target("llvm", 1), LoweringSettings(algorithm="direct"))
        tasks = [task.info for task in lowered.tasks]
        return {
            "inputs": {spec.name: list(spec.shape) for spec in network.inputs},
            "parameters": network.num_parameters,
            "flops": sum(task.flops * task.weight for task in tasks),
            "tasks": len(tasks),
        }

    return count


def _untuned(name: str, layout: Literal["NHWC", "NCHW"], dtype: Any) -> Callable[[], dict[str, Any]]:
    def check() -> dict[str, Any]:
        from ansor_mlflow.device import resolve_target
        from ansor_mlflow.lowering import lower
        from ansor_mlflow.model import compile_untuned

        num_threads = resolve_num_threads("auto")
        target = resolve_target("auto", num_threads)
        network = load_network(name, seed=_SEED)
        started_s = time.monotonic()
        lowered = lower(network.model, target, LoweringSettings(layout=layout, dtype=dtype))
        lowering_s = time.monotonic() - started_s
        with tempfile.TemporaryDirectory() as directory:
            library = Path(directory) / "model.so"
            compile_untuned(lowered, target, library)
            error = _max_rel_error(network, library, num_threads)
        return {"tasks": len(lowered.tasks) - lowered.num_algorithms, "lowering_s": lowering_s, "max_rel_error": error}

    return check


def _tuned(name: str, trials_per_task: int) -> Callable[[], dict[str, Any]]:
    def check() -> dict[str, Any]:
        from ansor_mlflow import names
        from ansor_mlflow.device import resolve_target
        from ansor_mlflow.lowering import lower
        from ansor_mlflow.model import compile_tuned
        from ansor_mlflow.parameters import MeasureOptions, SearchOptions
        from ansor_mlflow.tuning import TuningJob, tune_job

        num_threads = resolve_num_threads("auto")
        target = resolve_target("auto", num_threads)
        network = load_network(name, seed=_SEED)
        lowered = lower(network.model, target)
        with tempfile.TemporaryDirectory() as directory:
            records, library = Path(directory) / names.RECORDS_DIR, Path(directory) / "model.so"
            records.mkdir()
            job = TuningJob(
                network=network.name, lowered=lowered, device=Device.of(target, num_threads), records=records
            )
            trials = trials_per_task * len(lowered.tasks)
            search = SearchOptions(trials=trials, trials_per_task=trials_per_task, seed=_SEED)
            started_s = time.monotonic()
            result = tune_job(job, search, MeasureOptions())
            tuning_s = time.monotonic() - started_s
            coverage = compile_tuned(lowered, target, records / names.BEST_DIR, library)
            error = _max_rel_error(network, library, num_threads)
        return {
            "trials": result.total_trials,
            "tuning_s": tuning_s,
            "coverage": coverage.task_share,
            "max_rel_error": error,
        }

    return check


def _max_rel_error(network: Network, library: Path, num_threads: int) -> float:
    """The error of a library against ONNX Runtime on seeded inputs; see `ansor_mlflow.measuring.Deviation`."""
    import onnx
    from tvm import cpu, relax, runtime

    from ansor_mlflow.device import set_num_threads
    from ansor_mlflow.measuring import ReferenceSession
    from ansor_mlflow.tensors import random_inputs

    onnx_file = library.with_suffix(".onnx")
    onnx.save_model(network.model, str(onnx_file))
    inputs = random_inputs(network.inputs, _SEED)
    expected = ReferenceSession(onnx_file, num_threads).run(inputs)
    set_num_threads(num_threads)
    machine = relax.VirtualMachine(runtime.load_module(str(library)), cpu())
    result = machine["main"](*[runtime.tensor(np.ascontiguousarray(inputs[spec.name])) for spec in network.inputs])
    tensors = [result] if len(network.outputs) == 1 else list(result)
    actual = {spec.name: tensor.numpy() for spec, tensor in zip(network.outputs, tensors, strict=True)}
    return compare_outputs(actual, expected).max_rel_error


# -- the table -------------------------------------------------------------------------------------------------------

_HEAD = (
    "| network | input | parameters | GFLOP | tasks NHWC / NCHW | error NHWC | error NCHW | error tuned |",
    "|---|---|---|---|---|---|---|---|",
)


def _line(row: dict[str, Any]) -> str:
    nhwc, nchw = (row[f"{layout}/float32"] for layout in _LAYOUTS)
    shapes = ", ".join("×".join(map(str, shape)) for shape in row["inputs"].values())
    tuned = "" if row["tuned"] is None else f"{row['tuned']['max_rel_error']:.1e}"
    cells = [
        f"`{row['name']}`",
        shapes,
        f"{row['parameters'] / 1e6:.2f} M",
        f"{row['flops'] / 1e9:.3g}",
        f"{nhwc['tasks']} / {nchw['tasks']}",
        f"{nhwc['max_rel_error']:.1e}",
        f"{nchw['max_rel_error']:.1e}",
        tuned,
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
