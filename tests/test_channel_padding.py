"""Layers with channels that cannot be tiled get more of them, and the network computes the same."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from ansor_mlflow.graphs import best_padding, layers_to_pad, pad_output_channels
from ansor_mlflow.networks import load_network

LANES = 16
FLOAT = TensorProto.FLOAT


class Graph:
    """A graph with seeded weights, one input "data" and the outputs that `model` names."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.rng = np.random.default_rng(0)

    def constant(self, name: str, *shape: int) -> str:
        values = self.rng.standard_normal(shape).astype("float32") / math.sqrt(math.prod(shape[1:]) or 1)
        self.weights.append(numpy_helper.from_array(values, name))
        return name

    def integers(self, name: str, *values: int) -> str:
        self.weights.append(numpy_helper.from_array(np.array(values), name))
        return name

    def node(self, op_type: str, name: str, *inputs: str, **attributes: object) -> str:
        self.nodes.append(helper.make_node(op_type, inputs, [name], name=name, **attributes))
        return name

    def conv(self, name: str, data: str, *shape: int, bias: bool = True, **attributes: object) -> str:
        biases = [self.constant(f"{name}.bias", shape[0])] if bias else []
        return self.node("Conv", name, data, self.constant(f"{name}.weight", *shape), *biases, **attributes)

    def model(self, *outputs: str) -> onnx.ModelProto:
        graph = helper.make_graph(
            self.nodes,
            "graph",
            [helper.make_tensor_value_info("data", FLOAT, self.shape)],
            [helper.make_tensor_value_info(name, FLOAT, None) for name in outputs],
            self.weights,
        )
        return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])


def run(model: onnx.ModelProto) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    shape = session.get_inputs()[0].shape
    return session.run(None, {"data": np.random.default_rng(1).standard_normal(shape).astype("float32")})


