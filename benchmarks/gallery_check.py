"""A process of the benchmark `gallery.py`: what a model computes without tuning, or how fast it is with a little.

    python benchmarks/gallery_check.py model.onnx --parameters '{"input_shapes": {"x": [1, 3, 64, 64]}}' [--trials 12]

Prints one line of JSON. Errors end it as they end the command `ansor-mlflow`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from ansor_mlflow.errors import AnsorMlflowError, UserInputError

_SEED = 0
_LEAST_DIFFERENCE = 1e-2
"""How far the outputs of other inputs are, relative to the largest, so that equal outputs say something."""


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--parameters", default="{}", help="Those of the network beside its name, as JSON.")
@click.option("--trials", default=0, help="Trials of a tuning; 0 does not tune.")
def main(file: Path, parameters: str, trials: int) -> None:
    """Compiles a model and compares it with ONNX Runtime."""
    given = json.loads(parameters)
    try:
        found = _tuned(file, given, trials) if trials else _untuned(file, given)
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
        if compare_outputs(reference.run(others), expected).max_rel_error < _LEAST_DIFFERENCE:
            raise UserInputError(f"network={file}: its outputs hardly depend on its inputs; give it other weights")
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


def _tuned(file: Path, parameters: Mapping[str, Any], trials: int) -> dict[str, Any]:
    """Latencies and the error of the pipeline, with a tracking store of its own."""
    import mlflow

    import ansor_mlflow

    with tempfile.TemporaryDirectory() as directory:
        mlflow.set_tracking_uri(f"sqlite:///{directory}/mlflow.db")
        mlflow.create_experiment("gallery", artifact_location=Path(directory, "artifacts").as_uri())
        mlflow.set_experiment("gallery")
        result = ansor_mlflow.pipeline(file, **parameters, trials=trials, seed=_SEED)
    return {"trials": trials, **result.metrics}


if __name__ == "__main__":
    main()
