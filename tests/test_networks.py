"""Built-in networks are real and repeatable, files are read, and what is wrong with either is said in one line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from helpers.onnx_files import proposed, run, save, start, value
from helpers.small_networks import small_shapes
from onnx import TensorProto, helper

from ansor_mlflow.errors import UserInputError
from ansor_mlflow.networks import operators
from ansor_mlflow.networks.families import BUILTIN_NETWORKS
from ansor_mlflow.networks.graph import GraphBuilder
from ansor_mlflow.networks.load import Network, load_network
from ansor_mlflow.tensors import OPEN, TensorSpec, random_inputs

SMALL_IMAGE = {"data": [1, 3, 64, 64]}
NUM_PARAMETERS = {
    # torchvision's `num_params` (https://docs.pytorch.org/vision/stable/models.html)
    "resnet-18": 11_689_512,
    "resnet-34": 21_797_672,
    "resnet-50": 25_557_032,
    "resnet-101": 44_549_160,
    "resnet-152": 60_192_808,
    "vgg-11": 132_863_336,
    "vgg-13": 133_047_848,
    "vgg-16": 138_357_544,
    "vgg-19": 143_667_240,
    "mobilenet_v2": 3_504_872,
    "squeezenet_v1.1": 1_235_496,
    "inception_v3": 27_161_264 - 3_326_696,  # without the auxiliary head
    "densenet-121": 7_978_856,
    "resnet3d-18": 33_371_472 + 64 * 3 * (7 - 3) * 7 * 7,  # its r3d_18 has a first kernel of 3×7×7
    # Only the paper's layers; nobody publishes these two with 7×7×7 kernels and 400 classes
    "resnet3d-34": 63_718_736,
    "resnet3d-50": 47_018_576,
    # Keras's "trainable params"
    "mobilenet": 4_231_976,
    # https://huggingface.co/prajjwal1/bert-tiny, of which the paper says 4.4 million
    "bert-tiny": 4_385_920,
    "mlp": 784 * 128 + 128 + 128 * 64 + 64 + 64 * 10 + 10,
}


def save_conv(path: Path, shape: list[Any]) -> str:
    """A convolution without a fixed image size, with the shapes that an exporter would have written into the file."""
    builder = GraphBuilder(seed=1)
    data = builder.input("data", tuple(shape))
    builder.relu("out", builder.conv("conv", data, (4, 3, 3, 3), padding=1))
    model = builder.build("conv", {"out": (shape[0], 4, *shape[2:])})
    onnx.save(onnx.shape_inference.infer_shapes(model), path)
    return str(path)


@pytest.fixture(scope="module", params=[name for name in BUILTIN_NETWORKS if name not in operators.NETWORKS])
def builtin(request: pytest.FixtureRequest) -> Network:
    return load_network(request.param, input_shapes=small_shapes(request.param))


@pytest.mark.nightly
def test_builtin_network_runs_and_looks_at_its_input(builtin: Network) -> None:
    assert {spec.name: list(spec.shape) for spec in builtin.inputs} == small_shapes(builtin.name)
    session = start(builtin)
    outputs, others = (session.run(None, random_inputs(builtin.inputs, seed)) for seed in (0, 1))
    assert [output.shape for output in outputs] == [spec.shape for spec in builtin.outputs]
    for output, other in zip(outputs, others, strict=True):
        assert np.isfinite(output).all()
        assert 0.1 < output.std() < 10
        assert output.min() < 0 or output.max() > 1  # no probabilities
        assert abs(output - other).max() > 0.1 * output.std()


@pytest.mark.nightly
def test_builtin_network_has_the_published_number_of_parameters(builtin: Network) -> None:
    # Statistics are not trained, and the builder's constants are scalars or integers.
    trained = [
        weight
        for weight in builtin.model.graph.initializer
        if weight.dims and weight.data_type == TensorProto.FLOAT and not weight.name.endswith((".mean", ".var"))
    ]
    weights_of_pixels_left_out = 512 * (7 * 7 - 1) * 4096 if builtin.name.startswith("vgg") else 0
    num_parameters = sum(int(np.prod(weight.dims)) for weight in trained)
    assert num_parameters + weights_of_pixels_left_out == NUM_PARAMETERS[builtin.name]


def test_default_image_is_that_of_imagenet_and_follows_the_batch_size() -> None:
    network = load_network("resnet-18", batch_size=2)
    assert network.inputs[0].shape == (2, 3, 224, 224)
    assert network.outputs[0].shape == (2, 1000)


def test_a_seed_always_gives_the_same_weights() -> None:
    first, again, other = (load_network("resnet-18", input_shapes=SMALL_IMAGE, seed=seed) for seed in (3, 3, 4))
    assert first.model == again.model
    assert first.model != other.model


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "resnet-17"}, r"network='resnet-17' is neither .*; perhaps you meant resnet-18, "),
        ({"name": "ResNet50"}, "perhaps you meant resnet-50"),
        ({"name": "alexnet"}, "built-in are resnet-18, .*resnet-block; a file ends in .onnx"),
        ({"name": ""}, "built-in are resnet-18"),
        ({"batch_size": 0}, r"would be \[0, 3, 224, 224\], but every dimension must be at least 1"),
        ({"batch_size": 4, "input_shapes": {"data": [2, 3, 64, 64]}}, r"batch_size=4, but .*\[2, 3, 64, 64\]; leave"),
        ({"input_shapes": {"x": [1, 3, 64, 64]}}, "names 'x', which is not an input of resnet-18; its inputs are data"),
        ({"input_shapes": {"data": [3, 64, 64]}}, r"gives 'data' of resnet-18 3 dimensions .*but it has 4.*; give 4"),
        ({"input_shapes": {"data": [1, 1, 64, 64]}}, r"\[1, 1, 64, 64\]; it must be \[N, 3, H, W\]"),
        ({"input_shapes": {"data": [1, 3, 31, 64]}}, "H and W at least 32"),
        ({"name": "inception_v3", "input_shapes": {"data": [1, 3, 74, 75]}}, "H and W at least 75"),
        ({"name": "resnet3d-18", "input_shapes": {"data": [1, 3, 16, 31, 32]}}, r"\[N, 3, D, H, W\] with H and W at"),
        ({"name": "mlp", "input_shapes": {"data": [1, 3, 28, 28]}}, r"it must be \[N, 1, H, W\]"),
        (
            {"name": "bert-tiny", "input_shapes": {"input_ids": [1, 16]}},
            r"attention_mask \[1, 128\], .*one shape \[N, S\] with S at most 512, so give all of them",
        ),
        ({"input_shapes": {"data": [1, 3, "64", 64]}}, "dimensions must be whole numbers"),
    ],
)
def test_what_is_wrong_with_a_builtin_network_is_said(arguments: dict, message: str) -> None:
    with pytest.raises(UserInputError, match=message) as caught:
        load_network(**{"name": "resnet-18", **arguments})
    assert "\n" not in str(caught.value)


def test_a_file_is_named_after_its_stem(small_onnx: Path) -> None:
    network = load_network(str(small_onnx))
    assert network.name == "small"
    assert network.inputs == (TensorSpec("data", (1, 3, 16, 16), "float32"),)
    assert network.outputs == (TensorSpec("logits", (1, 10), "float32"),)


def test_a_file_needs_no_suffix(tmp_path: Path, small_onnx: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "exported").write_bytes(small_onnx.read_bytes())
    monkeypatch.chdir(tmp_path)
    assert load_network("exported").name == "exported"


@pytest.mark.parametrize("shape", [[1, 3, 8, 8], ["N", 3, "H", "W"], [0, 3, -1, -1]])
def test_input_shapes_propagate_through_a_file(tmp_path: Path, shape: list[int | str]) -> None:
    path = save_conv(tmp_path / "conv.onnx", shape)
    network = load_network(path, input_shapes={"data": [2, 3, 6, 10]})
    assert network.inputs[0].shape == (2, 3, 6, 10)
    assert run(network)[0].shape == network.outputs[0].shape == (2, 4, 6, 10)


def test_input_shapes_propagate_into_branches(tmp_path: Path) -> None:
    branches = {
        name: helper.make_graph([helper.make_node(op, ["x"], [name])], name, [], [value(name, [1, 3])])
        for name, op in {"then_branch": "Relu", "else_branch": "Neg"}.items()
    }
    node = helper.make_node("If", ["flag"], ["y"], **branches)
    inputs = [value("flag", [], TensorProto.BOOL), value("x", [1, 3])]
    path = save(tmp_path / "if.onnx", [node], inputs, [value("y", [1, 3])])
    network = load_network(path, input_shapes={"x": [5, 3]})
    assert network.inputs == (TensorSpec("flag", (), "bool"), TensorSpec("x", (5, 3), "float32"))
    assert run(network)[0].shape == network.outputs[0].shape == (5, 3)


def test_a_dynamic_output_of_a_static_input_is_inferred(tmp_path: Path) -> None:
    node = helper.make_node("Cast", ["x"], ["y"], to=TensorProto.INT64)
    path = save(tmp_path / "cast.onnx", [node], [value("x", [2, 3])], [value("y", ["N", 3], TensorProto.INT64)])
    assert load_network(path).outputs == (TensorSpec("y", (2, 3), "int64"),)


@pytest.mark.parametrize("shape", [[1, 3, 8, 8], ["N", 3, "H", "W"]])
def test_a_saved_network_is_the_same_network(tmp_path: Path, shape: list[int | str]) -> None:
    """A run keeps what it tuned; the digest tells whether records belong to it."""
    path = save_conv(tmp_path / "conv.onnx", shape)
    network = load_network(path, input_shapes={"data": [2, 3, 6, 10]})
    onnx.save(network.model, tmp_path / "copy.onnx")
    copy = load_network(str(tmp_path / "copy.onnx"))
    assert copy.sha256 == network.sha256
    assert (copy.inputs, copy.outputs) == (network.inputs, network.outputs)
    other = load_network(path, input_shapes={"data": [1, 3, 6, 10]})
    assert other.sha256 != network.sha256


def test_weights_listed_as_inputs_are_not_inputs(tmp_path: Path) -> None:
    """As IR versions before 4 require."""
    node = helper.make_node("Add", ["x", "w"], ["y"])
    weights = {"w": np.ones(3, np.float32)}
    path = save(tmp_path / "old.onnx", [node], [value("x", [2, 3]), value("w", [3])], [value("y", [2, 3])], weights)
    assert [spec.name for spec in load_network(path).inputs] == ["x"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "the file cannot be read .No such file or directory.; give an ONNX file, an exported program or a"),
        (b"", "the file holds no ONNX model; export the model again"),
        (b"\xff\xfe not a model" * 9, "not a valid ONNX file, or cut short"),
        (b"PK\x03\x04" + bytes(64), "not a valid ONNX file, or cut short"),
    ],
)
def test_broken_file(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "broken.onnx"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserInputError, match=f"network={re.escape(str(path))}: {message}") as caught:
        load_network(str(path))
    assert "\n" not in str(caught.value)


def test_dynamic_dimensions_are_named_and_the_parameter_is_written_out(tmp_path: Path) -> None:
    node = helper.make_node("Add", ["a", "b"], ["c"])
    inputs = [value("a", ["batch", 3, None])]
    weights = {"b": np.ones((4, 3, 5), np.float32)}
    path = save(tmp_path / "dynamic.onnx", [node], inputs, [value("c", None)], weights)
    with pytest.raises(UserInputError, match=r"'a' has dynamic \? \(dimension 2\) in .*, which are usual") as caught:
        load_network(path)
    assert proposed(caught.value) == {"a": [1, 3, 128]}
    assert load_network(path, input_shapes={"a": [1, 3, 5]}).outputs[0].shape == (4, 3, 5)


def test_input_without_a_shape(tmp_path: Path) -> None:
    node = helper.make_node("Relu", ["x"], ["y"])
    path = save(tmp_path / "free.onnx", [node], [value("x", None)], [value("y", None)])
    with pytest.raises(UserInputError, match=r"input 'x' has no shape .*give input_shapes='"):
        load_network(path)
    assert load_network(path, input_shapes={"x": [2]}).outputs[0].shape == (2,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 2}, "batch_size=2 with network=.*small.onnx: dimension 0 of its input 'data' is 1; leave"),
        (
            {"batch_size": 2, "input_shapes": {"data": [4, 3, 16, 16]}},
            "dimension 0 of its input 'data' is 4; leave batch_size out, or give input_shapes with that batch",
        ),
        ({"input_shapes": {"image": [1, 3, 16, 16]}}, "names 'image', which is not .*; its inputs are data"),
        ({"input_shapes": {"data": [1, 3, 16]}}, r"3 dimensions \[1, 3, 16\], but it has 4, \(1, 3, 16, 16\); give 4"),
        ({"input_shapes": {"data": [1, 3, 0, 16]}}, "every dimension must be at least 1"),
    ],
)
def test_what_does_not_fit_a_file_is_said(small_onnx: Path, arguments: dict, message: str) -> None:
    with pytest.raises(UserInputError, match=message) as caught:
        load_network(str(small_onnx), **arguments)
    assert "\n" not in str(caught.value)


def test_shapes_that_do_not_fit_together(tmp_path: Path) -> None:
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    weights = {"w": np.ones((3, 2), np.float32)}
    path = save(tmp_path / "matmul.onnx", [node], [value("x", [1, 4])], [value("y", None)], weights)
    with pytest.raises(UserInputError, match=r"its shapes do not fit together \(.*MatMul.*; export the model again"):
        load_network(path)
    assert load_network(path, input_shapes={"x": [1, 3]}).outputs[0].shape == (1, 2)
    with pytest.raises(UserInputError, match=r"its shapes do not fit together .*; give input_shapes that the network"):
        load_network(path, input_shapes={"x": [1, 5]})


def test_shapes_that_only_the_file_contradicts(tmp_path: Path) -> None:
    """Of another export, perhaps; what the file says of its inputs counts."""
    branches = {
        name: helper.make_graph([helper.make_node(op, ["x"], [name])], name, [], [value(name, [7, 3])])
        for name, op in {"then_branch": "Relu", "else_branch": "Neg"}.items()
    }
    nodes = [helper.make_node("If", ["flag"], ["y"], **branches), helper.make_node("Relu", ["x"], ["z"])]
    inputs = [value("flag", [], TensorProto.BOOL), value("x", [2, 3])]
    path = save(tmp_path / "stale.onnx", nodes, inputs, [value("y", ["N", 3]), value("z", [2, 9])])
    network = load_network(path)
    assert [spec.shape for spec in network.outputs] == [(2, 3), (2, 3)]
    assert [output.shape for output in run(network)] == [(2, 3), (2, 3)]


def test_output_whose_shape_depends_on_values(tmp_path: Path) -> None:
    node = helper.make_node("NonZero", ["x"], ["y"])
    path = save(tmp_path / "nonzero.onnx", [node], [value("x", [2, 3])], [value("y", None, TensorProto.INT64)])
    assert load_network(path).outputs == (TensorSpec("y", (2, OPEN), "int64"),)


def test_a_file_that_is_newer_than_onnxruntime(tmp_path: Path) -> None:
    """As ONNX's newest release writes it by default."""
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "new", [value("x", [2])], [value("y", [2])])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = onnx.IR_VERSION
    onnx.save(model, tmp_path / "new.onnx")
    network = load_network(str(tmp_path / "new.onnx"))
    np.testing.assert_array_equal(run(network)[0], random_inputs(network.inputs, 0)["x"].clip(min=0))


