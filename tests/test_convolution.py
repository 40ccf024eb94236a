"""Convolutions of any kind are computed as ONNX Runtime does, in the layouts and by the programs of others."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from helpers.exports import make_model, tensor
from helpers.one_operator import assert_computes_the_same, one_operator, run_onnxruntime
from hypothesis import assume, given
from hypothesis import strategies as st
from onnx import helper
from tvm.target import Target

from ansor_mlflow.graphs import fold_scales, rewrite_operators
from ansor_mlflow.lowering.lower import lower
from ansor_mlflow.settings import LoweringSettings
from ansor_mlflow.sketches import find_programs

RNG = np.random.default_rng(0)


def conv(sizes: tuple[int, ...], kernel: tuple[int, ...], *, bias: bool = True, **attributes: Any) -> onnx.ModelProto:
    groups = attributes.get("group", 1)
    constants = {"weight": RNG.normal(size=(6, 4 // groups, *kernel)), **({"bias": RNG.normal(size=6)} if bias else {})}
    return one_operator("Conv", example(sizes), constants, **attributes)


def example(sizes: tuple[int, ...]) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(1).normal(size=(1, 4, *sizes)).astype(np.float32)}


def kernel_of(model: onnx.ModelProto) -> tuple[int, ...]:
    weights = {initializer.name: tuple(initializer.dims) for initializer in model.graph.initializer}
    (node,) = model.graph.node
    return weights[node.input[1]][2:]


WITH_PADDING: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any], tuple[int, ...]]] = {
    "dilation beyond the image": ((5, 6), (3, 3), {"dilations": [6, 6], "pads": [6] * 4}, (1, 1)),
    "beyond one axis": ((5, 9), (3, 3), {"dilations": [6, 6], "pads": [6] * 4}, (1, 3)),
    "of a larger kernel": ((5, 6), (5, 5), {"dilations": [3, 3], "pads": [6] * 4}, (3, 3)),
    "one pixel": ((1, 1), (3, 3), {"pads": [1] * 4}, (1, 1)),
    "two pixels, with a stride": ((2, 2), (3, 3), {"pads": [1] * 4, "strides": [2, 2]}, (2, 2)),
    "same, upper": ((1, 2), (3, 4), {"auto_pad": "SAME_UPPER"}, (1, 3)),
    "same, lower": ((1, 2), (3, 4), {"auto_pad": "SAME_LOWER"}, (1, 3)),
    "depthwise": ((4, 4), (3, 3), {"dilations": [4, 4], "pads": [4] * 4, "group": 2}, (1, 1)),
    "one axis": ((7,), (3,), {"dilations": [8], "pads": [8] * 2}, (1,)),
    "three axes": ((1, 4, 4), (3, 3, 3), {"pads": [1] * 6}, (1, 3, 3)),
}
"""Sizes of the input, of the kernel, attributes, and what is left of the kernel."""


@pytest.mark.parametrize("case", WITH_PADDING)
def test_taps_in_the_padding_are_left_out(host_target: Target, case: str) -> None:
    sizes, kernel, attributes, left = WITH_PADDING[case]
    model = conv(sizes, kernel, **attributes)
    assert kernel_of(rewrite_operators(model)) == left
    assert_computes_the_same(model, host_target, example(sizes))


@pytest.mark.parametrize(
    ("sizes", "attributes"),
    [
        ((6, 6), {"pads": [1] * 4}),
        ((6, 6), {}),
        ((6, 6), {"auto_pad": "VALID"}),
        ((7, 7), {"dilations": [6, 6], "pads": [6] * 4}),
        ((9, 9), {"dilations": [9, 9], "pads": [0, 0, 12, 12]}),
        ((2, 2), {"pads": [4, 4, 0, 0], "strides": [4, 4]}),
    ],
    ids=["padded", "unpadded", "valid", "last pixel", "input left unread", "only padding"],
)
def test_what_is_read_stays(sizes: tuple[int, ...], attributes: dict[str, Any]) -> None:
    model = conv(sizes, (3, 3), bias=False, **attributes)
    assert rewrite_operators(model) is model


def test_computed_weights_stay() -> None:
    data = {**example((1, 1)), "weight": np.ones((6, 4, 3, 3), np.float32)}
    model = one_operator("Conv", data, pads=[1] * 4)
    assert rewrite_operators(model) is model


axes = st.tuples(
    st.integers(1, 8), st.integers(1, 4), st.integers(1, 3), st.integers(1, 9), st.integers(0, 9), st.integers(0, 9)
)


@given(st.lists(axes, min_size=1, max_size=2))
def test_any_convolution_computes_the_same(drawn: list[tuple[int, ...]]) -> None:
    sizes, kernel, strides, dilations, begins, ends = (tuple(values) for values in zip(*drawn, strict=True))
    for size, taps, _, dilation, begin, end in drawn:
        assume(size + begin + end > dilation * (taps - 1))
    model = conv(sizes, kernel, strides=strides, dilations=dilations, pads=[*begins, *ends])
    rewritten, data = rewrite_operators(model), example(sizes)
    (expected,), (found,) = run_onnxruntime(model, data), run_onnxruntime(rewritten, data)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert np.prod(kernel_of(rewritten)) <= np.prod(kernel)


TRANSPOSED: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "kernel of the stride": ((1, 4, 5, 6), (4, 3, 2, 2), {"strides": [2, 2]}),
    "odd kernel": ((1, 4, 5, 6), (4, 3, 3, 3), {"strides": [2, 2], "pads": [1] * 4, "output_padding": [1, 1]}),
    "unlike axes": ((1, 4, 5, 6), (4, 3, 3, 4), {"strides": [2, 3], "pads": [0, 2, 1, 1], "output_padding": [1, 2]}),
    "kernel smaller than the stride": ((1, 4, 5, 6), (4, 3, 1, 2), {"strides": [3, 3]}),
    "groups": ((1, 4, 5, 6), (4, 3, 3, 3), {"strides": [2, 2], "group": 2}),
    "depthwise": ((1, 4, 5, 6), (4, 1, 4, 4), {"strides": [2, 2], "pads": [1] * 4, "group": 4}),
    "dilated": ((1, 4, 5, 6), (4, 3, 3, 3), {"strides": [2, 1], "dilations": [2, 3], "group": 2}),
    "pads larger than the kernel": ((1, 4, 5, 6), (4, 3, 3, 3), {"strides": [2, 2], "pads": [4, 3, 3, 4]}),
    "same, upper": ((1, 4, 5, 6), (4, 3, 3, 3), {"strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    "same, lower": ((1, 4, 5, 6), (4, 3, 3, 3), {"strides": [2, 2], "auto_pad": "SAME_LOWER"}),
    "output shape": ((1, 4, 5, 6), (4, 3, 3, 3), {"strides": [2, 2], "output_shape": [10, 11]}),
    "one axis": ((2, 4, 9), (4, 3, 5), {"strides": [3], "pads": [1, 2]}),
    "three axes": ((1, 4, 3, 4, 5), (4, 2, 3, 2, 4), {"strides": [2, 1, 2], "pads": [1, 0, 1, 1, 1, 0], "group": 2}),
}
"""Shapes of data and weights, attributes."""


@pytest.mark.parametrize("case", TRANSPOSED)
def test_a_transposed_convolution_computes_what_onnxruntime_computes(host_target: Target, case: str) -> None:
    shape, weight_shape, attributes = TRANSPOSED[case]
    data = {"x": RNG.normal(size=shape).astype(np.float32)}
    channels = weight_shape[1] * attributes.get("group", 1)
    constants = {"weight": RNG.normal(size=weight_shape), "bias": RNG.normal(size=channels)}
    model = one_operator("ConvTranspose", data, constants, after_conv=len(shape) > 3, **attributes)
    assert_computes_the_same(model, host_target, data)


def decoder() -> onnx.ModelProto:
    """A step of a U-Net's decoder: transposed convolution, batch normalisation, rectifier, convolution."""
    shapes = {"up": (4, 3, 2, 2), "gamma": (3,), "beta": (3,), "mean": (3,), "variance": (3,), "conv": (4, 3, 3, 3)}
    weights = {name: RNG.uniform(0.5, 1.5, size=shape).astype(np.float32) for name, shape in shapes.items()}
    nodes = [
        helper.make_node("ConvTranspose", ["x", "up"], ["a"], strides=[2, 2]),
        helper.make_node("BatchNormalization", ["a", "gamma", "beta", "mean", "variance"], ["b"]),
        helper.make_node("Relu", ["b"], ["c"]),
        helper.make_node("Conv", ["c", "conv"], ["y"], pads=[1] * 4),
    ]
    return make_model(nodes, [tensor("x", (1, 4, 5, 6))], [tensor("y", (1, 4, 10, 12))], weights)


