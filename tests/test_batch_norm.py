"""Batch normalisations, scales and shifts are folded into what comes before, only where that computes the same."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnxruntime
import pytest
from helpers.exports import make_model, tensor
from onnx import helper, numpy_helper

from ansor_mlflow.graphs import fold_scales, without_tiny_weights

RNG = np.random.default_rng(0)


def constants(num_channels: int = 4) -> dict[str, np.ndarray]:
    return {
        "weight": RNG.normal(size=(num_channels, 3, 3, 3)),
        "bias": RNG.normal(size=num_channels),
        "gamma": RNG.normal(size=num_channels),
        "beta": RNG.normal(size=num_channels),
        "mean": RNG.normal(size=num_channels),
        "variance": RNG.uniform(0.1, 2, size=num_channels),
    }


def conv(inputs: Sequence[str] = ("data", "weight"), output: str = "conv", **attributes: object) -> onnx.NodeProto:
    return helper.make_node("Conv", inputs, [output], **attributes)


def norm(data: str = "conv", output: str = "result", **attributes: object) -> onnx.NodeProto:
    return helper.make_node("BatchNormalization", [data, "gamma", "beta", "mean", "variance"], [output], **attributes)


def model(
    *nodes: onnx.NodeProto, outputs: Sequence[str] = ("result",), extra_inputs: Sequence[onnx.ValueInfoProto] = ()
) -> onnx.ModelProto:
    """A model whose nodes may use the constants; those that no node uses are left out."""
    used = {name for node in nodes for name in node.input} - {entry.name for entry in extra_inputs}
    weights = {name: value for name, value in constants().items() if name in used}
    inputs = [tensor("data", (2, 3, 6, 6)), *extra_inputs]
    return make_model(nodes, inputs, [tensor(name, None) for name in outputs], weights)


def run(network: onnx.ModelProto) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(network.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"data": np.random.default_rng(1).normal(size=(2, 3, 6, 6)).astype(np.float32)})


def operators(network: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in network.graph.node]


@pytest.mark.parametrize(
    "nodes",
    [
        (conv(), norm()),
        (conv(["data", "weight", "bias"]), norm()),
        (conv(pads=[1, 1, 1, 1], strides=[2, 2]), norm(epsilon=0.1)),
        (conv(), norm(output="normed"), helper.make_node("Relu", ["normed"], ["result"])),
    ],
    ids=["plain", "with_bias", "with_epsilon", "in_the_middle"],
)
def test_a_folded_network_computes_the_same(nodes: tuple[onnx.NodeProto, ...]) -> None:
    network = model(*nodes)
    before = network.SerializeToString(deterministic=True)
    folded = fold_scales(network)
    assert network.SerializeToString(deterministic=True) == before
    assert "BatchNormalization" in operators(network)
    assert operators(folded) == [name for name in operators(network) if name != "BatchNormalization"]
    assert {entry.name for entry in folded.graph.initializer}.isdisjoint({"weight", "gamma", "mean"})
    np.testing.assert_allclose(run(folded)[0], run(network)[0], rtol=1e-4, atol=1e-5)


def test_a_weight_that_two_convolutions_share_is_folded_for_each() -> None:
    network = model(
        conv(output="first"),
        conv(output="second"),
        norm("first", "normed"),
        helper.make_node("Add", ["normed", "second"], ["result"]),
    )
    folded = fold_scales(network)
    assert operators(folded) == ["Conv", "Conv", "Add"]
    np.testing.assert_allclose(run(folded)[0], run(network)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("nodes", "outputs"),
    [
        ((conv(), norm(), helper.make_node("Relu", ["conv"], ["other"])), ("result", "other")),
        ((conv(), norm()), ("result", "conv")),
        (
            (helper.make_node("Conv", ["data", "weight"], ["a"]), helper.make_node("Relu", ["a"], ["b"]), norm("b")),
            ("result",),
        ),
    ],
    ids=["also_used_by_another_node", "also_an_output", "not_after_a_convolution"],
)
def test_what_would_change_another_value_stays(nodes: tuple[onnx.NodeProto, ...], outputs: tuple[str, ...]) -> None:
    network = model(*nodes, outputs=outputs)
    assert operators(fold_scales(network)) == operators(network)


def test_weights_that_are_not_constant_stay() -> None:
    weight = tensor("weight", (4, 3, 3, 3))
    network = model(conv(), norm(), extra_inputs=[weight])
    assert operators(fold_scales(network)) == ["Conv", "BatchNormalization"]


def test_a_norm_in_training_mode_stays() -> None:
    training = helper.make_node(
        "BatchNormalization",
        ["conv", "gamma", "beta", "mean", "variance"],
        ["result", "new_mean", "new_variance"],
        training_mode=1,
    )
    assert operators(fold_scales(model(conv(), training))) == ["Conv", "BatchNormalization"]


def test_initializers_that_are_inputs_too_leave_both_lists() -> None:
    network = model(conv(), norm())
    for name, shape in {"weight": (4, 3, 3, 3), "gamma": (4,)}.items():
        network.graph.input.append(tensor(name, shape))
    assert [entry.name for entry in fold_scales(network).graph.input] == ["data"]


SCALES = {"of_channels": RNG.normal(size=(1, 4, 1, 1)), "short": RNG.normal(size=(4, 1, 1)), "of_all": np.array([1.7])}
"""Constants for a tensor of four channels, all of which can be folded."""


def scaled(*steps: tuple[str, str, str], values: dict[str, np.ndarray] | None = None) -> onnx.ModelProto:
    """A convolution with nodes after it, one after the other: their operators and both inputs."""
    names = ["conv", *(f"step{number}" for number in range(1, len(steps))), "result"]
    nodes = [
        helper.make_node(op_type, [name if each == "x" else each for each in inputs], [names[number + 1]])
        for number, ((op_type, *inputs), name) in enumerate(zip(steps, names, strict=False))
    ]
    known = {"weight": constants()["weight"], **SCALES, **(values or {})}
    used = {name for node in nodes for name in node.input} | {"weight"}
    return make_model(
        [conv(), *nodes],
        [tensor("data", (2, 3, 6, 6))],
        [tensor("result", None)],
        {name: value for name, value in known.items() if name in used},
    )


@pytest.mark.parametrize(
    "steps",
    [
        [("Mul", "x", "of_channels")],
        [("Mul", "of_all", "x"), ("Add", "x", "short")],
        [("Sub", "of_channels", "x"), ("Div", "x", "of_all")],
        [("Sub", "x", "of_all"), ("Add", "of_all", "x"), ("Mul", "x", "short")],
    ],
)
def test_scales_and_shifts_are_folded(steps: list[tuple[str, str, str]]) -> None:
    """Exporters of PaddlePaddle write the learnable ones of a block so."""
    network = scaled(*steps)
    folded = fold_scales(network)
    assert operators(folded) == ["Conv"]
    assert len(folded.graph.node[0].input) == (2 if steps == [("Mul", "x", "of_channels")] else 3)
    np.testing.assert_allclose(run(folded)[0], run(network)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "steps",
    [
        [("Mul", "x", "of_columns")],
        [("Add", "x", "of_images")],
        [("Div", "of_all", "x")],
        [("Mul", "x", "x")],
        [("Div", "x", "zero")],
        [("Add", "x", "of_five_axes")],
    ],
)
def test_other_constants_are_not_folded(steps: list[tuple[str, str, str]]) -> None:
    values = {
        "of_columns": RNG.normal(size=4),  # the convolution has four columns, too
        "of_images": RNG.normal(size=(2, 1, 1, 1)),
        "zero": np.zeros(1),
        "of_five_axes": np.ones((1, 1, 1, 1, 1)),
    }
    network = scaled(*steps, values=values)
    assert operators(fold_scales(network)) == operators(network)


def test_two_factors_become_one() -> None:
    steps = [("Mul", "x", "x"), ("Div", "x", "of_all"), ("Mul", "of_all", "x"), ("Mul", "x", "of_channels")]
    network = scaled(*steps)
    folded = fold_scales(network)
    assert operators(folded) == ["Conv", "Mul", "Mul", "Mul"]
    np.testing.assert_allclose(run(folded)[0], run(network)[0], rtol=1e-4, atol=1e-5)


def test_tiny_weights_become_zeros() -> None:
    """Those that a sum does not show; and not what something else than a layer takes, or all weights of a layer."""
    weight, small = constants()["weight"], np.full((4, 4, 1, 1), 1e-35)
    weight[0, 0, 0], weight[1, 0, 0] = [1e-40, -1e-38, 1e-33], [1e-28, 0, 1]
    small[0, 0] = 1e-39
    nodes = [
        conv(output="first"),
        helper.make_node("Conv", ["first", "small"], ["second"]),
        helper.make_node("Max", ["second", "least"], ["result"]),
    ]
    known = {"weight": weight, "small": small, "least": np.array([1e-42])}
    network = make_model(nodes, [tensor("data", (2, 3, 6, 6))], [tensor("result", None)], known)
    cleaned = {each.name: numpy_helper.to_array(each) for each in without_tiny_weights(network).graph.initializer}
    np.testing.assert_array_equal(cleaned["weight"][0, 0, 0], 0)
    np.testing.assert_array_equal(cleaned["weight"][1, 0, 0], np.float32([1e-28, 0, 1]))
    np.testing.assert_array_equal(cleaned["weight"][2:], weight.astype(np.float32)[2:])
    np.testing.assert_array_equal(cleaned["small"] == 0, small < 1e-38)
    assert cleaned["least"] > 0
    plain = model(conv(), norm())
    assert without_tiny_weights(plain) is plain
