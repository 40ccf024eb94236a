"""Models of PyTorch become networks that compute the same. These tests need PyTorch."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import onnxruntime
import pytest
from helpers.commands import ANSOR_MLFLOW, BRIEF, FAST, environment, flags
from helpers.commands import run as run_command

from ansor_mlflow import names
from ansor_mlflow.errors import NotFasterError, UndecidedError, UserInputError
from ansor_mlflow.networks.load import Network, load_network
from ansor_mlflow.tensors import Arrays
from ansor_mlflow.tracking import sources

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from helpers import torch_models

    directory = tmp_path_factory.mktemp("programs")
    torch_models.write(directory)
    return directory


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    directory = tmp_path / "scratch"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    yield
    assert [path for path in directory.iterdir() if path.name.startswith("ansor")] == []


def load(path: Path, **parameters: Any) -> Network:
    return load_network(str(path), trust=True, **parameters)


def computed(network: Network, inputs: Arrays) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(network.model.SerializeToString(), providers=["CPUExecutionProvider"])
    return list(session.run(None, inputs))


def example(path: Path) -> tuple[Arrays, list[np.ndarray]]:
    """Inputs by their names, and outputs, which are arr_0, arr_1, … in the file."""
    with np.load(path) as file:
        inputs = {key: file[key] for key in file if not key.startswith("arr_")}
        return inputs, [file[f"arr_{index}"] for index in range(len(file.files) - len(inputs))]


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("convolutions", "fixed"),
        ("attention", "1x8"),
        ("attention", "5x20"),
        ("nested", "fixed"),
        ("decomposed", "fixed"),
        ("half", "fixed"),
    ],
)
def test_a_program_computes_what_pytorch_does(programs: Path, name: str, case: str) -> None:
    inputs, expected = example(programs / f"{name}-{case}.npz")
    shapes = {key: value.shape for key, value in inputs.items()}
    network = load(programs / f"{name}.pt2", input_shapes=shapes)
    assert network.name == name
    assert {spec.name: spec.shape for spec in network.inputs} == shapes
    assert [(spec.shape, spec.dtype) for spec in network.outputs] == [(o.shape, str(o.dtype)) for o in expected]
    for actual, wanted in zip(computed(network, inputs), expected, strict=True):
        tolerance = 1e-3 if wanted.dtype == np.float16 else 1e-5
        np.testing.assert_allclose(actual, wanted, rtol=tolerance, atol=tolerance * np.abs(wanted).max())
    # its sizes are numbers, and nothing names files of this machine
    assert not {node.op_type for node in network.model.graph.node} & {"Shape", "Range", "If", "Loop"}
    assert not any(node.metadata_props for node in network.model.graph.node)


def test_a_program_in_memory() -> None:
    from helpers import torch_models

    assert torch_models.plan_in_memory() == ["program", 1]


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("experiment_id")
def test_a_tuned_program_is_compared_with_its_compilation_by_pytorch(programs: Path, tmp_path: Path) -> None:
    """By the pipeline, which knows where the program is, and then by a promotion."""
    client = mlflow.MlflowClient()
    new_id = client.create_experiment("rivals", (tmp_path / "artifacts").as_uri())
    parameters = {
        **FAST,
        **BRIEF,
        "network": programs / "named.pt2",
        "trust": "true",
        "input_shapes": '{"input": [4, 4]}',
        "trials": 4,
        "cost_model": "none",
        "rivals": "onnxruntime,torch",
        "register_as": "program",
    }
    env = environment(client.tracking_uri, {"MLFLOW_EXPERIMENT_ID": new_id})
    finished = run_command([ANSOR_MLFLOW, "main", *flags(parameters)], tmp_path / "cwd", env)
    assert finished.exit_code == 0, finished.stderr
    (run,) = client.search_runs([new_id], f"tags.`{names.TAG_STEP}` = 'main'")
    latencies = {rival: run.data.metrics[names.rival_latency_ms(rival)] for rival in ("onnxruntime", "torch")}
    assert run.data.tags[names.TAG_BEST_RIVAL] == min(latencies, key=lambda rival: latencies[rival])
    (tuned,) = client.search_runs([new_id], f"tags.`{names.TAG_STEP}` = 'tune'")
    copy = load_network(str(tmp_path / "artifacts" / tuned.info.run_id / "artifacts" / names.NETWORK_FILE))
    assert [(spec.name, spec.shape) for spec in copy.inputs] == [("input", (4, 4))]
    command = ["promote", "--model", "program", "--candidate", "1", "--champion", "torch", "--measure-s", "0.1"]
    command += ["--max-turns", "4", "--trust", "true"]
    finished = run_command([ANSOR_MLFLOW, *command], tmp_path / "cwd", env)
    assert finished.exit_code in (0, NotFasterError.exit_code, UndecidedError.exit_code), finished.stderr
    assert "of the time of torch.compile" in finished.stdout


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        (
            "attention",
            {"batch_size": 2},
            r"'ids' has dynamic s\d+ \(dimension 1\) in .*; give input_shapes='\{\"ids\": \[2, 128\]\}', which are",
        ),
        ("attention", {"input_shapes": {"x": [2, 8]}}, "input_shapes names 'x', which is not an input of .* are ids"),
        (
            "attention",
            {"input_shapes": {"ids": [2, 7]}},
            r"it was exported for other shapes \(.*ids.* % 2 == 0\); give input_shapes within, or",
        ),
        ("attention", {"input_shapes": {"ids": [2, 66]}}, r"exported for other shapes \(.*ids.* <= 64\)"),
        ("convolutions", {"batch_size": 3}, "batch_size=3 with .*: dimension 0 of its input 'image' is 2; leave"),
        ("named", {}, r"exported for other shapes \(.*input.* >= 3\)"),
    ],
)
def test_shapes_that_a_program_is_not_made_for(
    programs: Path, name: str, parameters: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserInputError, match=message) as caught:
        load(programs / f"{name}.pt2", **parameters)
    assert "\n" not in str(caught.value)


def test_an_input_of_a_program_gets_a_value(programs: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And a dynamic batch that nobody gave a size is one, or `batch_size`."""
    network = load(programs / "pair.pt2", batch_size=4, input_values={"args_1": 0.5})
    assert [(spec.name, spec.shape) for spec in network.inputs] == [("args_0", (4, 4))]
    assert caplog.messages == []
    whole = load(programs / "free.pt2")
    assert [spec.shape for spec in whole.inputs] == [(1, 4), (1, 4)]
    assert "free.pt2: its batch is dynamic (dimension 0 of 'args_0', " in caplog.text
    x = np.ones((4, 4), np.float32)
    expected = computed(load(programs / "pair.pt2", batch_size=4), {"args_0": x, "args_1": x / 2})
    np.testing.assert_allclose(computed(network, {"args_0": x}), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", r"the file cannot be read \(No such file.*; give an ONNX file, an exported program or"),
        ("empty", r"PyTorch 2\S+ cannot read it \(.*; save it again with this version"),
        ("cut", r"PyTorch 2\S+ cannot read it"),
        ("script", r"PyTorch 2\S+ cannot read it"),
        ("batch-norm", r"it was exported in training mode; call model\.eval\(\) before"),
        ("svd", r"PyTorch cannot export it to ONNX \(.*linalg_svd.*\); export the model without that"),
    ],
)
def test_what_is_wrong_with_a_program_is_said_in_one_line(
    programs: Path, tmp_path: Path, name: str, message: str
) -> None:
    valid = (programs / "convolutions.pt2").read_bytes()
    path = programs / f"{name}.pt2"
    if name in ("empty", "cut"):
        path = tmp_path / path.name
        path.write_bytes(valid[: len(valid) // 2] if name == "cut" else b"")
    with pytest.raises(UserInputError, match=rf"network=.*{name}\.pt2: {message}") as caught:
        load(path)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def logged(_mlflow_store: tuple[str, str]) -> tuple[str, str]:
    """The IDs of a run and of the exported program that it logged; two versions of that are "torch-program"."""
    from helpers import torch_models

    return torch_models.log(*_mlflow_store)


@pytest.mark.parametrize(
    ("template", "name", "source"),
    [
        ("models:/torch-program@champion", "torch-program", "models:/torch-program/1"),
        ("models:/{model_id}", "{model_id}", "models:/{model_id}"),
        ("models:/torch-program/2/data/model.pt2", "torch-program", "models:/torch-program/2/data/model.pt2"),
        ("runs:/{run_id}/pickle", "pickle", "runs:/{run_id}/pickle"),
        ("{directory}", "artifacts", None),
    ],
)
@pytest.mark.usefixtures("experiment_id")
def test_models_of_the_flavor_pytorch(logged: tuple[str, str], template: str, name: str, source: str | None) -> None:
    run_id, model_id = logged
    location = mlflow.MlflowClient().get_logged_model(model_id).artifact_location
    values = {"run_id": run_id, "model_id": model_id, "directory": location.removeprefix("file://")}
    given = template.format(**values)
    with pytest.raises(UserInputError, match="pass trust=true if you trust them"):
        sources.fetch_network(given)
    network = sources.fetch_network(given, input_shapes={"input": [1, 3, 8, 8]}, trust=True)
    assert network.name == name.format(**values)
    assert network.source == (source and source.format(**values))
    assert [spec.shape for spec in (*network.inputs, *network.outputs)] == [(1, 3, 8, 8), (1, 4)]


@pytest.mark.usefixtures("experiment_id")
def test_a_pickle_without_a_signature(logged: tuple[str, str]) -> None:
    message = r"/unsigned: its signature does not say which tensors it takes; log it with .*input_example="
    with pytest.raises(UserInputError, match=message):
        sources.fetch_network(f"runs:/{logged[0]}/unsigned", trust=True)
