"""What a model costs beside its library: loading it, calling it, and calling it from several threads.

    python benchmarks/model.py --json result.json

The other side is TVM alone: its own loading of the library, and its virtual machine.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from ansor_mlflow.measuring import call_once
from ansor_mlflow.model import Manifest
from ansor_mlflow.processes import in_child_process
from ansor_mlflow.tensors import random_inputs

_LOADS = 7
_TURNS = 10
_MAX_CALLS = 50
"""Of a turn."""
_REST_S = 0.5
"""Until the threads of the calls before have gone to sleep: they spin for a while, and slow others down."""
_CLIENTS = (1, 2, 4, 8)
_CLIENT_S = 4.0
_CHUNK_BYTES = 1 << 20


@click.command(context_settings={"show_default": True})
@click.option("--networks", default="mlp,resnet-18", help="Networks, which are compiled untuned.")
@click.option("--model", "models", multiple=True, help="Directory or URI of a tuned model; several may be given.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="File for the figures.")
def main(networks: str, models: tuple[str, ...], json_file: Path | None) -> None:
    """Time the loading and the calls of models against TVM alone."""
    figures = {}
    with tempfile.TemporaryDirectory(prefix="model-") as scratch:
        places = dict(_places([name for name in networks.split(",") if name], models, Path(scratch)))
        for name, directory in places.items():
            figures[name] = {
                **in_child_process(call_once, partial(_loading, directory)),
                **in_child_process(call_once, partial(_calling, directory)),
                "clients": [in_child_process(call_once, partial(_serving, directory, n)) for n in _CLIENTS],
            }
    _print(figures)
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=1))


def _places(networks: list[str], models: tuple[str, ...], scratch: Path) -> Iterator[tuple[str, Path]]:
    """The models by their name, as directories."""
    from mlflow.artifacts import download_artifacts

    for name in networks:
        in_child_process(call_once, partial(_saving, name, scratch / name))
        yield f"{name}, untuned", scratch / name / "model"
    for number, uri in enumerate(models):
        directory = scratch / f"tuned-{number}"
        directory.mkdir()
        is_here = Path(uri).is_dir()
        yield uri, Path(uri if is_here else download_artifacts(artifact_uri=uri, dst_path=str(directory)))


def _saving(name: str, directory: Path) -> Callable[[], None]:
    """Compiles a network without records and saves it as a model."""

    def save() -> None:
        from ansor_mlflow import flavor
        from ansor_mlflow.device import available_cpus, fingerprint, resolve_target
        from ansor_mlflow.lowering import lower
        from ansor_mlflow.model import CompiledNetwork, compile_untuned
        from ansor_mlflow.networks import load_network, write_onnx

        network = load_network(name)
        target = resolve_target("auto", available_cpus())
        compile_untuned(lower(network.model, target), target, directory / "model.so")
        write_onnx(network.model, directory / "network.onnx")
        (directory / "records").mkdir()
        compiled = CompiledNetwork(
            name=name,
            network=directory / "network.onnx",
            inputs=network.inputs,
            outputs=network.outputs,
            library=directory / "model.so",
            records=directory / "records",
            fingerprint=fingerprint(target, available_cpus()),
            coverage={},
        )
        flavor.save_model(compiled, str(directory / "model"))

    return save


def _loading(directory: Path) -> Callable[[], dict[str, float]]:
    """Medians of loading a model, and of TVM's loading of its library and of reading what is digested, in turns."""

    def run() -> dict[str, float]:
        from ansor_mlflow import flavor

        manifest = Manifest.read(directory)
        library = directory / manifest.libraries[0].path
        seconds: dict[str, list[float]] = {"load_s": [], "small_pages_load_s": [], "tvm_load_s": [], "read_s": []}
        for _ in range(_LOADS):
            seconds["load_s"].append(_timed(lambda: flavor.load_model(str(directory))))
            seconds["small_pages_load_s"].append(_timed(lambda: flavor.load_model(str(directory), huge_pages=False)))
            seconds["tvm_load_s"].append(_timed(lambda: _bare_machine(library)))
            seconds["read_s"].append(_timed(lambda: _read(directory, manifest.files)))
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        least_s = medians["tvm_load_s"] + medians["read_s"]
        ratios = {
            "load_ratio": medians["load_s"] / least_s,
            "small_pages_load_ratio": medians["small_pages_load_s"] / least_s,
        }
        return {**medians, **ratios}

    return run


