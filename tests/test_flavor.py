"""The MLflow flavor: a compiled network is saved, logged, loaded and scored as any other model of MLflow."""

from __future__ import annotations

import inspect
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlflow
import mlflow.onnx
import mlflow.pytorch
import numpy as np
import pandas as pd
import pytest
import yaml
from helpers.commands import ROOT
from helpers.served import compiled
from mlflow.exceptions import MlflowException
from mlflow.models import Model, ModelSignature
from mlflow.types import Schema, TensorSpec

from ansor_mlflow import flavor
from ansor_mlflow.device import available_cpus
from ansor_mlflow.errors import ModelError
from ansor_mlflow.measuring import ReferenceSession
from ansor_mlflow.model import CompiledNetwork, Manifest
from ansor_mlflow.networks.graph import GraphBuilder
from ansor_mlflow.tensors import random_inputs

if TYPE_CHECKING:
    from tvm.target import Target

pytestmark = pytest.mark.usefixtures("_keep_sys_path")
PINS = [f"{name}=={version(name)}" for name in ("apache-tvm", "apache-tvm-ffi", "numpy")]


@pytest.fixture(scope="module")
def saved(compiled_network: CompiledNetwork, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small network, saved with defaults. Not to be written to."""
    path = tmp_path_factory.mktemp("saved") / "model"
    flavor.save_model(compiled_network, str(path))
    return path


@pytest.fixture(scope="module")
def inputs(compiled_network: CompiledNetwork) -> dict[str, np.ndarray]:
    return random_inputs(compiled_network.inputs, seed=3)


@pytest.fixture(scope="module")
def expected(small_onnx: Path, inputs: dict[str, np.ndarray]) -> np.ndarray:
    return ReferenceSession(small_onnx, num_threads=1).run(inputs)["logits"]


def assert_same(output: Any, expected: np.ndarray) -> None:
    np.testing.assert_allclose(output, expected, rtol=0, atol=1e-4 * abs(expected).max())


def test_a_saved_model_describes_itself(saved: Path, compiled_network: CompiledNetwork, pyfunc: Any) -> None:
    model = Model.load(str(saved))
    assert model.signature.inputs == Schema([TensorSpec(np.dtype("float32"), (-1, 3, 16, 16), "data")])
    assert model.signature.outputs == Schema([TensorSpec(np.dtype("float32"), (-1, 10), "logits")])
    example = model.load_input_example(str(saved))
    assert list(example) == ["data"]
    assert (example["data"].shape, example["data"].dtype) == ((1, 3, 16, 16), "float32")
    assert pyfunc.predict(example).shape == (1, 10)
    assert model.model_size_bytes > compiled_network.library.stat().st_size
    manifest = Manifest.read(saved)
    (entry,) = manifest.libraries
    assert manifest.network == "small"
    assert entry.fingerprint == compiled_network.fingerprint
    assert entry.coverage["task_share"] == 1.0
    assert entry.provenance == {"layout": "NHWC"}
    assert (saved / "code" / "ansor_mlflow" / "flavor.py").is_file()
    assert not list((saved / "code").rglob("__pycache__"))


def test_requirements_are_pinned_without_looking_at_the_library(saved: Path) -> None:
    requirements = (saved / "requirements.txt").read_text().splitlines()
    assert requirements == [f"mlflow=={mlflow.__version__}", *PINS]
    conda = yaml.safe_load((saved / "conda.yaml").read_text())
    assert conda["dependencies"][-1]["pip"] == requirements
    assert (saved / "python_env.yaml").is_file()


def test_arguments_replace_the_defaults(compiled_network: CompiledNetwork, tmp_path: Path) -> None:
    signature = ModelSignature(inputs=Schema([TensorSpec(np.dtype("float32"), (-1, 3, 16, 16), "data")]))
    example = {"data": np.ones((1, 3, 16, 16), np.float32)}
    (tmp_path / "extra.py").write_text("ANSWER = 42\n")
    flavor.save_model(
        compiled_network,
        str(tmp_path / "model"),
        signature=signature,
        input_example=example,
        code_paths=[str(tmp_path / "extra.py")],
        pip_requirements=["numpy>=1.26"],
        metadata={"team": "vision"},
    )
    model = Model.load(str(tmp_path / "model"))
    assert model.signature == signature
    assert model.metadata == {"team": "vision"}
    np.testing.assert_array_equal(model.load_input_example(str(tmp_path / "model"))["data"], example["data"])
    assert [path.name for path in (tmp_path / "model" / "code").iterdir()] == ["extra.py"]
    requirements = (tmp_path / "model" / "requirements.txt").read_text().splitlines()
    assert "numpy>=1.26" in requirements
    assert not set(PINS) & set(requirements)


@pytest.mark.parametrize("function", ["save_model", "log_model", "load_model"])
def test_functions_have_the_arguments_that_the_flavors_of_mlflow_share(function: str) -> None:
    ours, onnx, torch = (
        inspect.signature(getattr(of, function)).parameters for of in (flavor, mlflow.onnx, mlflow.pytorch)
    )
    # the first is the model, and save_model names what else MLflow gives it
    shared = [name for name in list(onnx)[1:] if name in torch and name != "kwargs"]
    assert [name for name in ours if name in shared] == shared
    assert all(ours[name].kind == onnx[name].kind for name in shared)
    assert all(ours[name].default == onnx[name].default for name in shared)
    assert flavor.FLAVOR_NAME == "tvm"


def test_what_a_model_of_mlflow_is_given_reaches_ours(compiled_network: CompiledNetwork, tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("cat\ndog\n")
    begun = mlflow.initialize_logged_model(name="begun")
    described: dict[str, Any] = {"params": {"a": "b"}, "tags": {"team": "vision"}, "model_type": "classifier"}
    with mlflow.start_run() as run:
        info = flavor.log_model(compiled_network, extra_files=[str(tmp_path / "labels.txt")], step=7, **described)
        flavor.log_model(compiled_network, model_id=begun.model_id)
    logged = mlflow.get_logged_model(info.model_id)
    assert {name: getattr(logged, name) for name in described} == described | {"tags": logged.tags}
    assert logged.tags["team"] == "vision"
    outputs = {output.model_id: output.step for output in mlflow.get_run(run.info.run_id).outputs.model_outputs}
    assert outputs == {info.model_id: 7, begun.model_id: 0}
    assert str(mlflow.get_logged_model(begun.model_id).status) == "READY"
    directory = Path(mlflow.artifacts.download_artifacts(info.model_uri, dst_path=str(tmp_path / "there")))
    assert (directory / "extra_files" / "labels.txt").read_text() == "cat\ndog\n"
    assert flavor.load_model(str(directory)).run(flavor.default_example(Manifest.read(directory).inputs))


def test_a_file_of_a_conda_environment(compiled_network: CompiledNetwork, tmp_path: Path) -> None:
    environment = {"name": "mine", "dependencies": ["python=3.11", "pip", {"pip": ["numpy>=1.26"]}]}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(environment))
    flavor.save_model(compiled_network, str(tmp_path / "model"), conda_env=str(tmp_path / "mine.yaml"))
    assert yaml.safe_load((tmp_path / "model" / "conda.yaml").read_text())["name"] == "mine"
    assert "numpy>=1.26" in (tmp_path / "model" / "requirements.txt").read_text().splitlines()


def test_a_directory_with_files_is_not_overwritten(compiled_network: CompiledNetwork, saved: Path) -> None:
    with pytest.raises(MlflowException, match="already exists and is not empty"):
        flavor.save_model(compiled_network, str(saved))


def test_logged_model_is_found_by_every_uri(
    compiled_network: CompiledNetwork,
    experiment_id: str,
    inputs: dict[str, np.ndarray],
    expected: np.ndarray,
    tmp_path: Path,
) -> None:
    with mlflow.start_run(experiment_id=experiment_id) as run:
        info = flavor.log_model(compiled_network, name="model", registered_model_name="small", params={"a": "b"})
    assert info.model_uri.startswith("models:/m-")
    assert set(info.flavors) == {"tvm", "python_function"}
    assert info.params == {"a": "b"}
    for uri in (info.model_uri, f"runs:/{run.info.run_id}/model", "models:/small/1"):
        assert_same(flavor.load_model(uri).run(inputs)["logits"], expected)
    assert_same(mlflow.pyfunc.load_model(info.model_uri).predict(inputs), expected)
    flavor.load_model(info.model_uri, dst_path=str(tmp_path))
    assert (tmp_path / "MLmodel").is_file()


@pytest.mark.parametrize("is_model", [True, False])
def test_what_has_no_flavor_of_ours(tmp_path: Path, is_model: bool) -> None:
    if is_model:
        Model(flavors={"onnx": {"data": "model.onnx"}}).save(str(tmp_path / "MLmodel"))
    with pytest.raises(ModelError, match="it has no flavor 'tvm'; give a model that compile logged"):
        flavor.load_model(str(tmp_path))


@pytest.mark.parametrize("name", ["model.so", "database_tuning_record.json", "network.onnx"])
def test_a_model_that_was_tampered_with_is_refused_by_both_faces(saved: Path, tmp_path: Path, name: str) -> None:
    copy = Path(shutil.copytree(saved, tmp_path / "model"))
    (file,) = copy.rglob(name)
    with file.open("ab") as stream:
        stream.write(b"\0")
    message = rf"{name} does not match the SHA-256 in MLmodel"
    with pytest.raises(ModelError, match=message):
        flavor.load_model(str(copy))
    with pytest.raises(MlflowException, match=message):
        mlflow.pyfunc.load_model(str(copy))


@pytest.mark.system
def test_the_native_face_runs_no_code_of_the_model(saved: Path, tmp_path: Path) -> None:
    """Digests say nothing about the code, and what this package imports later must not be found there."""
    model = Path(shutil.copytree(saved, tmp_path / "model"))
    (model / "code" / "tvm.py").write_text("raise SystemExit('the code of the model was run')\n")
    load = f"from ansor_mlflow import flavor; print(flavor.load_model({str(model)!r}).entry.path)"
    result = subprocess.run([sys.executable, "-c", load], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.stderr == ""
    assert result.stdout.strip() == Manifest.read(saved).libraries[0].path


def test_which_library_was_taken_is_explained_and_logged(
    saved: Path, compiled_network: CompiledNetwork, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    threads = compiled_network.fingerprint.num_threads
    for model in (flavor.load_model(str(saved)), mlflow.pyfunc.load_model(str(saved))):
        caplog.clear()
        choice = flavor.explain_load(model)
        assert (choice.level, choice.entry.fingerprint) == ("exact", compiled_network.fingerprint)
        assert [record.getMessage() for record in caplog.records] == [str(choice)]
        assert str(choice).endswith(f": it was made for this CPU and {threads} threads")


@pytest.mark.parametrize("by", ["argument", "environment"])
def test_pyfunc_is_told_how_to_load(saved: Path, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    config = {"num_threads": available_cpus() + 1}
    if by == "environment":
        monkeypatch.setenv("MLFLOW_PYFUNC_INFERENCE_CONFIG", json.dumps(config))
    with pytest.raises(MlflowException, match=f"num_threads={available_cpus() + 1}: it must be a whole number from 1"):
        mlflow.pyfunc.load_model(str(saved), model_config=config if by == "argument" else None)


@pytest.fixture(scope="module")
def pyfunc(saved: Path) -> Any:
    return mlflow.pyfunc.load_model(str(saved))


def test_predict_takes_a_dictionary_or_the_only_array(
    pyfunc: Any, inputs: dict[str, np.ndarray], expected: np.ndarray
) -> None:
    assert_same(pyfunc.predict(inputs), expected)
    assert_same(pyfunc.predict(inputs["data"]), expected)


@pytest.mark.parametrize("cell", [np.asarray, lambda image: image.ravel().tolist()], ids=["array", "flat list"])
def test_predict_takes_a_data_frame_of_tensors(
    pyfunc: Any, inputs: dict[str, np.ndarray], expected: np.ndarray, cell: Callable[[np.ndarray], Any]
) -> None:
    """A row for each element of the batch; MLflow gives flat tensors their shape."""
    frame = pd.DataFrame({"data": [cell(image) for image in inputs["data"]]})
    assert_same(pyfunc.predict(frame), expected)


@pytest.fixture(scope="module")
def wrapper(host_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What pyfunc wraps, without MLflow's own check of the signature: a network with a batch of two and two outputs."""
    directory = tmp_path_factory.mktemp("two_heads")
    builder = GraphBuilder(seed=0)
    data = builder.input("data", (2, 3, 4))
    builder.relu("positive", data)
    builder.node("Flatten", "flat", data, axis=1)
    model = builder.build("two_heads", {"positive": (2, 3, 4), "flat": (2, 12)})
    flavor.save_model(compiled(model, host_target, directory), str(directory / "model"))
    return flavor._load_pyfunc(str(directory / "model"))


DATA = np.arange(-12, 12, dtype=np.float32).reshape(2, 3, 4)


@pytest.mark.parametrize(
    "data",
    [
        {"data": DATA},
        DATA,
        pd.DataFrame({"data": list(DATA)}),
        pd.DataFrame({"data": DATA.tolist()}),
        pd.DataFrame({"data": [DATA]}),
        pd.DataFrame({"data": [DATA.tolist()]}),
    ],
)
def test_several_outputs_come_by_name(wrapper: Any, data: Any) -> None:
    outputs = wrapper.predict(data)
    assert list(outputs) == ["positive", "flat"]
    np.testing.assert_array_equal(outputs["positive"], DATA.clip(min=0))
    np.testing.assert_array_equal(outputs["flat"], DATA.reshape(2, 12))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (DATA[:, :1], r"input 'data' is float32 \(2, 1, 4\): the model expects 'data': float32 \(2, 3, 4\)"),
        (DATA.astype(int), r"input 'data' is int64 \(2, 3, 4\): the model expects 'data': float32 \(2, 3, 4\)"),
        (DATA[:0], r"input 'data' is float32 \(0, 3, 4\): the model expects 'data': float32 \(2, 3, 4\)"),
        ({"x": DATA}, r"inputs \['x'\]: the model expects 'data': float32 \(2, 3, 4\)"),
        (DATA.tolist(), "list was given: the model takes an array, a dictionary or a DataFrame"),
        (pd.DataFrame({"x": list(DATA)}), r"columns \['x'\]: the model expects \['data'\]"),
        (pd.DataFrame({"data": ["a", "b"]}), "column 'data': its cells must be tensors of one shape and float32"),
        (pd.DataFrame({"data": [[1.0], [1.0, 2.0]]}), "column 'data': its cells must be tensors of one shape"),
        (pd.DataFrame({"data": []}), "column 'data': its cells must be tensors of one shape"),
        (pd.DataFrame({"data": [1.0, 2.0]}), r"input 'data' is float32 \(2,\): the model expects"),
    ],
)
def test_data_that_does_not_fit_is_told_what_would(wrapper: Any, data: Any, message: str) -> None:
    with pytest.raises(MlflowException, match=message) as caught:
        wrapper.predict(data)
    assert caught.value.error_code == "INVALID_PARAMETER_VALUE"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("no space")])
def test_only_the_model_whose_logging_ended_with_an_error_is_failed(
    new_experiment: str, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def write_package(*_: object) -> None:
        raise error

    monkeypatch.setattr(flavor, "write_package", write_package)
    with mlflow.start_run():
        mlflow.initialize_logged_model(name="of the user")
        with pytest.raises(type(error)):
            flavor.log_model([], name="ours")
        with pytest.raises(MlflowException, match="Both"):  # before there is a model
            flavor.log_model([], "ours", name="ours")
        mlflow.initialize_logged_model(name="of the user")
        with pytest.raises(MlflowException, match="Both"):
            flavor.log_model([], "ours", name="ours")
    models = mlflow.search_logged_models(output_format="list")
    assert sorted((model.name, str(model.status)) for model in models) == [
        ("of the user", "PENDING"),
        ("of the user", "PENDING"),
        ("ours", "FAILED"),
    ]