def assert_padded(model: onnx.ModelProto, slices: int, **weights: tuple[int, ...]) -> onnx.ModelProto:
    """Pads to multiples of 8 and compares; `weights` are shapes of padded weights by the name of their node."""
    before = model.SerializeToString()
    padded = pad_output_channels(model, lambda channels: -(-channels // 8) * 8)
    assert model.SerializeToString() == before
    assert Counter(node.op_type for node in padded.graph.node)["Slice"] == slices
    shapes = {constant.name: tuple(constant.dims) for constant in padded.graph.initializer}
    for name, shape in weights.items():
        assert shapes[f"{name}.constant1"] == shape
    for ours, theirs in zip(run(padded), run(model), strict=True):
        assert ours.shape == theirs.shape
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5 * abs(theirs).max())
    return padded


@pytest.mark.parametrize(
    ("channels", "padded"),
    [(386, 400), (193, 208), (97, 112), (384, 384), (64, 64), (512, 512), (1000, 1000), (3, 3), (10, 10), (1, 1)],
)
def test_only_channels_without_a_good_factor_are_padded(channels: int, padded: int) -> None:
    assert best_padding(channels, LANES) == padded
    assert best_padding(channels, 1) == channels  # without vectors


def test_layers_are_named_with_what_they_are_padded_to() -> None:
    graph = Graph((1, 16, 5, 5))
    graph.conv("good", graph.conv("bad", "data", 386, 16, 1, 1), 384, 386, 1, 1)
    (layer,) = layers_to_pad(graph.model("good"), LANES)
    assert (layer.name, layer.channels, layer.padded_channels) == ("bad", 386, 400)


def test_networks_with_round_numbers_stay_as_they_are() -> None:
    model = load_network("resnet-18", input_shapes={"data": [1, 3, 32, 32]}).model
    assert layers_to_pad(model, LANES) == []
    assert pad_output_channels(model, lambda channels: best_padding(channels, LANES)) == model


def test_a_chain_stays_padded_to_its_end() -> None:
    graph = Graph((1, 3, 12, 12))
    first = graph.node("Relu", "relu", graph.conv("first", "data", 5, 3, 3, 3))
    pool = graph.node("MaxPool", "pool", first, kernel_shape=[2, 2])
    second = graph.node("Sigmoid", "sigmoid", graph.conv("second", pool, 6, 5, 3, 3, bias=False))
    graph.node("GlobalAveragePool", "mean", second)
    padded = assert_padded(graph.model("mean"), 1, first=(8, 3, 3, 3), second=(8, 8, 3, 3))
    assert padded.graph.node[-1].op_type == "Slice"


def test_a_single_channel_that_is_repeated_is_sliced() -> None:
    graph = Graph((1, 3, 8, 8))
    one = graph.conv("one", "data", 1, 3, 1, 1)
    graph.node("Mul", "few", one, graph.constant("three", 1, 3, 1, 1))
    graph.node("Mul", "many", one, graph.constant("twenty", 1, 20, 1, 1))
    assert_padded(graph.model("few", "many"), 1, one=(8, 3, 1, 1))


def test_a_residual_sum_is_padded() -> None:
    graph = Graph((1, 3, 8, 8))
    shortcut = graph.conv("shortcut", "data", 5, 3, 1, 1)
    branch = graph.conv("branch", "data", 5, 3, 3, 3, pads=[1, 1, 1, 1])
    graph.conv("last", graph.node("Add", "sum", shortcut, branch), 8, 5, 1, 1)
    assert_padded(graph.model("last"), 0, last=(8, 8, 1, 1))


def test_a_gate_of_another_image_size_is_padded() -> None:
    graph = Graph((1, 3, 8, 8))
    data = graph.conv("conv", "data", 5, 3, 1, 1)
    gate = graph.conv("gate", graph.node("GlobalAveragePool", "mean", data), 5, 5, 1, 1)
    graph.conv("last", graph.node("Mul", "gated", data, gate), 8, 5, 1, 1)
    assert_padded(graph.model("last"), 0)


def test_a_constant_for_each_channel_is_padded() -> None:
    graph = Graph((1, 3, 8, 8))
    data = graph.conv("conv", "data", 5, 3, 1, 1)
    scaled = graph.node("Mul", "scaled", data, graph.constant("scale", 5, 1, 1))
    shifted = graph.node("Add", "shifted", scaled, graph.constant("shift", 1))
    graph.conv("last", graph.node("Max", "max", shifted, graph.constant("floor", 1, 1, 8, 8)), 8, 5, 1, 1)
    assert_padded(graph.model("last"), 0)


def test_a_dense_network_is_padded() -> None:
    graph = Graph((4, 3))
    hidden = graph.node("Gemm", "hidden", "data", graph.constant("w0", 5, 3), graph.constant("b0", 5), transB=1)
    other = graph.node("Gemm", "other", graph.node("Relu", "relu", hidden), graph.constant("w1", 5, 7))
    graph.node("MatMul", "product", other, graph.constant("w2", 7, 9))
    graph.node("Add", "logits", "product", graph.constant("b2", 9))
    assert_padded(graph.model("logits"), 1, hidden=(8, 3), other=(8, 8), product=(8, 16))


def test_matrix_products_of_any_rank_are_padded() -> None:
    graph = Graph((2, 4, 3))
    hidden = graph.node("MatMul", "hidden", "data", graph.constant("w0", 3, 5))
    graph.node("MatMul", "last", graph.node("Tanh", "tanh", hidden), graph.constant("w1", 5, 8))
    assert_padded(graph.model("last"), 0, hidden=(3, 8), last=(8, 8))


def attention(num_rows: int, num_tokens: int) -> onnx.ModelProto:
    graph = Graph((3, num_tokens, 32))
    ranges = {"start": 0, "end": num_rows, "axis": 1}
    rows = graph.node("Slice", "rows", "data", *(graph.integers(*item) for item in ranges.items()))
    scores = graph.node("MatMul", "scores", rows, graph.node("Transpose", "keys", "data", perm=[0, 2, 1]))
    shares = graph.node("Softmax", "shares", graph.node("Mul", "scaled", scores, graph.constant("scale")), axis=-1)
    return graph.model(graph.node("MatMul", "sums", shares, "data"))


def test_a_column_for_each_token_is_padded() -> None:
    (layer,) = layers_to_pad(attention(197, 197), LANES)
    assert (layer.name, layer.channels, layer.padded_channels) == ("scores", 197, 208)
    padded = assert_padded(attention(13, 13), 2)  # one of them is of the rows
    assert Counter(node.op_type for node in padded.graph.node)["Pad"] == 1
    for num_rows, num_tokens in ((7, 197), (64, 192)):  # a copy of all keys would take as long
        assert not layers_to_pad(attention(num_rows, num_tokens), LANES)


def test_what_needs_the_true_channels_gets_them() -> None:
    graph = Graph((1, 3, 8, 8))
    one, two = graph.conv("one", "data", 5, 3, 1, 1), graph.conv("two", "data", 6, 3, 1, 1)
    joined = graph.node("Concat", "joined", one, two, axis=1)
    softmax = graph.node("Softmax", "softmax", one, axis=1)
    assert_padded(graph.model(joined, softmax, two), 2)


@pytest.mark.parametrize("bias", [True, False])
def test_each_group_gets_more_channels(bias: bool) -> None:
    """A ShuffleNet has 68 channels for each of four groups."""
    graph = Graph((2, 8, 6, 5))
    grouped = graph.conv("grouped", "data", 4 * 68, 2, 3, 3, bias=bias, group=4, pads=[1, 1, 0, 0])
    model = graph.model(graph.node("Relu", "relu", grouped), grouped)
    assert [(layer.channels, layer.padded_channels) for layer in layers_to_pad(model, LANES)] == [(68, 80)]
    padded = assert_padded(model, 1)
    assert [node.op_type for node in padded.graph.node] == ["Conv", "Reshape", "Slice", "Reshape", "Relu"]


def test_depthwise_convolutions_stay_as_they_are() -> None:
    graph = Graph((1, 6, 8, 8))
    data = graph.conv("conv", "data", 6, 6, 1, 1)
    graph.conv("depthwise", data, 6, 1, 3, 3, group=6)
    padded = assert_padded(graph.model("depthwise"), 1)
    assert padded.graph.node[-1] == graph.nodes[-1]


def test_a_branch_sees_the_true_channels() -> None:
    graph = Graph((1, 3, 8, 8))
    data = graph.conv("conv", "data", 5, 3, 1, 1)
    graph.weights.append(numpy_helper.from_array(np.array(True), "condition"))
    branches = {
        f"{name}_branch": helper.make_graph(
            [helper.make_node(op_type, [data], [name])], name, [], [helper.make_tensor_value_info(name, FLOAT, None)]
        )
        for name, op_type in (("then", "Relu"), ("else", "Neg"))
    }
    graph.node("If", "chosen", "condition", **branches)
    assert_padded(graph.model("chosen"), 1)
