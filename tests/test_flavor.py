"""The MLflow flavor: a compiled network is saved, logged, loaded and scored as any other model of MLflow."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlflow
import numpy as np
import onnx
import pandas as pd
import pytest
import yaml
from helpers.untuned import compiled_untuned
from mlflow.exceptions import MlflowException
from mlflow.models import Model, ModelSignature
from mlflow.types import Schema, TensorSpec

from ansor_mlflow import flavor
from ansor_mlflow.device.threads import available_cpus
from ansor_mlflow.errors import ModelError
from ansor_mlflow.lowering.lower import lower
from ansor_mlflow.measuring.compare import ReferenceSession
from ansor_mlflow.model import Manifest
from ansor_mlflow.model.loading import TunedModel
from ansor_mlflow.model.package import CompiledNetwork
from ansor_mlflow.networks.graph import GraphBuilder
from ansor_mlflow.networks.load import load_network
from ansor_mlflow.tensors import random_inputs

if TYPE_CHECKING:
    from tvm.target import Target

ROOT = Path(__file__).parents[1]
PINS = [f"{name}=={version(name)}" for name in ("apache-tvm", "apache-tvm-ffi", "numpy")]


@pytest.fixture(autouse=True, scope="module")
def _keep_sys_path() -> Iterator[None]:
    """Pyfunc puts a model's code first in `sys.path`, which processes of later tests would inherit."""
    before = list(sys.path)
    yield
    sys.path[:] = before