def _calling(directory: Path) -> Callable[[], dict[str, float]]:
    """Microseconds of a call of the model and of the bare virtual machine, in turns."""

    def run() -> dict[str, float]:
        import mlflow
        from tvm import runtime

        from ansor_mlflow import flavor

        model = flavor.load_model(str(directory))
        pyfunc = mlflow.pyfunc.load_model(str(directory))
        machine = _bare_machine(directory / model.entry.path)
        inputs = random_inputs(model.inputs, 0)
        tensors = [runtime.tensor(inputs[spec.name]) for spec in model.inputs]
        calls: dict[str, Callable[[], Any]] = {
            "bare_us": lambda: machine["main"](*tensors),
            "run_us": lambda: model.run(inputs),
            "pyfunc_us": lambda: pyfunc.predict(inputs),
        }
        slow_s = max(map(_timed, calls.values()))
        num_calls = max(2, min(_MAX_CALLS, int(1 / slow_s)))
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(_TURNS):
            for name, call in calls.items():
                time.sleep(_REST_S)
                call()
                samples[name] += [_timed(call) * 1e6 for _ in range(num_calls)]
        medians = {name: statistics.median(values) for name, values in samples.items()}
        return {**medians, "overhead_us": medians["run_us"] - medians["bare_us"]}

    return run


def _serving(directory: Path, clients: int) -> Callable[[], dict[str, float]]:
    """Calls from several threads at once, of a process of their own."""

    def run() -> dict[str, float]:
        from ansor_mlflow import flavor

        model = flavor.load_model(str(directory))
        inputs = random_inputs(model.inputs, 0)
        model.run(inputs)
        before_mib = _resident_mib()
        stop_at = time.perf_counter() + _CLIENT_S

        def client(_: int) -> list[float]:
            samples = []
            while time.perf_counter() < stop_at:
                samples.append(_timed(lambda: model.run(inputs)))
            return samples

        started = time.perf_counter()
        with ThreadPoolExecutor(clients) as threads:
            samples = [sample for samples in threads.map(client, range(clients)) for sample in samples]
        return {
            "clients": clients,
            "calls_per_s": len(samples) / (time.perf_counter() - started),
            "median_ms": statistics.median(samples) * 1e3,
            "slowest_ms": max(samples) * 1e3,
            "memory_growth_mib": _resident_mib() - before_mib,
        }

    return run


def _bare_machine(library: Path) -> Any:
    from tvm import cpu, relax, runtime

    return relax.VirtualMachine(runtime.load_module(str(library)), cpu())


def _read(directory: Path, files: Iterable[str]) -> None:
    for name in files:
        with (directory / name).open("rb", buffering=0) as file:
            while file.read(_CHUNK_BYTES):
                pass


def _resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def _timed(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _print(figures: dict[str, dict[str, Any]]) -> None:
    table = Table("figure", *figures)
    for name in next(iter(figures.values())):
        if name != "clients":
            table.add_row(name, *(f"{model[name]:.4g}" for model in figures.values()))
    for index, clients in enumerate(_CLIENTS):
        rows = [model["clients"][index] for model in figures.values()]
        table.add_row(f"calls_per_s, {clients} threads", *(f"{row['calls_per_s']:.4g}" for row in rows))
        table.add_row(f"slowest_ms, {clients} threads", *(f"{row['slowest_ms']:.4g}" for row in rows))
    Console().print(table)


if __name__ == "__main__":
    main()
