"""A process of `gallery.py` and `foreign.py`: what a model computes untuned, or how fast it is with a few trials.

    python benchmarks/gallery_check.py model.onnx --parameters '{"input_shapes": {"x": [1, 3, 64, 64]}}' [--trials 12]

Prints one line of JSON. Errors end it as they end the command `ansor-mlflow`.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import click

from ansor_mlflow.errors import AnsorMlflowError, UserInputError
from ansor_mlflow.tensors import Arrays

if TYPE_CHECKING:
    from ansor_mlflow.measuring import MachineNoise, MakeInference
    from ansor_mlflow.measuring.timing import MakeCall

_SEED = 0
_MEASURE_S = 0.5
"""How long a contender is timed in a turn."""
_TUNED = "tuned"
_LEAST_DIFFERENCE = 1e-2
"""How far the outputs of other inputs are, relative to the largest, so that equal outputs say something."""


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--parameters", default="{}", help="Those of the network beside its name, as JSON.")
@click.option("--trials", type=int, help="Trials of a tuning; by default the network is as TVM compiles it.")
@click.option("--store", default="mlflow.db", help="Database of MLflow for the tuning; it is made where there is none.")
@click.option("--rivals", default="onnxruntime", help="Runtimes beside which a tuned network is timed.")
@click.option("--turns", default=2, help="How often each of them is timed.")
@click.option("--runtimes", default="tvm,onnxruntime", help="What may compute the network of a tuned model.")
@click.option("--trained", is_flag=True, help="Outputs that do not depend on inputs are named, and are no error.")
def main(
    file: Path, parameters: str, trials: int | None, store: str, rivals: str, turns: int, runtimes: str, trained: bool
) -> None:
    """Compiles a model and compares it with ONNX Runtime."""
    given = json.loads(parameters)
    try:
        if trials is None:
            found = _untuned(file, given)
        else:
            with tempfile.TemporaryDirectory() as directory:
                model, compile_s = _tuned(file, given, trials, store, directory, runtimes)
                found = {
                    "trials": trials,
                    "compile_s": compile_s,
                    **_timed(file, model, rivals.split(","), turns, trained),
                }
    except AnsorMlflowError as err:
        click.echo(f"Error: {err}", err=True)
        sys.exit(err.exit_code)
    click.echo(json.dumps(found))


def _untuned(file: Path, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Outputs of the network as TVM compiles it without records, against those of the file itself."""
    from ansor_mlflow.device import Device
    from ansor_mlflow.lowering import lower
    from ansor_mlflow.measuring import QUANTIZED_TOLERANCE, TOLERANCES, ReferenceSession, compare_outputs, is_quantized
    from ansor_mlflow.model import LibraryEntry, Manifest, compile_untuned, open_library, part_entries
    from ansor_mlflow.networks import load_network, write_onnx
    from ansor_mlflow.settings import LoweringSettings
    from ansor_mlflow.tensors import random_inputs

    device = Device.resolve("auto", "auto")
    network = load_network(str(file), **parameters)
    inputs, others = (random_inputs(network.inputs, seed) for seed in (_SEED, _SEED + 1))
    with tempfile.TemporaryDirectory() as directory:
        fixed, library = Path(directory, "network.onnx"), Path(directory, "model.so")
        write_onnx(network.model, fixed)
        quantized = is_quantized(fixed)
        reference = ReferenceSession(fixed, device.num_threads, exact=quantized)
        expected = reference.run(inputs)
        _require_dependence(file, expected, reference.run(others))
        tolerance = QUANTIZED_TOLERANCE if quantized else TOLERANCES["float32"]
        for algorithm in ("auto", "direct"):  # the latter where the former loses too many digits, as the step compile
            lowered = lower(network.model, device.target, LoweringSettings(algorithm=algorithm), called=str(file))
            compile_untuned(lowered, device.target, library)
            entry = LibraryEntry(
                path=library.name,
                fingerprint=device.fingerprint,
                coverage={},
                provenance={},
                parts=part_entries(lowered),
            )
            manifest = Manifest(
                network=network.name, inputs=network.inputs, outputs=network.outputs, libraries=(entry,), files={}
            )
            actual = open_library(library, manifest, entry).run(inputs)
            error = compare_outputs(actual, expected).max_rel_error
            if error <= tolerance:
                break
            library = library.with_name("direct.so")  # one that is open is not written over
    return {"max_rel_error": error, "equal": error <= tolerance, "algorithm": algorithm}