POOL = helper.make_node("MaxPool", ["x"], ["y"], name="last pooling", kernel_shape=[9, 9])


@pytest.mark.parametrize(
    ("nodes", "x", "message"),
    [
        ([], value("x", [1]), "has no nodes, so there is nothing to tune"),
        (
            [POOL],
            value("x", [1, 3, 4, 10]),
            r"'last pooling' \(MaxPool\) would give 'y' the shape \[1, 3, -4, 2\]; give",
        ),
        (
            [helper.make_node("Foo", ["x"], ["y"], domain="made.up")],
            value("x", [1]),
            r"'made\.up\.Foo' is a custom one",
        ),
        *(
            ([helper.make_node("Identity", ["x"], ["y"])], x, "'x' is not a tensor of NumPy's floats, integers or bool")
            for x in (value("x", [1], TensorProto.STRING), value("x", [1], TensorProto.BFLOAT16))
        ),
    ],
)
def test_a_graph_that_is_none_of_ours(
    tmp_path: Path, nodes: list[onnx.NodeProto], x: onnx.ValueInfoProto, message: str
) -> None:
    path = save(tmp_path / "wrong.onnx", nodes, [x], [value("y" if nodes else "x", None if nodes else [1])])
    with pytest.raises(UserInputError, match=message):
        load_network(path)
