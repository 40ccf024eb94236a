"""MLflow's `evaluate` times any pyfunc model with our evaluator, and compares its outputs with what they should be."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlflow
import numpy as np
import onnx
import pandas as pd
import pytest
from helpers.served import compiled
from mlflow.exceptions import MlflowException
from mlflow.models.evaluation import EvaluationResult
from numpy.testing import assert_allclose

from ansor_mlflow import flavor, names
from ansor_mlflow.measuring import ReferenceSession
from ansor_mlflow.model import Manifest
from ansor_mlflow.networks.graph import GraphBuilder
from ansor_mlflow.serving import get_signature

if TYPE_CHECKING:
    from tvm.target import Target

QUICK = {"turns": 1, "warm_up_s": 0, "measure_s": 0.01}
TIMES = {names.LATENCY_MS, names.LATENCY_P90_MS, names.LATENCY_STD_MS, names.THROUGHPUT_PER_S, names.PROBE_SPREAD}
ERRORS = {names.MAX_ABS_ERROR, names.MAX_REL_ERROR}

pytestmark = pytest.mark.usefixtures("new_experiment", "_keep_sys_path")


@pytest.fixture(scope="module")
def tuned(small_onnx: Path, host_target: Target, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of the small network as a model of ours; compiled without records, which takes less time."""
    directory = tmp_path_factory.mktemp("tuned")
    flavor.save_model(compiled(onnx.load(small_onnx), host_target, directory), str(directory / "model"))
    return str(directory / "model")


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((2, 3, 16, 16)).astype(np.float32)


@pytest.fixture(scope="module")
def logits(images: np.ndarray, small_onnx: Path) -> list[np.ndarray]:
    session = ReferenceSession(small_onnx, num_threads=1)
    return [session.run({"data": image[None]})["logits"][0] for image in images]


@pytest.fixture(scope="module")
def frame(images: np.ndarray) -> pd.DataFrame:
    return pd.DataFrame({"data": list(images)})


def evaluate(model: Any, data: Any, **config: Any) -> EvaluationResult:
    targets = config.pop("targets", None)
    return mlflow.models.evaluate(
        model, data, targets=targets, model_type="tvm", evaluators="ansor-latency", evaluator_config={**QUICK, **config}
    )


def log_onnx(path: Path) -> str:
    return mlflow.onnx.log_model(onnx.load(path), name="onnx", pip_requirements=["onnxruntime"]).model_uri


def test_a_tuned_model_is_timed_and_compared_with_an_onnx_file(
    tuned: str, frame: pd.DataFrame, small_onnx: Path
) -> None:
    with mlflow.start_run() as run:
        result = evaluate(tuned, frame, reference=str(small_onnx), turns=2)
    assert set(result.metrics) == TIMES | ERRORS
    assert 0 < result.metrics[names.LATENCY_MS] <= result.metrics[names.LATENCY_P90_MS]
    assert_allclose(result.metrics[names.THROUGHPUT_PER_S], 1e3 / result.metrics[names.LATENCY_MS])
    assert result.metrics[names.MAX_REL_ERROR] < 1e-4
    assert mlflow.get_run(run.info.run_id).data.metrics == {
        name: float(f"{value:.5g}") for name, value in result.metrics.items()
    }


@pytest.mark.nightly
def test_a_model_is_timed_in_turns_with_what_is_served_today(tuned: str, frame: pd.DataFrame, small_onnx: Path) -> None:
    result = evaluate(tuned, frame, reference=str(small_onnx), champion="openvino", turns=2)
    assert set(result.metrics) == TIMES | ERRORS | {
        "openvino_latency_ms",
        "speedup_vs_openvino",
        names.CHAMPION_MAX_REL_ERROR,
    }
    ratio = result.metrics["openvino_latency_ms"] / result.metrics[names.LATENCY_MS]
    assert result.metrics["speedup_vs_openvino"] == pytest.approx(ratio)
    assert result.metrics[names.CHAMPION_MAX_REL_ERROR] < 1e-4


