"""Batches of any size run on a library that was compiled for one, where that is right, and are refused where not."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import onnx
import pytest
from helpers.served import compiled, pairs
from mlflow.exceptions import MlflowException

from ansor_mlflow import flavor
from ansor_mlflow.errors import UserInputError
from ansor_mlflow.networks.graph import GraphBuilder
from ansor_mlflow.serving import PyfuncModel
from ansor_mlflow.tensors import TensorSpec, from_objects, stack_cells

if TYPE_CHECKING:
    from tvm.target import Target

LoadNetwork = Callable[[onnx.ModelProto], PyfuncModel]


@pytest.fixture(scope="module")
def load(host_target: Target, tmp_path_factory: pytest.TempPathFactory) -> LoadNetwork:
    """Compiles a network, and loads it as pyfunc does, without MLflow's own check of the signature."""

    def compile_and_load(model: onnx.ModelProto) -> PyfuncModel:
        directory = tmp_path_factory.mktemp(model.graph.name)
        flavor.save_model(compiled(model, host_target, directory), str(directory / "model"))
        return flavor._load_pyfunc(str(directory / "model"))

    return compile_and_load


@pytest.fixture(scope="module", params=[1, 3])
def model(request: pytest.FixtureRequest, load: LoadNetwork) -> PyfuncModel:
    return load(pairs(batch=request.param))


@pytest.fixture(scope="module")
def batch_of_three(load: LoadNetwork) -> PyfuncModel:
    return load(pairs(batch=3))


def rows(count: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(count)
    return {
        "image": rng.standard_normal((count, 3, 4), np.float32),
        "gain": rng.standard_normal((count, 1, 1), np.float32),
    }


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 8])
def test_any_number_of_rows(model: PyfuncModel, count: int) -> None:
    inputs = rows(count)
    outputs, product = model.predict(inputs), inputs["image"] * inputs["gain"]
    assert list(outputs) == ["positive", "flat"]
    np.testing.assert_allclose(outputs["positive"], product.clip(min=0), rtol=1e-6)
    np.testing.assert_allclose(outputs["flat"], product.reshape(-1, 12), rtol=1e-6)
    np.testing.assert_equal(inputs, rows(count))  # they are left as they were


def test_inputs_with_different_numbers_of_rows(batch_of_three: PyfuncModel) -> None:
    data = {"image": rows(4)["image"], "gain": rows(2)["gain"]}
    message = r"different numbers of rows, \{'image': 4, 'gain': 2\}: give all of them the same"
    with pytest.raises(MlflowException, match=message) as caught:
        batch_of_three.predict(data)
    assert caught.value.get_http_status_code() == 400


def mixing(name: str) -> onnx.ModelProto:
    """Networks whose inputs and outputs have the same first dimension, though it is no batch."""
    builder = GraphBuilder(seed=0)
    size = {"one_for_the_middle": 3, "other_order": 4}.get(name, 2)
    left = builder.input("left", (size, 2))
    if name == "softmax_over_rows":
        builder.node("Softmax", name, left, axis=0)
    elif name == "square_matrices":
        builder.node("MatMul", name, left, builder.input("right", (2, 2)))
    elif name == "one_for_each_place":
        builder.node("Mul", name, left, builder.weight("places", np.array([[1.0], [2.0]])))
    elif name == "one_for_the_middle":
        builder.node("Mul", name, left, builder.weight("places", np.array([[1.0], [2.0], [1.0]])))
    elif name == "other_order":  # of rows that are two steps of two sequences: the first and the last stay
        pairs_ = builder.node("Reshape", "pairs", left, builder.constant("by_two", np.array([2, 2, 2])))
        turned = builder.node("Transpose", "turned", pairs_, perm=[1, 0, 2])
        builder.node("Reshape", name, turned, builder.constant("flat", np.array([4, 2])))
    return builder.build(name, {name: (size, 2)})


@pytest.mark.parametrize(
    "name", ["softmax_over_rows", "square_matrices", "one_for_each_place", "one_for_the_middle", "other_order"]
)
def test_rows_that_depend_on_one_another_are_not_torn_apart(load: LoadNetwork, name: str) -> None:
    model = load(mixing(name))
    names = [spec.name for spec in model.get_raw_model().inputs]
    size = model.get_raw_model().inputs[0].shape[0]
    assert model.predict({name: np.eye(size, 2, dtype=np.float32) for name in names}).shape == (size, 2)
    message = f"the inputs have 6 rows: in this network .* takes exactly the {size} that it was compiled for"
    with pytest.raises(MlflowException, match=message):
        model.predict({name: np.ones((6, 2), np.float32) for name in names})


def test_an_output_without_the_batch(load: LoadNetwork) -> None:
    builder = GraphBuilder(seed=0)
    builder.node("ReduceSum", "sum", builder.input("data", (2, 3)), builder.constant("axes", np.array([0])))
    model = load(builder.build("sum_of_rows", {"sum": (1, 3)}))
    data = np.ones((2, 3), np.float32)
    np.testing.assert_array_equal(model.predict(data), [[2, 2, 2]])
    with pytest.raises(MlflowException, match=r"\(4, 3\): the model expects 'data': float32 \(2, 3\)"):
        model.predict(np.ones((4, 3), np.float32))


@pytest.mark.parametrize("number", [300, -1, 2**70, float("inf"), float("nan"), 300.0, 1.5, -1.0])
def test_numbers_that_the_dtype_does_not_have(number: float) -> None:
    spec = TensorSpec("data", (1, 2), "uint8")
    message = "column 'data': its cells must be tensors of one shape and uint8"
    with pytest.raises(UserInputError, match=message):
        from_objects(np.array([[number, 1]], object), spec)
    with pytest.raises(UserInputError, match=message):
        stack_cells([[number, 1]], spec)


def test_whole_numbers_may_be_written_as_floats() -> None:
    spec = TensorSpec("data", (1, 2), "uint8")
    np.testing.assert_array_equal(from_objects(np.array([[3.0, 255]], object), spec), np.array([[3, 255]], np.uint8))
    assert stack_cells([[3.0, 255]], spec).dtype == np.uint8


def test_the_bytes_of_a_scalar() -> None:
    spec = TensorSpec("gain", (), "float32")
    assert stack_cells([np.float32(2.5).tobytes()], spec) == np.float32(2.5)
    with pytest.raises(UserInputError, match="column 'gain': its cells must be tensors"):
        stack_cells([bytes(8)], spec)