def test_what_follows_is_part_of_the_function_that_interleaves_the_phases(host_target: Target) -> None:
    data = {"x": RNG.normal(size=(1, 4, 5, 6)).astype(np.float32)}
    lowered = assert_computes_the_same(decoder(), host_target, data, atol=1e-4)
    names = [task.info.name for task in lowered.tasks]
    assert len(names) == 5  # two convolutions, what lies between, and the transposes of input and output
    assert sum("relu" in name for name in names) == 1


def test_batch_normalisation_is_folded_into_a_transposed_one() -> None:
    folded = fold_scales(decoder())
    assert [node.op_type for node in folded.graph.node] == ["ConvTranspose", "Relu", "Conv"]


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_a_transposed_one_is_lowered_in_each_layout(host_target: Target, layout: Any) -> None:
    names = [task.info.name for task in lower(decoder(), host_target, LoweringSettings(layout=layout)).tasks]
    assert sum("conv2d" in name for name in names) == 2


def test_a_transposed_one_of_computed_weights_stays() -> None:
    data = {"x": np.zeros((1, 4, 5, 6), np.float32), "weight": np.zeros((4, 3, 2, 2), np.float32)}
    model = one_operator("ConvTranspose", data)
    assert [node.op_type for node in rewrite_operators(model).graph.node] == ["ConvTranspose"]


