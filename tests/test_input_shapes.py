"""What a file leaves open gets a size, and inputs get values: what is taken, what is proposed, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from helpers.onnx_files import proposed, run, save, start, value
from helpers.small_networks import small_shapes
from onnx import TensorProto, helper, numpy_helper

from ansor_mlflow.errors import UserInputError
from ansor_mlflow.networks.load import load_network
from ansor_mlflow.tensors import TensorSpec, random_inputs


def save_inputs(path: Path, shapes: dict[str, list[int | str | None]], elem_type: int = TensorProto.FLOAT) -> str:
    """A model of any inputs, which it returns."""
    nodes = [helper.make_node("Identity", [name], [f"{name}_out"]) for name in shapes]
    inputs = [value(name, shape, elem_type) for name, shape in shapes.items()]
    return save(path, nodes, inputs, [value(f"{name}_out", None, elem_type) for name in shapes])


@pytest.mark.parametrize(
    ("declared", "batch"),
    [
        ({"x": ["N", 3]}, {"x": [4, 3]}),
        ({"x": ["batch", 3], "y": ["batch_size", 5]}, {"x": [4, 3], "y": [4, 5]}),
        ({"x": ["p2o.DynamicDimension.0", 3]}, {"x": [4, 3]}),
        ({"x": [None, 3], "scalar": []}, {"x": [4, 3], "scalar": []}),
        ({"x": ["batch", 3], "state": [2, "batch", 64]}, {"x": [4, 3], "state": [2, 4, 64]}),
        ({"x": [None, 3], "state": [2, None, 64]}, {"x": [4, 3], "state": [2, 4, 64]}),
        ({"x": ["N", 3], "both": ["N", "2 * N + 1"]}, {"x": [4, 3], "both": [4, 9]}),
    ],
)
def test_a_dynamic_batch_is_one_or_batch_size(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    declared: dict[str, list[int | str | None]],
    batch: dict[str, list[int]],
) -> None:
    path = save_inputs(tmp_path / "batch.onnx", declared)
    of_four = load_network(path, batch_size=4)
    assert {spec.name: list(spec.shape) for spec in of_four.inputs} == batch
    assert caplog.messages == []
    of_one = load_network(path)
    assert run(of_one)[0].size <= run(of_four)[0].size / 4
    (line,) = caplog.messages
    assert re.search(
        r"batch\.onnx: its batch is dynamic \(dimension \d of 'x'.*\) and taken as 1; give batch_size", line
    )


@pytest.mark.parametrize(
    ("declared", "dynamic"),
    [
        ({"x": ["sequence_length", 576]}, "sequence_length (dimension 0)"),
        ({"x": ["seq", "batch", 64]}, "seq (dimension 0)"),
        ({"x": ["N", "time", 80]}, "time (dimension 1)"),
        ({"x": ["batch", "n", 80]}, "n (dimension 1)"),
    ],
)
def test_not_every_first_axis_is_a_batch(
    tmp_path: Path, declared: dict[str, list[int | str | None]], dynamic: str
) -> None:
    path = save_inputs(tmp_path / "sequence.onnx", declared)
    with pytest.raises(UserInputError, match=rf"'x' has dynamic {re.escape(dynamic)} in") as caught:
        load_network(path)
    (spec,) = load_network(path, input_shapes=proposed(caught.value)).inputs
    assert sum(size == 1 for size in spec.shape) == (len(set(declared["x"]) & {"batch", "N"}) > 0)


@pytest.mark.parametrize(
    "declared",
    [
        {"waveforms": ["batch_size", "N"], "mask": ["N"]},
        {"waveforms": ["?", "samples"], "points": ["samples", 3]},
        {"adjacency": ["N", "N"]},
        {"x": ["batch", 7], "adjacency": ["N", "N"], "nodes": ["N", 16]},
        {"x": ["rows", "columns"], "y": ["columns", 3]},
    ],
)
def test_a_length_is_no_batch_whatever_it_is_called(
    tmp_path: Path, declared: dict[str, list[int | str | None]]
) -> None:
    path = save_inputs(tmp_path / "length.onnx", declared)
    length = next(dim for dim in reversed(next(iter(declared.values()))) if isinstance(dim, str))
    length = "N" if "adjacency" in declared else length
    with pytest.raises(UserInputError, match=rf"has dynamic .*\b{length} \(dimension") as caught:
        load_network(path)
    sizes = {
        size
        for name, shape in proposed(caught.value).items()
        for size, dim in zip(shape, declared[name], strict=True)
        if dim == length
    }
    (size,) = sizes
    assert size > 1


def test_axes_of_one_name_have_one_size(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    declared: dict[str, list[int | str | None]] = {
        "ids": ["batch", "seq"],
        "mask": ["batch", "past + seq"],
        "past": ["batch", 2, "past", 4],
    }
    path = save_inputs(tmp_path / "decoder.onnx", declared)
    network = load_network(path, input_shapes={"ids": [3, 5], "past": [3, 2, 7, 4]})
    assert [spec.shape for spec in network.inputs] == [(3, 5), (3, 12), (3, 2, 7, 4)]
    assert caplog.messages == []
    with pytest.raises(UserInputError, match="'past' has dynamic past") as caught:
        load_network(path, input_shapes={"ids": [3, 5]})
    assert proposed(caught.value) == {"ids": [3, 5], "mask": [3, 133], "past": [3, 2, 128, 4]}
    with pytest.raises(UserInputError, match=r"batch_size=4 with .*: dimension 0 of its input 'ids' is 3; leave"):
        load_network(path, input_shapes={"ids": [3, 5]}, batch_size=4)


@pytest.mark.parametrize(
    ("name", "shape", "sizes"),
    [
        ("x", [None, None, None, 3], [1, 224, 224, 3]),
        ("ids", ["batch", "sequence_length"], [1, 128]),
        ("x", ["N", None, None, None], [1, 3, 224, 224]),
        ("audio", [1, 1, None], [1, 1, 16_000]),
        ("mel", ["N", 80, None], [1, 80, 3_000]),
        ("features", ["N", None, 80], [1, 100, 80]),
        ("video", ["N", 3, None, None, None], [1, 3, 16, 224, 224]),
        ("x", None, [1, 3, 224, 224]),
    ],
)
def test_usual_sizes_are_suggested(
    tmp_path: Path, name: str, shape: list[int | str | None] | None, sizes: list[int]
) -> None:
    elem_type = TensorProto.INT64 if name == "ids" else TensorProto.FLOAT
    path = save_inputs(tmp_path / "free.onnx", {name: shape}, elem_type)  # type: ignore[dict-item]
    with pytest.raises(UserInputError, match=r"which are usual sizes, or those that it was made for$") as caught:
        load_network(path)
    assert proposed(caught.value) == {name: sizes}


def save_branches(path: Path, ir_version: int = 8, declared: Sequence[int | str] = ("N", 3)) -> str:
    """Doubles x where rate is 16000, otherwise adds x twice; branches hold branches, and names of their own."""

    def branch(op: str, nodes: list[onnx.NodeProto], output: str) -> onnx.GraphProto:
        weight = numpy_helper.from_array(np.array([2.0 if op == "Mul" else 3.0], np.float32), "inner")
        return helper.make_graph(
            [*nodes, helper.make_node(op, [output, "inner"], ["result"])], op, [], [value("result", None)], [weight]
        )

    relu = helper.make_node("Relu", ["x"], ["shared"])
    inner = helper.make_node(
        "If", ["always"], ["chosen"],
        then_branch=branch("Add", [], "shared"), else_branch=branch("Mul", [], "shared"),
    )  # fmt: skip
    nodes = [
        helper.make_node("Equal", ["rate", "wanted"], ["is_wanted"]),
        helper.make_node(
            "If", ["is_wanted"], ["y"],
            then_branch=branch("Mul", [relu, inner], "chosen"), else_branch=branch("Add", [relu], "shared"),
        ),
    ]  # fmt: skip
    inputs = [value("x", declared), value("rate", [], TensorProto.INT64)]
    weights = {"wanted": np.array(16_000), "always": np.array(True)}
    inputs += [
        value(name, [], helper.np_dtype_to_tensor_dtype(array.dtype))
        for name, array in weights.items()
        if ir_version < 4
    ]
    initializers = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "branches", inputs, [value("y", None)], initializers)
    onnx.save(helper.make_model(graph, ir_version=ir_version, opset_imports=[helper.make_opsetid("", 17)]), path)
    return str(path)


@pytest.mark.parametrize("ir_version", [3, 8])
@pytest.mark.parametrize(("rate", "expected"), [(16_000, lambda x: (x + 3) * 2), (8_000, lambda x: x + 3)])
def test_an_input_with_a_value_decides_branches(tmp_path: Path, ir_version: int, rate: int, expected: Any) -> None:
    path = save_branches(tmp_path / "branches.onnx", ir_version)
    network = load_network(path, input_values={"rate": rate})
    assert network.inputs == (TensorSpec("x", (1, 3), "float32"),)
    assert "If" not in {node.op_type for node in network.model.graph.node}
    data = random_inputs(network.inputs, 0)["x"]
    (actual,) = run(network)
    np.testing.assert_allclose(actual, expected(np.maximum(data, 0)), rtol=1e-6)
    onnx.checker.check_model(network.model, full_check=True)
    onnx.save(network.model, tmp_path / "copy.onnx")
    assert load_network(str(tmp_path / "copy.onnx")).sha256 == network.sha256


def test_a_branch_that_nothing_decides_stays(tmp_path: Path) -> None:
    network = load_network(save_branches(tmp_path / "branches.onnx"))
    assert [spec.name for spec in network.inputs] == ["x", "rate"]
    assert [node.op_type for node in network.model.graph.node] == ["Equal", "If"]


@pytest.mark.parametrize(
    ("shape", "elem_type", "given", "expected"),
    [
        ([], TensorProto.INT64, 16_000, np.int64(16_000)),
        ([2, 3], TensorProto.FLOAT, 0.1, np.full((2, 3), 0.1, np.float32)),
        (["N", 3], TensorProto.UINT8, [[1, 2, 3], [4, 5, 6]], np.array([[1, 2, 3], [4, 5, 6]], np.uint8)),
        (["N"], TensorProto.BOOL, True, np.array([True])),
        (None, TensorProto.DOUBLE, [1.5], np.array([1.5])),
        ([1], TensorProto.FLOAT, float("inf"), np.array([np.inf], np.float32)),
    ],
)
def test_a_value_has_the_dtype_and_shape_of_its_input(
    tmp_path: Path, shape: list[int | str] | None, elem_type: int, given: Any, expected: np.ndarray
) -> None:
    nodes = [helper.make_node("Identity", [name], [f"{name}_out"]) for name in ("x", "fixed")]
    inputs = [value("x", [2]), value("fixed", shape, elem_type)]
    outputs = [value("x_out", [2]), value("fixed_out", None, elem_type)]
    network = load_network(save(tmp_path / "fixed.onnx", nodes, inputs, outputs), input_values={"fixed": given})
    assert [spec.name for spec in network.inputs] == ["x"]
    actual = run(network)[1]
    assert actual.dtype == np.asarray(expected).dtype
    np.testing.assert_array_equal(actual, expected)
    assert network.outputs[1].shape == np.shape(expected)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sr": 1}, r"input_values names 'sr', which is not an input of .*branches\.onnx; its inputs are x, rate$"),
        ({"rate": [1, 2]}, r"gives 'rate' of .* a value of shape \[2\]; it must be a number, or of shape \(\)$"),
        ({"x": [[1, 2]]}, r"a value of shape \[1, 2\]; it must be a number, or of shape \(N, 3\)$"),
        ({"rate": 1.5}, "gives 'rate' of .* 1.5, which is no int64; give values of that type"),
        ({"rate": float("nan")}, "which is no int64"),
        ({"x": 1e39}, "which is no float32"),
        ({"rate": "16000"}, "16000; it must be a number, or lists of numbers that form an array"),
        ({"x": [[1], [1, 2]]}, "lists of numbers that form an array"),
        ({"x": 1, "rate": 1}, "gives all inputs of .* a value; leave out one that differs between calls"),
    ],
)
def test_values_that_do_not_fit(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserInputError, match=message) as caught:
        load_network(save_branches(tmp_path / "branches.onnx"), input_values=values)
    assert "\n" not in str(caught.value)


def test_values_for_inputs_of_builtin_networks() -> None:
    shapes = small_shapes("bert-tiny")
    network = load_network("bert-tiny", input_shapes=shapes, input_values={"attention_mask": 1, "token_type_ids": 0})
    assert [spec.name for spec in network.inputs] == ["input_ids"]
    whole = load_network("bert-tiny", input_shapes=shapes)
    ids = random_inputs(network.inputs, 0)
    others = {"attention_mask": np.ones((1, 16), np.int64), "token_type_ids": np.zeros((1, 16), np.int64)}
    np.testing.assert_allclose(run(network)[0], start(whole).run(None, {**ids, **others})[0], rtol=1e-4, atol=1e-5)
