"""Models as people have them, from `mlflow run` to `mlflow models serve`."""

from __future__ import annotations

import json
from pathlib import Path

import mlflow
import numpy as np
import onnx
import pytest
import requests
from helpers.commands import FAST, ROOT, environment, run_project
from helpers.exports import detector
from helpers.served import model_server

from ansor_mlflow import names
from ansor_mlflow.measuring import TOLERANCES, ReferenceSession
from ansor_mlflow.networks import load_network
from ansor_mlflow.tensors import random_inputs

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


def test_from_the_project_to_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a detector, of which a part stays in ONNX Runtime, and whose output has an open size."""
    name, path = "detector", tmp_path / "detector.onnx"
    onnx.save(detector(), path)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    client = mlflow.MlflowClient(uri)
    experiment_id = client.create_experiment(name, f"file://{tmp_path}/artifacts")
    network = load_network(str(path))
    parameters = {"network": path, "trials": 24, "num_trials_per_round": 4, "register_as": name, **FAST}
    parameters |= {"promote": "true"}
    finished = run_project(ROOT, parameters, tmp_path / "cwd", environment(uri), experiment_id=experiment_id)
    assert finished.exit_code == 0, finished.stderr

    runs = {run.data.tags[names.TAG_STEP]: run for run in client.search_runs([experiment_id])}
    compiled, evaluated = runs["compile"], runs["evaluate"]
    assert client.get_model_version(name, "1").aliases
    assert evaluated.data.metrics[names.MAX_REL_ERROR] <= TOLERANCES["float32"]

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
        np.testing.assert_allclose(outputs[output], values, rtol=0, atol=TOLERANCES["float32"] * abs(values).max())
