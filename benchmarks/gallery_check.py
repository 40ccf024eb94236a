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
import numpy as np

from ansor_mlflow.errors import AnsorMlflowError

_SEED = 0


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
    from tvm import cpu, relax, runtime

    from ansor_mlflow.device import resolve_num_threads, resolve_target, set_num_threads
    from ansor_mlflow.lowering import lower
    from ansor_mlflow.measuring import QUANTIZED_TOLERANCE, TOLERANCES, ReferenceSession, compare_outputs, is_quantized
    from ansor_mlflow.model import compile_untuned
    from ansor_mlflow.networks import load_network
    from ansor_mlflow.tensors import random_inputs

    num_threads = resolve_num_threads("auto")
    target = resolve_target("auto", num_threads)
    network = load_network(str(file), **parameters)
    inputs = random_inputs(network.inputs, _SEED)
    quantized = is_quantized(file)
    expected = ReferenceSession(file, num_threads, optimized=not quantized).run(inputs)
    with tempfile.TemporaryDirectory() as directory:
        library = Path(directory) / "model.so"
        compile_untuned(lower(network.model, target), target, library)
        set_num_threads(num_threads)
        machine = relax.VirtualMachine(runtime.load_module(str(library)), cpu())
        result = machine["main"](*[runtime.tensor(np.array(inputs[spec.name], order="C")) for spec in network.inputs])
        tensors = [result] if len(network.outputs) == 1 else list(result)
        actual = {spec.name: tensor.numpy() for spec, tensor in zip(network.outputs, tensors, strict=True)}
    error = compare_outputs(actual, expected).max_rel_error
    return {"max_rel_error": error, "equal": error <= (QUANTIZED_TOLERANCE if quantized else TOLERANCES["float32"])}


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