@pytest.fixture(scope="module")
def saved(compiled_network: CompiledNetwork, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small network, saved with defaults. Not to be written to."""
    path = tmp_path_factory.mktemp("saved") / "model"
    flavor.save_model(compiled_network, str(path))
    return path


@pytest.fixture(scope="module")
def two_heads(host_target: Target, tmp_path_factory: pytest.TempPathFactory) -> CompiledNetwork:
    """A network with a batch of two and two outputs, compiled without records."""
    directory = tmp_path_factory.mktemp("two_heads")
    builder = GraphBuilder(seed=0)
    data = builder.input("data", (2, 3, 4))
    builder.relu("positive", data)
    builder.node("Flatten", "flat", data, axis=1)
    onnx.save(builder.build("two_heads", {"positive": (2, 3, 4), "flat": (2, 12)}), directory / "two_heads.onnx")
    network = load_network(str(directory / "two_heads.onnx"))
    return compiled_untuned(network, lower(network.model, host_target), host_target, directory)


@pytest.fixture(scope="module")
def inputs(compiled_network: CompiledNetwork) -> dict[str, np.ndarray]:
    return random_inputs(compiled_network.inputs, seed=3)


@pytest.fixture(scope="module")
def expected(small_onnx: Path, inputs: dict[str, np.ndarray]) -> np.ndarray:
    """What ONNX Runtime computes."""
    return ReferenceSession(small_onnx, num_threads=1).run(inputs)["logits"]


def assert_same(output: Any, expected: np.ndarray) -> None:
    np.testing.assert_allclose(output, expected, rtol=0, atol=1e-4 * abs(expected).max())


# -- what is saved ---------------------------------------------------------------------------------------------------


def test_signature_names_every_tensor(saved: Path) -> None:
    signature = Model.load(str(saved)).signature
    assert signature.inputs == Schema([TensorSpec(np.dtype("float32"), (-1, 3, 16, 16), "data")])
    assert signature.outputs == Schema([TensorSpec(np.dtype("float32"), (-1, 10), "logits")])


def test_input_example_is_an_input(saved: Path, pyfunc: Any) -> None:
    example = Model.load(str(saved)).load_input_example(str(saved))
    assert list(example) == ["data"]
    assert (example["data"].shape, example["data"].dtype) == ((1, 3, 16, 16), "float32")
    assert pyfunc.predict(example).shape == (1, 10)


def test_requirements_are_pinned_without_looking_at_the_library(saved: Path) -> None:
    requirements = (saved / "requirements.txt").read_text().splitlines()
    assert requirements == [f"mlflow=={mlflow.__version__}", *PINS]
    conda = yaml.safe_load((saved / "conda.yaml").read_text())
    assert conda["dependencies"][-1]["pip"] == requirements
    assert (saved / "python_env.yaml").is_file()


def test_default_environment() -> None:
    assert flavor.get_default_pip_requirements() == PINS
    pip = flavor.get_default_conda_env()["dependencies"][-1]["pip"]
    assert set(PINS) < set(pip)


def test_model_carries_the_code_that_loads_it(saved: Path) -> None:
    assert (saved / "code" / "ansor_mlflow" / "flavor.py").is_file()
    assert not list((saved / "code").rglob("__pycache__"))


def test_mlmodel_describes_the_library(saved: Path, compiled_network: CompiledNetwork) -> None:
    manifest = Manifest.read(saved)
    (entry,) = manifest.libraries
    assert manifest.network == "small"
    assert entry.fingerprint == compiled_network.fingerprint
    assert entry.coverage["task_share"] == 1.0
    assert entry.provenance == {"layout": "NHWC"}
    assert Model.load(str(saved)).model_size_bytes > compiled_network.library.stat().st_size


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


def test_extra_requirements_are_added(compiled_network: CompiledNetwork, tmp_path: Path) -> None:
    flavor.save_model(compiled_network, str(tmp_path / "model"), extra_pip_requirements=["pillow"])
    assert {*PINS, "pillow"} < set((tmp_path / "model" / "requirements.txt").read_text().splitlines())


@pytest.mark.parametrize("as_file", [True, False])
def test_conda_environment(compiled_network: CompiledNetwork, tmp_path: Path, as_file: bool) -> None:
    environment = {"name": "mine", "dependencies": ["python=3.11", "pip", {"pip": ["numpy>=1.26"]}]}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(environment))
    conda_env = str(tmp_path / "mine.yaml") if as_file else environment
    flavor.save_model(compiled_network, str(tmp_path / "model"), conda_env=conda_env)
    saved = yaml.safe_load((tmp_path / "model" / "conda.yaml").read_text())
    assert saved["name"] == "mine"
    assert "numpy>=1.26" in (tmp_path / "model" / "requirements.txt").read_text().splitlines()


def test_an_environment_is_given_once(compiled_network: CompiledNetwork, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Only one of `conda_env`, `pip_requirements`"):
        flavor.save_model(compiled_network, str(tmp_path / "model"), conda_env={}, pip_requirements=["numpy"])


def test_a_directory_with_files_is_not_overwritten(compiled_network: CompiledNetwork, saved: Path) -> None:
    with pytest.raises(MlflowException, match="already exists and is not empty"):
        flavor.save_model(compiled_network, str(saved))


# -- loading ---------------------------------------------------------------------------------------------------------


def test_native_model(saved: Path, inputs: dict[str, np.ndarray], expected: np.ndarray) -> None:
    assert_same(flavor.load_model(str(saved)).run(inputs)["logits"], expected)


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


def test_a_model_of_another_flavor(tmp_path: Path) -> None:
    Model(flavors={"onnx": {"data": "model.onnx"}}).save(str(tmp_path / "MLmodel"))
    with pytest.raises(ModelError, match="it has no flavor 'tvm'; give a model that compile logged"):
        flavor.load_model(str(tmp_path))


def test_a_directory_without_a_model(tmp_path: Path) -> None:
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


def test_a_gpu_that_the_model_is_not_for(saved: Path) -> None:
    message = "device='cuda', but its libraries are for llvm .+, which never stand in for another kind of device"
    with pytest.raises(ModelError, match=message):
        flavor.load_model(str(saved), device="cuda")
    with pytest.raises(MlflowException, match=message):
        mlflow.pyfunc.load_model(str(saved), model_config={"device": "cuda"})


@pytest.mark.parametrize("by", ["argument", "environment"])
def test_pyfunc_is_told_how_to_load(saved: Path, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    config = {"num_threads": available_cpus() + 1}
    if by == "environment":
        monkeypatch.setenv("MLFLOW_PYFUNC_INFERENCE_CONFIG", json.dumps(config))
    with pytest.raises(MlflowException, match=f"num_threads={available_cpus() + 1}: it must be a whole number from 1"):
        mlflow.pyfunc.load_model(str(saved), model_config=config if by == "argument" else None)


@pytest.mark.parametrize("text", ["", "flavors: [", "flavors: 5", "flavors: {tvm: 5}", "5", "\x00"])
def test_a_damaged_description(tmp_path: Path, text: str) -> None:
    (tmp_path / "MLmodel").write_text(text)
    with pytest.raises(ModelError, match=r"the model's MLmodel file is damaged \(.+\); log the model again"):
        flavor.load_model(str(tmp_path))


# -- pyfunc ----------------------------------------------------------------------------------------------------------


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


def test_raw_model(pyfunc: Any) -> None:
    assert isinstance(pyfunc.get_raw_model(), TunedModel)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (np.zeros((1, 3, 8, 8), np.float32), r"\(1, 3, 8, 8\) does not match expected shape \(-1, 3, 16, 16\)"),
        (np.zeros((1, 3, 16, 16)), "input float64 does not match expected dtype float32"),
        ({"image": np.zeros((1, 3, 16, 16), np.float32)}, r"missing inputs \['data'\]. Note that there were extra"),
        ("text", r"missing inputs \['data'\]"),
    ],
    ids=["shape", "dtype", "name", "type"],
)
def test_mlflow_holds_the_data_against_the_signature(pyfunc: Any, data: Any, message: str) -> None:
    with pytest.raises(MlflowException, match=message):
        pyfunc.predict(data)


@pytest.fixture(scope="module")
def wrapper(two_heads: CompiledNetwork, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What pyfunc wraps, without MLflow's own check of the signature."""
    path = tmp_path_factory.mktemp("two_heads") / "model"
    flavor.save_model(two_heads, str(path))
    return flavor._load_pyfunc(str(path))


DATA = np.arange(-12, 12, dtype=np.float32).reshape(2, 3, 4)


def assert_two_heads(outputs: dict[str, np.ndarray]) -> None:
    assert list(outputs) == ["positive", "flat"]
    np.testing.assert_array_equal(outputs["positive"], DATA.clip(min=0))
    np.testing.assert_array_equal(outputs["flat"], DATA.reshape(2, 12))


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
    assert_two_heads(wrapper.predict(data))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (DATA[:, :1], r"input 'data' is float32 \(2, 1, 4\): the model expects 'data': float32 \(2, 3, 4\)"),
        (DATA.astype(int), r"input 'data' is int64 \(2, 3, 4\): the model expects 'data': float32 \(2, 3, 4\)"),
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


def test_a_row_of_a_dataframe_is_an_element_of_the_batch(two_heads: CompiledNetwork, tmp_path: Path) -> None:
    """MLflow takes DataFrames for tensors whose first dimension the signature leaves open."""
    signature = ModelSignature(inputs=Schema([TensorSpec(np.dtype("float32"), (-1, 3, 4), "data")]))
    flavor.save_model(two_heads, str(tmp_path / "model"), signature=signature)
    model = mlflow.pyfunc.load_model(str(tmp_path / "model"))
    assert_two_heads(model.predict(pd.DataFrame({"data": list(DATA)})))
    first = pd.DataFrame({"data": list(DATA[:1])})
    np.testing.assert_array_equal(model.predict(first)["flat"], DATA[:1].reshape(1, 12))


# -- another process -------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_mlflow_scores_the_input_example_with_the_code_inside_the_model(
    saved: Path, compiled_network: CompiledNetwork, small_onnx: Path, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(saved, tmp_path / "model"))
    with (model / "code" / "ansor_mlflow" / "__init__.py").open("a") as file:
        file.write("\nimport pathlib\n\npathlib.Path('imported-from-the-model').touch()\n")
    (tmp_path / "empty").mkdir()
    arguments = ["-m", str(model), "-i", str(saved / "serving_input_example.json"), "--env-manager", "local"]
    result = subprocess.run(
        [sys.executable, "-m", "mlflow", "models", "predict", *arguments],
        cwd=tmp_path / "empty",
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "empty" / "imported-from-the-model").exists()
    example = flavor.default_example(compiled_network.inputs)
    expected = ReferenceSession(small_onnx, num_threads=1).run(example)["logits"]
    assert_same(json.loads(result.stdout)["predictions"], expected)


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
