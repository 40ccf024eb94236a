"""Transposed convolutions are convolutions, whatever their attributes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
from helpers.one_operator import assert_computes_the_same, one_operator
from onnx import helper, numpy_helper

from ansor_mlflow.graphs import fold_batch_norms, rewrite_operators
from ansor_mlflow.lowering.lower import lower
from ansor_mlflow.settings import LoweringSettings

if TYPE_CHECKING:
    from tvm.target import Target

RNG = np.random.default_rng(0)

CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "kernel of the stride": ((1, 4, 5, 6), (4, 3, 2, 2), {"strides": [2, 2]}),
    "overlapping": ((2, 4, 5, 6), (4, 3, 4, 4), {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
    "odd kernel": ((1, 4, 5, 6), (4, 3, 3, 3), {"strides": [2, 2], "pads": [1] * 4, "output_padding": [1, 1]}),
    "no stride": ((1, 4, 5, 6), (4, 3, 3, 3), {"pads": [1, 0, 2, 1]}),
    "unlike axes": ((1, 4, 5, 6), (4, 3, 3, 4), {"strides": [2, 3], "pads": [0, 2, 1, 1], "output_padding": [1, 2]}),
    "kernel smaller than the stride": ((1, 4, 5, 6), (4, 3, 1, 2), {"strides": [3, 3]}),
    "groups": ((1, 4, 5, 6), (4, 3, 3, 3), {"strides": [2, 2], "group": 2}),
    "depthwise": ((1, 4, 5, 6), (4, 1, 4, 4), {"strides": [2, 2], "pads": [1] * 4, "group": 4}),
    "dilated": ((1, 4, 5, 6), (4, 3, 3, 3), {"strides": [2, 1], "dilations": [2, 3], "group": 2}),
    "pads larger than the kernel": ((1, 4, 5, 6), (4, 3, 3, 3), {"strides": [2, 2], "pads": [4, 3, 3, 4]}),
    "same, upper": ((1, 4, 5, 6), (4, 3, 3, 3), {"strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    "same, lower": ((1, 4, 5, 6), (4, 3, 3, 3), {"strides": [2, 2], "auto_pad": "SAME_LOWER"}),
    "same, no overlap": ((1, 4, 5, 6), (4, 3, 2, 2), {"strides": [3, 3], "auto_pad": "SAME_UPPER"}),
    "output shape": ((1, 4, 5, 6), (4, 3, 3, 3), {"strides": [2, 2], "output_shape": [10, 11]}),
    "large output shape": ((1, 4, 5, 6), (4, 3, 3, 3), {"strides": [2, 2], "output_shape": [12, 14]}),
    "one axis": ((2, 4, 9), (4, 3, 5), {"strides": [3], "pads": [1, 2]}),
    "three axes": ((1, 4, 3, 4, 5), (4, 2, 3, 2, 4), {"strides": [2, 1, 2], "pads": [1, 0, 1, 1, 1, 0], "group": 2}),
}
"""Shapes of data and weights, attributes."""


@pytest.mark.parametrize("case", CASES)
def test_a_transposed_convolution_computes_what_onnxruntime_computes(host_target: Target, case: str) -> None:
    shape, weight_shape, attributes = CASES[case]
    data = {"x": RNG.normal(size=shape).astype(np.float32)}
    channels = weight_shape[1] * attributes.get("group", 1)
    constants = {"weight": RNG.normal(size=weight_shape), "bias": RNG.normal(size=channels)}
    model = one_operator("ConvTranspose", data, constants, after_conv=len(shape) > 3, **attributes)
    assert_computes_the_same(model, host_target, data)


def decoder() -> onnx.ModelProto:
    """A step of a U-Net's decoder: transposed convolution, batch normalisation, rectifier, convolution."""
    shapes = {"up": (4, 3, 2, 2), "gamma": (3,), "beta": (3,), "mean": (3,), "variance": (3,), "conv": (4, 3, 3, 3)}
    weights = {name: RNG.uniform(0.5, 1.5, size=shape).astype(np.float32) for name, shape in shapes.items()}
    graph = helper.make_graph(
        [
            helper.make_node("ConvTranspose", ["x", "up"], ["a"], strides=[2, 2]),
            helper.make_node("BatchNormalization", ["a", "gamma", "beta", "mean", "variance"], ["b"]),
            helper.make_node("Relu", ["b"], ["c"]),
            helper.make_node("Conv", ["c", "conv"], ["y"], pads=[1] * 4),
        ],
        "decoder",
        [helper.make_tensor_value_info("x", 1, (1, 4, 5, 6))],
        [helper.make_tensor_value_info("y", 1, (1, 4, 10, 12))],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])


def test_what_follows_is_part_of_the_function_that_interleaves_the_phases(host_target: Target) -> None:
    data = {"x": RNG.normal(size=(1, 4, 5, 6)).astype(np.float32)}
    lowered = assert_computes_the_same(decoder(), host_target, data, atol=1e-4)
    names = [task.info.name for task in lowered.tasks]
    assert len(names) == 5  # two convolutions, what lies between, and the transposes of input and output
    assert sum("relu" in name for name in names) == 1


def test_batch_normalisation_is_folded_into_it() -> None:
    folded = fold_batch_norms(decoder())
    assert [node.op_type for node in folded.graph.node] == ["ConvTranspose", "Relu", "Conv"]


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_it_is_lowered_in_each_layout(host_target: Target, layout: Any) -> None:
    names = [task.info.name for task in lower(decoder(), host_target, LoweringSettings(layout=layout)).tasks]
    assert sum("conv2d" in name for name in names) == 2


def test_weights_that_are_no_constants_stay() -> None:
    data = {"x": np.zeros((1, 4, 5, 6), np.float32), "weight": np.zeros((4, 3, 2, 2), np.float32)}
    model = one_operator("ConvTranspose", data)
    assert [node.op_type for node in rewrite_operators(model).graph.node] == ["ConvTranspose"]
