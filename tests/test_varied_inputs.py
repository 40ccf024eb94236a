"""Networks are compared on inputs with which outputs vary, and what is no fault of a model is not blamed on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from helpers.exports import make_model, tensor
from onnx import TensorProto, helper

from ansor_mlflow.measuring import ReferenceSession, is_quantized, same_for_all, seeded_inputs, what_to_do
from ansor_mlflow.networks import input_specs, output_specs
from ansor_mlflow.tensors import Arrays, NetworkShapes

F, INTEGER = TensorProto.FLOAT, TensorProto.INT64
node = helper.make_node
WEIGHTS = {
    "table": np.arange(300, dtype=np.float32).reshape(100, 3),
    "axis": np.array([1]),
    "places": np.arange(6),
    "two": np.array(2),
    "hundred": np.array(100.0, np.float32),
    "threes": np.float32([-3, -3]),
}


def saved(
    path: Path, nodes: list[onnx.NodeProto], inputs: dict[str, tuple[int, list[int]]], elem_type: int = F
) -> Path:
    values = [tensor(name, shape, dtype) for name, (dtype, shape) in inputs.items()]
    model = make_model(nodes, values, [tensor("y", None, elem_type)], WEIGHTS)
    onnx.save(onnx.shape_inference.infer_shapes(model), path)
    return path


def found(path: Path, seeds: range = range(3)) -> tuple[list[Arrays], list[Arrays]]:
    """The inputs that are chosen for a network, and what ONNX Runtime makes of them."""
    model = onnx.load(path)
    inputs = seeded_inputs(path, [NetworkShapes(input_specs(model), output_specs(model))], seeds)
    session = ReferenceSession(path, 1, exact=True)
    return inputs, [session.run(values) for values in inputs]


HIDDEN: dict[str, tuple[list[onnx.NodeProto], dict[str, tuple[int, list[int]]]]] = {
    "words of a table": ([node("Gather", ["table", "ids"], ["y"])], {"ids": (INTEGER, [2, 6])}),
    "words with an offset, in another shape": (
        [
            node("Unsqueeze", ["ids", "axis"], ["wide"]),
            node("Add", ["wide", "two"], ["moved"]),
            node("Gather", ["table", "moved"], ["y"]),
        ],
        {"ids": (INTEGER, [2, 6])},
    ),
    "lengths, of which the first two places are left out": (
        [
            node("Unsqueeze", ["lengths", "axis"], ["ends"]),
            node("Sub", ["ends", "two"], ["less"]),
            node("Less", ["places", "less"], ["kept"]),
            node("Cast", ["kept"], ["mask"], to=F),
            node("Mul", ["x", "mask"], ["y"]),
        ],
        {"x": (F, [2, 6]), "lengths": (INTEGER, [2])},
    ),
    "a mask of integers": (
        [node("Cast", ["mask"], ["kept"], to=F), node("Mul", ["x", "kept"], ["y"])],
        {"x": (F, [2, 6]), "mask": (INTEGER, [2, 6])},
    ),
    "an image of bytes": (
        [node("Cast", ["x"], ["f"], to=F), node("Div", ["f", "hundred"], ["g"]), node("Floor", ["g"], ["y"])],
        {"x": (TensorProto.UINT8, [1, 3, 4, 4])},
    ),
    "what is positive": ([node("Log", ["x"], ["y"])], {"x": (F, [2, 6])}),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_outputs_vary_with_the_inputs_that_are_chosen(tmp_path: Path, name: str) -> None:
    inputs, outputs = found(saved(tmp_path / "network.onnx", *HIDDEN[name]))
    assert same_for_all(outputs) == []
    assert all(np.isfinite(values["y"]).all() for values in outputs)
    for spec, values in inputs[0].items():
        assert values.dtype == inputs[1][spec].dtype
    again, _ = found(tmp_path / "network.onnx")
    np.testing.assert_equal(again, inputs)


@pytest.mark.parametrize(
    ("values", "is_same"),
    [
        ([np.zeros(3), np.zeros(3)], True),
        ([np.full(3, np.nan), np.full(3, np.nan)], True),
        ([np.arange(3.0), np.arange(3.0)], True),
        ([np.arange(3.0)], False),
        ([np.zeros(3)], True),
        ([np.zeros(3), np.ones(3)], False),
        ([np.zeros(3), np.zeros(2)], False),
        ([np.array([True]), np.array([False])], False),
        ([np.zeros(0), np.zeros(0)], True),
    ],
)
def test_outputs_that_say_nothing_are_known(values: list[Any], is_same: bool) -> None:
    assert same_for_all([{"y": array} for array in values]) == (["y"] if is_same else [])


RANDOM = {
    "RandomNormalLike": node("RandomNormalLike", ["x"], ["n"]),
    "RandomUniform": node("RandomUniform", [], ["n"], shape=[2, 6]),
    "Bernoulli": node("Bernoulli", ["x"], ["n"]),
}


@pytest.mark.parametrize("operator", RANDOM)
def test_random_numbers_are_no_fault_of_the_model(tmp_path: Path, operator: str) -> None:
    nodes = [node("Abs", ["z"], ["a"]), node("Sigmoid", ["a"], ["x"]), RANDOM[operator], node("Add", ["x", "n"], ["y"])]
    path = saved(tmp_path / "network.onnx", nodes, {"z": (F, [2, 6])})
    advice = what_to_do(path, 1, [{"z": np.ones((2, 6), np.float32)}], 1e-4)
    assert f"because {operator} draws random numbers" in advice
    assert "compile it again" not in advice


def test_a_reference_that_is_not_finite_is_said_to_be(tmp_path: Path) -> None:
    path = saved(tmp_path / "network.onnx", [node("Log", ["x"], ["y"])], {"x": (F, [2, 6])})
    assert "hold NaN or infinities" in what_to_do(path, 1, [{"x": np.full((2, 6), -1, np.float32)}], 1e-4)
    assert "compile it again" in what_to_do(path, 1, [{"x": np.ones((2, 6), np.float32)}], 1e-4)


@pytest.mark.parametrize(
    ("op_type", "attributes", "rounds"),
    [
        ("QLinearConv", {}, True),
        ("DynamicQuantizeLSTM", {}, True),
        ("DynamicQuantizeLinear", {}, True),
        ("MatMulNBits", {"accuracy_level": 4}, True),
        ("MatMulNBits", {"accuracy_level": 1}, False),
        ("MatMulNBits", {}, False),
        ("DequantizeLinear", {}, False),
    ],
)
@pytest.mark.parametrize("is_in_branch", [False, True])
def test_a_network_that_rounds_is_known_by_its_operators(
    tmp_path: Path, op_type: str, attributes: dict[str, int], rounds: bool, is_in_branch: bool
) -> None:
    inner = node(op_type, ["x"], ["y"], **attributes)
    branch = helper.make_graph([inner], "branch", [], [helper.make_tensor_value_info("y", F, None)])
    outer = node("If", ["c"], ["z"], then_branch=branch, else_branch=branch) if is_in_branch else inner
    onnx.save(helper.make_model(helper.make_graph([outer], "network", [], [])), tmp_path / "network.onnx")
    assert is_quantized(tmp_path / "network.onnx") == rounds
