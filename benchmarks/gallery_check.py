"""A process of the benchmark `gallery.py`: what a model computes without tuning, or how fast it is with a little.

    python benchmarks/gallery_check.py model.onnx --parameters '{"input_shapes": {"x": [1, 3, 64, 64]}}' [--trials 12]

Prints one line of JSON. Errors end it as they end the command `ansor-mlflow`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click

from ansor_mlflow.errors import AnsorMlflowError, UserInputError
from ansor_mlflow.tensors import Arrays

_SEED = 0
_TURNS = 2
_MEASURE_S = 0.5
"""How often, and how long each time, a tuned network is timed."""
_LEAST_DIFFERENCE = 1e-2
"""How far the outputs of other inputs are, relative to the largest, so that equal outputs say something."""


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--parameters", default="{}", help="Those of the network beside its name, as JSON.")
@click.option("--trials", default=0, help="Trials of a tuning; 0 does not tune.")
@click.option("--store", default="mlflow.db", help="Database of MLflow for the tuning; it is made where there is none.")
def main(file: Path, parameters: str, trials: int, store: str) -> None:
    """Compiles a model and compares it with ONNX Runtime."""
    given = json.loads(parameters)
    try:
        found = _tuned(file, given, trials, store) if trials else _untuned(file, given)
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


def _tuned(file: Path, parameters: Mapping[str, Any], trials: int, store: str) -> dict[str, Any]:
    """Latencies of the tuned network and of ONNX Runtime in turns, and the error."""
    import mlflow

    import ansor_mlflow
    from ansor_mlflow.measuring import (
        RivalTask,
        deviation_of,
        expected_of,
        measure_in_turns,
        rival_inference,
        timed_call,
        tolerance_for,
        tuned_inference,
    )
    from ansor_mlflow.model import Manifest
    from ansor_mlflow.names import NETWORK_FILE
    from ansor_mlflow.tensors import random_inputs

    with tempfile.TemporaryDirectory() as directory:
        mlflow.set_tracking_uri(f"sqlite:///{store}")
        mlflow.create_experiment(directory, artifact_location=Path(directory, "artifacts").as_uri())
        mlflow.set_experiment(directory)
        tuned = ansor_mlflow.tune(file, **parameters, trials=trials, seed=_SEED)
        compiled = ansor_mlflow.compile(file, **parameters, tune_run=tuned.run_id)
        model = Path(mlflow.artifacts.download_artifacts(artifact_uri=compiled.model_uri))
        manifest, network = Manifest.read(model), model / NETWORK_FILE
        num_threads = manifest.libraries[0].fingerprint.num_threads
        task = RivalTask(
            network=network, outputs=tuple(spec.name for spec in manifest.outputs), num_threads=num_threads
        )
        inputs, others = (random_inputs(manifest.inputs, seed) for seed in (_SEED, _SEED + 1))
        expected, of_others = expected_of(network, num_threads, [inputs, others])
        _require_dependence(file, expected, of_others)
        runs = {"tuned": partial(tuned_inference, model), "onnxruntime": partial(rival_inference, "onnxruntime", task)}
        error = deviation_of(runs["tuned"], [inputs], [expected]).max_rel_error
        tolerance = tolerance_for("auto", network, "float32")
        calls = {name: partial(timed_call, make_inference, [inputs]) for name, make_inference in runs.items()}
        latencies = measure_in_turns(calls, _TURNS, measure_s=_MEASURE_S)
    return {
        "trials": trials,
        "max_rel_error": error,
        "equal": error <= tolerance,
        **{f"{name}_latency_ms": latency.median_ms for name, latency in latencies.items()},
    }


def _require_dependence(file: Path, outputs: Arrays, of_others: Arrays) -> None:
    """Refuses a network whose outputs are about the same for other inputs: that they are right would say nothing."""
    from ansor_mlflow.measuring import compare_outputs

    if compare_outputs(of_others, outputs).max_rel_error < _LEAST_DIFFERENCE:
        raise UserInputError(f"network={file}: its outputs hardly depend on its inputs; give it other weights")


if __name__ == "__main__":
    main()
