"""Taps of a convolution that meet padding alone are left out, and nothing else is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
from helpers.one_operator import assert_computes_the_same, one_operator, run_onnxruntime
from hypothesis import assume, given
from hypothesis import strategies as st

from ansor_mlflow.graphs import rewrite_operators

if TYPE_CHECKING:
    from tvm.target import Target

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


CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any], tuple[int, ...]]] = {
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


@pytest.mark.parametrize("case", CASES)
def test_taps_in_the_padding_are_left_out(host_target: Target, case: str) -> None:
    sizes, kernel, attributes, left = CASES[case]
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