CHANNELS, LENGTH = 16, 50
ALONG_ONE_AXIS: dict[str, dict[str, Any]] = {
    "as long as before": {"pads": [1, 1]},
    "shorter": {},
    "stride": {"strides": [2], "pads": [1, 1]},
    "dilation": {"dilations": [3]},
    "pads of two lengths": {"pads": [0, 2]},
    "groups": {"group": 2, "pads": [1, 1]},
    "depthwise": {"group": CHANNELS, "pads": [1, 1]},
}


def sound(case: str) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    group = ALONG_ONE_AXIS[case].get("group", 1)
    constants = {
        "w": rng.normal(size=(CHANNELS, CHANNELS // group, 3)),
        "b": rng.normal(size=CHANNELS),
        "v": rng.normal(size=(CHANNELS, CHANNELS, 1)),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["h"], **ALONG_ONE_AXIS[case]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("Conv", ["r", "v"], ["y"]),
    ]
    return make_model(nodes, [tensor("x", (2, CHANNELS, LENGTH))], [tensor("y", None)], constants)


@pytest.mark.parametrize("case", ALONG_ONE_AXIS)
def test_one_along_one_axis_computes_the_same_and_is_near_what_the_machine_can_do(
    host_target: Target, case: str
) -> None:
    """With the channels first, as ONNX has them, the programs take ten to fifty times as long."""
    data = np.random.default_rng(1).normal(size=(2, CHANNELS, LENGTH)).astype(np.float32)
    lowered = assert_computes_the_same(sound(case), host_target, {"x": data})
    convolutions = [task for task in lowered.tasks if "conv1d" in task.info.name]
    assert convolutions
    for task in convolutions:
        programs = find_programs(task.mod, host_target)
        assert programs is not None
        assert programs.are_enough


def test_the_layout_along_one_axis_may_be_onnxs(host_target: Target) -> None:
    tasks = lower(sound("stride"), host_target, LoweringSettings(layout="NCHW")).tasks
    assert not any("transpose" in task.info.name for task in tasks)