def _tuned(
    file: Path, parameters: Mapping[str, Any], trials: int, store: str, directory: str, runtimes: str
) -> tuple[Path, float]:
    """The model as a user gets it, below a directory, and the seconds of the step that compiled it."""
    import mlflow

    import ansor_mlflow

    mlflow.set_tracking_uri(f"sqlite:///{store}")
    mlflow.create_experiment(directory, artifact_location=Path(directory, "artifacts").as_uri())
    mlflow.set_experiment(directory)
    tuned = ansor_mlflow.tune(file, **parameters, trials=trials, seed=_SEED)
    started_s = time.monotonic()
    given: dict[str, Any] = {**parameters, "tune_run": tuned.run_id, "runtimes": runtimes}
    compiled = ansor_mlflow.compile(file, **given)
    compile_s = time.monotonic() - started_s
    return Path(mlflow.artifacts.download_artifacts(artifact_uri=compiled.model_uri)), compile_s


def _timed(file: Path, model: Path, rivals: Sequence[str], turns: int, trained: bool) -> dict[str, Any]:
    """Latencies of a tuned network and of its rivals in turns, and how far its outputs are from ONNX Runtime's."""
    from ansor_mlflow.measuring import (
        MachineNoise,
        RivalTask,
        allowed_error,
        deviation_of,
        expected_of,
        same_for_all,
        seeded_inputs,
        timed_call,
        tuned_inference,
    )
    from ansor_mlflow.model import Manifest, computed_by
    from ansor_mlflow.names import NETWORK_FILE
    from ansor_mlflow.steps.evaluation.rivals import check_rivals
    from ansor_mlflow.tensors import all_sizes

    manifest, network = Manifest.read(model), model / NETWORK_FILE
    (library,) = manifest.libraries
    outputs = tuple(spec.name for spec in manifest.outputs)
    task = RivalTask(network=network, outputs=outputs, num_threads=library.fingerprint.num_threads)
    examples = seeded_inputs(network, all_sizes(manifest), (_SEED, _SEED + 1))
    expected = expected_of(network, task.num_threads, examples)
    if not trained:
        _require_dependence(file, *expected)
    make_tuned = partial(tuned_inference, model)
    error = deviation_of(make_tuned, examples, expected).max_rel_error
    tolerance = allowed_error(error, "auto", network, "float32", task.num_threads, examples)
    checked = check_rivals(tuple(rivals), task, examples, expected, tolerance)
    runs: dict[str, MakeInference] = {_TUNED: make_tuned}
    runs |= {rival.name: rival.make_inference for rival in checked if not rival.absent}
    calls = {name: partial(timed_call, make_inference, examples[:1]) for name, make_inference in runs.items()}
    noise = MachineNoise()
    turns_ms = _in_turns(calls, turns, noise)
    return {
        "max_rel_error": error,
        "equal": error <= tolerance,
        "unchecked": same_for_all(expected),
        "parts": [str(part) for part in library.parts if part.runs_in != "tvm"],
        "computed_by": computed_by(library.parts),
        "cpu": library.fingerprint.cpu_model,
        "num_threads": task.num_threads,
        "turns_ms": turns_ms,
        "right": [rival.name for rival in checked if rival.is_right],
        "absent": {rival.name: rival.absent for rival in checked if rival.absent},
        "probe_spread": noise.spread,
        "unreliable": noise.unreliable,
        **{f"{name}_latency_ms": median(medians_ms) for name, medians_ms in turns_ms.items()},
    }


def _in_turns(calls: Mapping[str, MakeCall], turns: int, noise: MachineNoise) -> dict[str, list[float]]:
    """Medians of each turn in milliseconds, by contender; every second turn begins with the last one."""
    from ansor_mlflow.measuring import measure_in_turns

    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(turns):
        in_order = {name: calls[name] for name in list(calls)[:: 1 if turn % 2 == 0 else -1]}
        for name, latency in measure_in_turns(in_order, 1, noise, _MEASURE_S).items():
            found[name].append(latency.median_ms)
    return found


def _require_dependence(file: Path, outputs: Arrays, of_others: Arrays) -> None:
    """Refuses a network whose outputs are about the same for other inputs: that they are right would say nothing."""
    from ansor_mlflow.measuring import compare_outputs

    if compare_outputs(of_others, outputs).max_rel_error < _LEAST_DIFFERENCE:
        raise UserInputError(f"network={file}: its outputs hardly depend on its inputs; give it other weights")


if __name__ == "__main__":
    main()