def test_every_call_is_in_the_artifacts(tuned: str, frame: pd.DataFrame, tmp_path: Path) -> None:
    with mlflow.start_run() as run:
        result = evaluate(tuned, frame)
    assert set(result.metrics) == TIMES  # without a reference
    files = {file.path for file in mlflow.MlflowClient().list_artifacts(run.info.run_id)}
    assert files == {names.LATENCY_SAMPLES_FILE, names.LATENCY_FIGURE}
    samples = result.artifacts["latency_samples"].content[names.LATENCY_MS]
    assert len(samples) >= 10
    assert samples.median() == pytest.approx(result.metrics[names.LATENCY_MS])
    result.save(str(tmp_path / "saved"))
    assert EvaluationResult.load(str(tmp_path / "saved")).artifacts["latency"].content.size[0] > 500


def test_an_onnx_model_is_measured_the_same_way(frame: pd.DataFrame, small_onnx: Path, tuned: str) -> None:
    with mlflow.start_run():
        model_uri = log_onnx(small_onnx)
        result = evaluate(model_uri, frame, reference=tuned)
    assert result.metrics[names.MAX_REL_ERROR] < 1e-4
    logged = mlflow.get_logged_model(model_uri.removeprefix("models:/"))
    assert {metric.key for metric in logged.metrics or []} == TIMES | ERRORS


def test_targets_are_the_expected_outputs(tuned: str, frame: pd.DataFrame, logits: list[np.ndarray]) -> None:
    """The second row's targets are wrong by a known amount: every row is compared."""
    right = evaluate(tuned, frame.assign(expected=logits), targets="expected")
    assert right.metrics[names.MAX_REL_ERROR] < 1e-4
    wrong = evaluate(tuned, frame.assign(expected=[logits[0], logits[1] + 0.5]), targets="expected")
    assert wrong.metrics[names.MAX_ABS_ERROR] == pytest.approx(0.5, rel=1e-3)


def test_a_model_that_takes_base64_is_measured_too(
    tuned: str, frame: pd.DataFrame, small_onnx: Path, tmp_path: Path
) -> None:
    """Its signature says nothing about its tensors."""
    manifest = Manifest.read(Path(tuned))
    path = str(shutil.copytree(tuned, tmp_path / "model"))
    mlflow.models.set_signature(path, get_signature(manifest.inputs, manifest.outputs, "binary"))
    lists = pd.DataFrame({"data": [image.tolist() for image in frame["data"]]})
    for data in (frame, lists):
        assert evaluate(path, data, reference=str(small_onnx)).metrics[names.MAX_REL_ERROR] < 1e-4


def test_a_fixed_batch_is_filled_up(tmp_path: Path) -> None:
    """Three rows in batches of two: the third, whose target is wrong, is compared together with the first."""
    builder = GraphBuilder(seed=0)
    builder.relu("relu", builder.input("data", (2, 4)))
    onnx.save(builder.build("pair", {"relu": (2, 4)}), tmp_path / "pair.onnx")
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    data = pd.DataFrame({"data": list(rows), "expected": [rows[0], rows[1], rows[2] + 3]})
    with mlflow.start_run():
        result = evaluate(log_onnx(tmp_path / "pair.onnx"), data, targets="expected")
    assert result.metrics[names.MAX_ABS_ERROR] == 3
    assert_allclose(result.metrics[names.THROUGHPUT_PER_S], 2e3 / result.metrics[names.LATENCY_MS])


