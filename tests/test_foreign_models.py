"""Models as people have them, from `mlflow run` to `mlflow models serve`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import onnx
import pytest
import requests
from helpers.commands import ANSOR_MLFLOW, FAST, ROOT, environment, run_project
from helpers.commands import run as run_command
from helpers.exports import detector, quantized_text_model
from helpers.served import model_server

from ansor_mlflow import names
from ansor_mlflow.measuring.checking import QUANTIZED_TOLERANCE, TOLERANCES
from ansor_mlflow.measuring.compare import ReferenceSession
from ansor_mlflow.networks.load import load_network
from ansor_mlflow.tensors import random_inputs

NOT_FASTER, UNDECIDED = 9, 10
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

EXPORTS: dict[str, Callable[[Path], None]] = {
    "detector": lambda path: onnx.save(detector(), path),
    "quantised-bert": quantized_text_model,
}


@pytest.mark.parametrize("name", EXPORTS)
def test_from_the_project_to_the_server(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / f"{name}.onnx"
    EXPORTS[name](path)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    client = mlflow.MlflowClient(uri)
    experiment_id = client.create_experiment(name, f"file://{tmp_path}/artifacts")
    network = load_network(str(path))
    trials = 48 if name == "quantised-bert" else 24  # one for each task at least
    parameters = {"network": path, "trials": trials, "num_trials_per_round": 4, "register_as": name, **FAST}
    parameters |= {"promote": "true"}
    finished = run_project(ROOT, parameters, tmp_path / "cwd", environment(uri), experiment_id=experiment_id)
    assert finished.exit_code == 0, finished.stderr

    runs = {run.data.tags[names.TAG_STEP]: run for run in client.search_runs([experiment_id])}
    compiled, evaluated = runs["compile"], runs["evaluate"]
    assert client.get_model_version(name, "1").aliases
    tolerance = QUANTIZED_TOLERANCE if "quantised" in name else TOLERANCES["float32"]
    assert evaluated.data.metrics[names.MAX_REL_ERROR] <= tolerance

    assert (names.ONNXRUNTIME_SHARE in evaluated.data.metrics) == (
        names.PARTS_FILE in {file.path for file in client.list_artifacts(evaluated.info.run_id)}
    )
    assert 0 < evaluated.data.metrics.get(names.ONNXRUNTIME_SHARE, 0.5) <= 1
    coverage = json.loads(mlflow.artifacts.load_text(f"runs:/{compiled.info.run_id}/{names.COVERAGE_FILE}"))
    if coverage["parts"]:
        assert sum(part["latency_share"] for part in coverage["parts"]) == pytest.approx(1)
        assert "% of the time" in mlflow.artifacts.load_text(f"runs:/{runs['tune'].info.run_id}/{names.REPORT_FILE}")

    inputs = random_inputs(network.inputs, seed=7)
    expected = ReferenceSession(path, num_threads=1, exact=True).run(inputs)
    model = compiled.data.tags[names.TAG_MODEL_URI]
    serve = ["--model-uri", model, "--env-manager", "local"]
    with model_server(serve, tmp_path / "server.log", environment(uri)) as server:
        body = json.dumps({"inputs": {name: array.tolist() for name, array in inputs.items()}})
        headers = {"Content-Type": "application/json"}
        response = requests.post(server.url, data=body, headers=headers, timeout=60)
        assert response.status_code == 200, response.text
    predictions = response.json()["predictions"]
    outputs = predictions if isinstance(predictions, dict) else {next(iter(expected)): predictions}
    assert outputs.keys() == expected.keys()
    for output, values in expected.items():
        np.testing.assert_allclose(outputs[output], values, rtol=0, atol=tolerance * abs(values).max())

    if name == "detector":
        build_again_and_compare(
            compiled.data.tags[names.TAG_TUNE_RUN], name, client, tmp_path / "cwd", environment(uri)
        )


def build_again_and_compare(tune_run: str, name: str, client: mlflow.MlflowClient, cwd: Path, env: Any) -> None:
    """`compile` and `promote` take a model in parts like any other."""
    compiled = run_command([ANSOR_MLFLOW, "compile", "--tune-run", tune_run, "--allow-missing"], cwd, env)
    assert compiled.exit_code == 0, compiled.stderr
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    again, _ = client.search_runs(experiments, f"tags.`{names.TAG_STEP}` = 'compile'")  # the newest first
    model_uri = again.data.tags[names.TAG_MODEL_URI]
    mlflow.register_model(model_uri, name)
    promote = [ANSOR_MLFLOW, "promote", "--model", name, "--candidate", "2", "--max-turns", "4", "--measure-s", "0.1"]
    contest = run_command([*promote, "--dry-run", "true"], cwd, env)
    assert contest.exit_code in (0, NOT_FASTER, UNDECIDED), contest.stderr
