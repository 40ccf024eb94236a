"""What is read from a graph: whether rows of a batch depend on one another, and inputs with which outputs vary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from helpers.exports import make_model, tensor
from onnx import TensorProto, helper, numpy_helper

from ansor_mlflow.graphs import rows_of, simplify
from ansor_mlflow.measuring import ReferenceSession, is_quantized, same_for_all, seeded_inputs, what_to_do
from ansor_mlflow.networks import input_specs, load_network, output_specs
from ansor_mlflow.tensors import Arrays, NetworkShapes

F, INTEGER = TensorProto.FLOAT, TensorProto.INT64
ROWS = 4
WEIGHTS: dict[str, np.ndarray] = {
    "w": np.ones((6, 5), np.float32),
    "square": np.ones((4, 4), np.float32),
    "same": np.ones((4, 6), np.float32),
    "places": np.arange(24, dtype=np.float32).reshape(4, 6),
    "bias": np.arange(6, dtype=np.float32),
    "table": np.ones((9, 3), np.float32),
    "zero": np.array([0]),
    "one": np.array([1]),
    "last": np.array([3]),
    "three": np.array(3),
    "axis0": np.array(0),
    "axis1": np.array(1),
    "values": np.float32([0, 1]),
    "to_pairs": np.array([4, 3, 2]),
    "melted": np.array([12, 2]),
    "unmelted": np.array([4, 3, 2]),
    "other_rows": np.array([2, 2, 6]),
    "pads_rows": np.array([1, 0, 0, 0]),
    "pads": np.array([0, 1, 0, 0]),
    "repeats_rows": np.array([2, 1]),
    "repeats": np.array([1, 2]),
    "order": np.array([3, 2, 1, 0]),
    "columns": np.array([1, 0]),
    "half": np.float32([0.5, 0.5, 0.25, 0.25]),
    "scale": np.float32(0.5),
    "minus": np.array([-9]),
    "backwards": np.array([-1]),
    "four": np.array([4]),
    "flat": np.array([4, 12]),
    "wider": np.float32([1, 2]),
    "higher": np.float32([2, 1]),
    "between": np.float32([1.2, 1]),
    "first_two": np.array([[1, 0]] * 4),
    "axes10": np.array([1, 0]),
    "moves": np.array([0, 1, 0, -1]),
    "of_blocks": np.arange(1, 13, dtype=np.float32).reshape(4, 3),
    "of_columns": np.float32([[1, 2, 3]] * 4),
    "no_shift": np.zeros((4, 3), np.uint8),
    "codes": np.ones((4, 6), np.uint8),
    "byte": np.uint8(3),
    "bytes": np.uint8([3, 3, 3, 3]),
}


def node(op_type: str, inputs: str, outputs: str = "y", **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op_type, inputs.split(" "), outputs.split(" "), **attributes)


def rows(tmp_path: Path, nodes: list[onnx.NodeProto], opset: int = 17, **inputs: tuple[int, list[int]]) -> str:
    """What is decided of a network of x, [4, 6], and other inputs; as `compile` asks it."""
    values = {"x": (F, [ROWS, 6]), **inputs}
    used = {name for node_ in nodes for name in node_.input}
    graph = helper.make_graph(
        nodes,
        "network",
        [helper.make_tensor_value_info(name, *value) for name, value in values.items() if name in used],
        [helper.make_empty_tensor_value_info("y")],
        [numpy_helper.from_array(array, name) for name, array in WEIGHTS.items() if name in used],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    onnx.save(onnx.shape_inference.infer_shapes(model), tmp_path / "network.onnx")
    return rows_of(simplify(load_network(str(tmp_path / "network.onnx")).model, "network"))


INDEPENDENT = {
    "dense": [node("MatMul", "x w")],
    "elements": [node("Relu", "x", "a"), node("Add", "a bias", "b"), node("Mul", "b x")],
    "a constant that is the same for all": [node("Add", "x same")],
    "sums of rows": [node("ReduceSum", "x one", keepdims=0)],
    "softmax": [node("Softmax", "x", axis=-1)],
    "there and back": [
        node("Transpose", "x", "t", perm=[1, 0]),
        node("Softmax", "t", "s", axis=0),
        node("Transpose", "s"),
    ],
    "melted": [
        node("Reshape", "x to_pairs", "p"),
        node("Reshape", "p melted", "m"),
        node("Softmax", "m", "s", axis=1),
        node("Reshape", "s unmelted"),
    ],
    "attention": [
        node("Reshape", "x to_pairs", "q"),
        node("Transpose", "q", "k", perm=[0, 2, 1]),
        node("MatMul", "q k", "s"),
        node("Softmax", "s", "p", axis=-1),
        node("MatMul", "p q"),
    ],
    "parts of columns": [node("Slice", "x zero last one", "a"), node("Concat", "a x", axis=1)],
    "padding of columns": [node("Pad", "x pads", mode="reflect")],
    "repeated columns": [node("Tile", "x repeats")],
    "gathered columns": [node("Gather", "x columns", axis=1)],
    "words": [node("Gather", "table ids")],
    "one hot": [node("OneHot", "ids three values")],
    "gathered elements": [node("GatherElements", "x ids", axis=1)],
    "sums of all before": [node("CumSum", "x axis1")],
    "mean and variance": [node("MeanVarianceNormalization", "x", axes=[1])],
    "products of pairs": [node("Einsum", "x x", equation="bi,bj->bij")],
    "gemm": [node("Gemm", "x w")],
    "turned gemm": [node("Transpose", "x", "t", perm=[1, 0]), node("Gemm", "t w", transA=1)],
    "layer normalisation": [node("LayerNormalization", "x bias bias", axis=1)],
    "quantised": [node("QuantizeLinear", "x scale byte", "q"), node("DequantizeLinear", "q scale byte")],
    "largest": [node("ArgMax", "x", axis=1)],
    "scales with all axes": [node("LayerNormalization", "x same", axis=-1)],
    "wider rows": [node("Resize", "x  wider", mode="linear")],
    "rows of a size": [node("Resize", "x   flat", mode="linear")],
    "shape alone": [node("Shape", "x", "s"), node("Reshape", "x s")],
}
DEPENDENT = {
    "longest": [
        node("ReduceMax", "lengths", "m", axes=[0], keepdims=1),
        node("Cast", "m", "f", to=F),
        node("Div", "x f"),
    ],
    "all of it": [node("ReduceMean", "x", "m"), node("Sub", "x m")],
    "softmax over rows": [node("Softmax", "x", axis=0)],
    "turned": [node("Transpose", "x", "t", perm=[1, 0]), node("Softmax", "t", "s", axis=1), node("Transpose", "s")],
    "sums of rows before": [node("CumSum", "x axis0")],
    "a constant for each place": [node("Add", "x places")],
    "mixed by a matrix": [node("MatMul", "square x")],
    "of all pairs": [node("Transpose", "x", "t"), node("MatMul", "x t")],
    "other order": [node("Gather", "x order")],
    "rows of another": [node("Gather", "x lengths")],
    "one row": [node("Slice", "x zero one zero", "a"), node("Sub", "x a")],
    "backwards": [node("Slice", "x last minus zero backwards")],
    "rows on one another": [node("Concat", "x x", "c", axis=0), node("ReduceSum", "c zero", "s"), node("Sub", "x s")],
    "moved down": [node("Pad", "x pads_rows", "p"), node("Slice", "p zero four zero")],
    "largest of rows": [node("ArgMax", "x", "a", axis=0, keepdims=1), node("Cast", "a", "f", to=F), node("Sub", "x f")],
    "largest few": [node("TopK", "x one", "v i", axis=0), node("Sub", "x v")],
    "mean over rows": [node("MeanVarianceNormalization", "x", axes=[0])],
    "mean over rows, from the end": [node("MeanVarianceNormalization", "x", axes=[-2])],
    "scales of places": [node("LayerNormalization", "x places", axis=1)],
    "between rows": [node("Resize", "x  higher", "h", mode="linear"), node("Reshape", "h flat")],
    "as many rows": [node("Resize", "x  between", mode="nearest", coordinate_transformation_mode="asymmetric")],
    "first of all": [node("Reshape", "x melted", "m"), node("GatherElements", "m first_two", axis=1)],
    "diagonal": [node("Slice", "x zero four one", "s"), node("Einsum", "s", equation="bb->b")],
    "sums of products": [node("Einsum", "x x", "s", equation="bi,bj->ij"), node("MatMul", "x s")],
    "one scale for all": [node("DynamicQuantizeLinear", "x", "q s z"), node("DequantizeLinear", "q s z")],
    "a scale for each place": [
        node("QuantizeLinear", "x half bytes", "q", axis=0),
        node("DequantizeLinear", "q half bytes", axis=0),
    ],
    "what is not zero": [
        node("NonZero", "x", "n"),
        node("ReduceMax", "n", "m"),
        node("Cast", "m", "f", to=F),
        node("Sub", "x f"),
    ],
    "noise": [node("RandomNormalLike", "x", "n"), node("Add", "x n")],
}
INTEGERS: dict[str, tuple[int, list[int]]] = {"ids": (INTEGER, [ROWS, 6]), "lengths": (INTEGER, [ROWS])}


@pytest.mark.parametrize("name", INDEPENDENT)
def test_what_does_not_mix_rows(tmp_path: Path, name: str) -> None:
    assert rows(tmp_path, INDEPENDENT[name], **INTEGERS) == "independent"


@pytest.mark.parametrize("name", DEPENDENT)
def test_what_mixes_rows(tmp_path: Path, name: str) -> None:
    assert rows(tmp_path, DEPENDENT[name], **INTEGERS) == "dependent"


@pytest.mark.parametrize(
    "nodes",
    [
        [node("Reshape", "x other_rows", "p"), node("Transpose", "p", "t", perm=[1, 0, 2]), node("Reshape", "t like")],
        [node("Det", "squares")],
    ],
)
def test_what_the_graph_does_not_decide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: list[onnx.NodeProto]
) -> None:
    monkeypatch.setitem(WEIGHTS, "like", np.array([4, 6]))
    assert rows(tmp_path, nodes, squares=(F, [ROWS, 2, 2])) == ""


@pytest.mark.parametrize(
    ("expected", "nodes"),
    {
        "dependent": [node("Pad", "x moves  axes10")],
        "": [
            node("Transpose", "x", "t"),
            node("QuantizeLinear", "t scale byte", "q"),
            node("QLinearMatMul", "codes scale byte q half bytes scale byte", "p"),
            node("DequantizeLinear", "p scale byte", "d"),
            node("Transpose", "d"),
        ],
    }.items(),
)
def test_pads_and_scales_by_their_axes(tmp_path: Path, expected: str, nodes: list[onnx.NodeProto]) -> None:
    assert rows(tmp_path, nodes, opset=18) == expected


@pytest.mark.parametrize(("scales", "expected"), [("of_blocks", "dependent"), ("of_columns", "independent")])
def test_scales_of_blocks_may_be_of_rows(tmp_path: Path, scales: str, expected: str) -> None:
    steps = ("QuantizeLinear", f"x {scales} no_shift", "q"), ("DequantizeLinear", f"q {scales} no_shift", "y")
    nodes = [node(*step, axis=1, block_size=2) for step in steps]
    assert rows(tmp_path, nodes, opset=21) == expected


def test_an_old_softmax_works_on_all_axes_behind_its_own(tmp_path: Path) -> None:
    one, two = [node("Softmax", "x", axis=1)], [node("Softmax", "x", axis=0)]
    assert rows(tmp_path, one, opset=11) == "independent"
    assert rows(tmp_path, two, opset=11) == "dependent"


@pytest.mark.parametrize("network", ["resnet-18", "mobilenet", "squeezenet_v1.1", "mlp"])
def test_rows_of_images_are_independent(network: str) -> None:
    assert rows_of(simplify(load_network(network, batch_size=2).model, network)) == "independent"


F, INTEGER = TensorProto.FLOAT, TensorProto.INT64
make = helper.make_node
CONSTANTS = {
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
    model = make_model(nodes, values, [tensor("y", None, elem_type)], CONSTANTS)
    onnx.save(onnx.shape_inference.infer_shapes(model), path)
    return path


def found(path: Path, seeds: range = range(3)) -> tuple[list[Arrays], list[Arrays]]:
    """The inputs that are chosen for a network, and what ONNX Runtime makes of them."""
    model = onnx.load(path)
    inputs = seeded_inputs(path, [NetworkShapes(input_specs(model), output_specs(model))], seeds)
    session = ReferenceSession(path, 1, exact=True)
    return inputs, [session.run(values) for values in inputs]


HIDDEN: dict[str, tuple[list[onnx.NodeProto], dict[str, tuple[int, list[int]]]]] = {
    "words of a table": ([make("Gather", ["table", "ids"], ["y"])], {"ids": (INTEGER, [2, 6])}),
    "words with an offset, in another shape": (
        [
            make("Unsqueeze", ["ids", "axis"], ["wide"]),
            make("Add", ["wide", "two"], ["moved"]),
            make("Gather", ["table", "moved"], ["y"]),
        ],
        {"ids": (INTEGER, [2, 6])},
    ),
    "lengths, of which the first two places are left out": (
        [
            make("Unsqueeze", ["lengths", "axis"], ["ends"]),
            make("Sub", ["ends", "two"], ["less"]),
            make("Less", ["places", "less"], ["kept"]),
            make("Cast", ["kept"], ["mask"], to=F),
            make("Mul", ["x", "mask"], ["y"]),
        ],
        {"x": (F, [2, 6]), "lengths": (INTEGER, [2])},
    ),
    "a mask of integers": (
        [make("Cast", ["mask"], ["kept"], to=F), make("Mul", ["x", "kept"], ["y"])],
        {"x": (F, [2, 6]), "mask": (INTEGER, [2, 6])},
    ),
    "an image of bytes": (
        [make("Cast", ["x"], ["f"], to=F), make("Div", ["f", "hundred"], ["g"]), make("Floor", ["g"], ["y"])],
        {"x": (TensorProto.UINT8, [1, 3, 4, 4])},
    ),
    "what is positive": ([make("Log", ["x"], ["y"])], {"x": (F, [2, 6])}),
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
        ([np.zeros(3), np.ones(3)], False),
        ([np.zeros(3), np.zeros(2)], False),
        ([np.zeros(0), np.zeros(0)], True),
    ],
)
def test_outputs_that_say_nothing_are_known(values: list[Any], is_same: bool) -> None:
    assert same_for_all([{"y": array} for array in values]) == (["y"] if is_same else [])


RANDOM = {
    "RandomNormalLike": make("RandomNormalLike", ["x"], ["n"]),
    "RandomUniform": make("RandomUniform", [], ["n"], shape=[2, 6]),
    "Bernoulli": make("Bernoulli", ["x"], ["n"]),
}


@pytest.mark.parametrize("operator", RANDOM)
def test_random_numbers_are_no_fault_of_the_model(tmp_path: Path, operator: str) -> None:
    nodes = [make("Abs", ["z"], ["a"]), make("Sigmoid", ["a"], ["x"]), RANDOM[operator], make("Add", ["x", "n"], ["y"])]
    path = saved(tmp_path / "network.onnx", nodes, {"z": (F, [2, 6])})
    advice = what_to_do(path, 1, [{"z": np.ones((2, 6), np.float32)}], 1e-4)
    assert f"because {operator} draws random numbers" in advice
    assert "compile it again" not in advice


def test_a_reference_that_is_not_finite_is_said_to_be(tmp_path: Path) -> None:
    path = saved(tmp_path / "network.onnx", [make("Log", ["x"], ["y"])], {"x": (F, [2, 6])})
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
    inner = make(op_type, ["x"], ["y"], **attributes)
    branch = helper.make_graph([inner], "branch", [], [helper.make_tensor_value_info("y", F, None)])
    outer = make("If", ["c"], ["z"], then_branch=branch, else_branch=branch) if is_in_branch else inner
    onnx.save(helper.make_model(helper.make_graph([outer], "network", [], [])), tmp_path / "network.onnx")
    assert is_quantized(tmp_path / "network.onnx") == rounds