def test_plain_columns_and_functions_are_measured_too() -> None:
    """A function gets rows of the frame, as other evaluators give it."""
    data = pd.DataFrame({"a": [1.0, 2.0, 3.0], "b": [10.0, 20.0, 30.0], "sum": [11.0, 22.0, 34.0]})
    result = evaluate(lambda rows: rows["a"] + rows["b"], data, targets="sum", batch_size=3)
    assert result.metrics[names.MAX_ABS_ERROR] == 1


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"turn": 3}, "unknown key 'turn'; perhaps you meant turns"),
        ({"batch_size": -1}, "batch_size=-1: it must be a whole number of at least 1, or auto"),
        ({"reference": "missing.onnx"}, "reference=missing.onnx: no such file; give an ONNX file, or a model's URI"),
        ({"champion": "openvino"}, "champion=openvino: it needs the network; give the model's ONNX file as reference"),
        ({"champion": "torch"}, "champion='torch': it must be onnxruntime or openvino"),
    ],
)
def test_a_wrong_configuration_is_one_line(
    tuned: str, frame: pd.DataFrame, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(MlflowException, match="ansor-latency: ") as failure:
        evaluate(tuned, frame, **config)
    assert message in failure.value.message
    assert "\n" not in failure.value.message
    assert failure.value.error_code == "INVALID_PARAMETER_VALUE"


@pytest.mark.parametrize("shape", [(3, 8, 8), (16, 16, 3)])
def test_cells_of_another_shape_are_refused(tuned: str, shape: tuple[int, ...]) -> None:
    """As many numbers in another order would be other numbers."""
    with pytest.raises(MlflowException, match=rf"\(1, {', '.join(map(str, shape))}\) does not match .*3, 16, 16"):
        evaluate(tuned, pd.DataFrame({"data": [np.zeros(shape, np.float32)]}))


def test_an_onnx_reference_needs_named_tensors(small_onnx: Path) -> None:
    with pytest.raises(MlflowException, match="it needs tensors by name"):
        evaluate(lambda rows: [1.0] * len(rows), pd.DataFrame({"a": [1.0]}), reference=str(small_onnx))


def test_a_reference_that_takes_other_tensors(tuned: str, frame: pd.DataFrame, tmp_path: Path) -> None:
    builder = GraphBuilder(seed=0)
    builder.relu("relu", builder.input("data", (8, 3, 16, 16)))
    onnx.save(builder.build("eight", {"relu": (8, 3, 16, 16)}), tmp_path / "eight.onnx")
    message = r"reference=.+eight.onnx: it cannot be computed from the data \(.+\); name the data's columns"
    with pytest.raises(MlflowException, match=message):
        evaluate(tuned, frame, reference=str(tmp_path / "eight.onnx"))


def test_predictions_without_a_model_cannot_be_timed() -> None:
    data = pd.DataFrame({"a": [1.0], "predicted": [1.0], "expected": [1.0]})
    with pytest.raises(MlflowException, match="no model was given, so there is nothing to time"):
        mlflow.models.evaluate(
            data=data, predictions="predicted", targets="expected", model_type="tvm", evaluators="ansor-latency"
        )


def test_quality_and_latency_come_of_one_call_and_reach_the_registered_model(
    host_target: Target, tmp_path: Path
) -> None:
    builder = GraphBuilder(seed=0)
    prices = builder.dense("prices", builder.input("area", (1, 4)), units=1, in_units=4)
    builder.node("ReduceMean", "price", prices, axes=[1], keepdims=0)  # MLflow wants a number for each row
    network = compiled(builder.build("prices", {"price": (1,)}), host_target, tmp_path)
    with mlflow.start_run():
        logged = flavor.log_model(network, name="prices", registered_model_name="prices", code_paths=[])
    areas = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
    data = pd.DataFrame({"area": list(areas), "paid": np.arange(5.0)})
    config = {"ansor-latency": QUICK, "regressor": {"log_explainer": False}}
    result = mlflow.models.evaluate(
        "models:/prices/1", data, targets="paid", predictions="price", model_type="regressor", evaluator_config=config
    )
    assert {"root_mean_squared_error", names.LATENCY_MS} <= set(result.metrics)
    assert names.MAX_REL_ERROR not in result.metrics  # prices that were paid are not what the network computes
    known = {metric.key for metric in mlflow.get_logged_model(logged.model_id).metrics or []}
    assert known >= TIMES


def test_models_of_others_are_left_alone_unless_an_option_is_given() -> None:
    data = pd.DataFrame({"area": np.arange(5.0), "paid": np.arange(5.0)})

    def predict(rows: pd.DataFrame) -> Any:
        return rows["area"].to_numpy()

    def metrics(config: dict[str, Any]) -> set[str]:
        found = mlflow.models.evaluate(
            predict, data, targets="paid", model_type="regressor", evaluator_config={"ansor-latency": config}
        )
        return set(found.metrics)

    without = metrics({})
    assert "root_mean_squared_error" in without
    assert metrics(QUICK) == without | TIMES


@pytest.mark.nightly
def test_mlflow_loads_it_only_to_evaluate() -> None:
    code = (
        "import sys, mlflow.models; loaded = 'ansor_mlflow' in sys.modules;"
        "print(loaded, 'ansor-latency' in mlflow.models.list_evaluators(), 'tvm' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "True", "False"]
