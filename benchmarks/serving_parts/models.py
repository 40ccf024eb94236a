"""The models that are compared: one network, as our flavor and as MLflow's flavor `onnx`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click
import mlflow
import onnx
from mlflow.models import Model

import ansor_mlflow
from ansor_mlflow import names
from ansor_mlflow.model import Manifest
from ansor_mlflow.serving import get_signature
from ansor_mlflow.tensors import TensorSpec

_COMMAND = str(Path(sys.executable).parent / "ansor-mlflow")
_MODEL_FILE = "MLmodel"


@dataclass(frozen=True)
class Models:
    """Directories of models with the same weights, inputs, outputs and number of threads."""

    tuned: Path
    binary: Path
    """The tuned model with the signature that lets a server take base64."""
    onnx: Path
    network: str
    inputs: tuple[TensorSpec, ...]
    num_threads: int


def tuned_model(network: str, trials: str, directory: Path, dtype: str = "float32") -> Path:
    """Tunes and compiles a network, unless that was done in this directory before; returns the model's directory."""
    model = directory / f"{re.sub(r'[^A-Za-z0-9.]+', '-', Path(network).stem)}-{trials}-{dtype}"
    if (model / _MODEL_FILE).is_file():
        return model
    store = f"sqlite:///{directory / 'mlflow.db'}"
    network = str(Path(network).absolute()) if Path(network).is_file() else network
    _run(["tune", "--network", network, "--trials", trials, "--dtype", dtype], directory, store)
    client = mlflow.MlflowClient(store)
    (run,) = client.search_runs(["0"], f"tags.`{names.TAG_STEP}` = 'tune'", max_results=1)
    printed = _run(["compile", "--network", network, "--tune-run", run.info.run_id], directory, store)
    (model_id,) = re.findall(r"models:/(m-\w+)", printed)
    location = client.get_logged_model(model_id).artifact_location
    shutil.copytree(mlflow.artifacts.download_artifacts(artifact_uri=location), model)
    return model


def _run(arguments: list[str], directory: Path, store: str) -> str:
    """Runs `ansor-mlflow`; its progress is shown, and what it prints is returned."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    finished = subprocess.run(
        [_COMMAND, *arguments],
        cwd=directory,
        env={**inherited, "MLFLOW_TRACKING_URI": store},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if finished.returncode:
        raise click.ClickException(f"ansor-mlflow {arguments[0]} failed; see above")
    return finished.stdout


def comparable_models(tuned: Path, scratch: Path) -> Models:
    """Makes the other models out of the tuned one.

    Args:
        tuned: Directory of the tuned model, which is not written to.
        scratch: Where the models are written.
    """
    manifest = Manifest.read(tuned)
    (num_threads, *_) = {library.fingerprint.num_threads for library in manifest.libraries}
    models = Models(
        tuned=scratch / "tuned",
        binary=scratch / "binary",
        onnx=scratch / "onnx",
        network=manifest.network,
        inputs=manifest.inputs,
        num_threads=num_threads,
    )
    kinds: dict[Path, Literal["tensor", "binary"]] = {models.tuned: "tensor", models.binary: "binary"}
    for path, kind in kinds.items():
        shutil.copytree(tuned, path)
        _refresh_code(path)
        mlflow.models.set_signature(str(path), get_signature(manifest.inputs, manifest.outputs, kind))
    mlflow.onnx.save_model(
        onnx.load(tuned / names.NETWORK_FILE),
        str(models.onnx),
        signature=get_signature(manifest.inputs, manifest.outputs),
        input_example=Model.load(str(tuned)).load_input_example(str(tuned)),
        onnx_execution_providers=["CPUExecutionProvider"],
        onnx_session_options={"intra_op_num_threads": num_threads, "inter_op_num_threads": 1},
        pip_requirements=["onnx", "onnxruntime"],
    )
    return models


def _refresh_code(model: Path) -> None:
    """Puts the installed package in the place of the one that the model has carried since it was logged."""
    shutil.rmtree(model / "code")
    package = Path(ansor_mlflow.__file__).parent
    shutil.copytree(package, model / "code" / package.name, ignore=shutil.ignore_patterns("__pycache__"))
