"""Elementwise operators become part of the function before them, whatever TVM's layout pass knows of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from helpers.exports import make_model, tensor
from helpers.one_operator import assert_computes_the_same
from onnx import helper

if TYPE_CHECKING:
    from tvm.target import Target

SHAPE = (1, 8, 6, 6)
BOUNDS = {"low": -0.25, "high": 6.0, "nan": np.nan}

CASES: dict[str, tuple[int, str, list[str], dict[str, Any]]] = {
    "clip": (17, "Clip", ["low", "high"], {}),
    "clip above": (17, "Clip", ["", "high"], {}),
    "clip with nan, which is no bound": (17, "Clip", ["low", "nan"], {}),
    "clip by attributes": (9, "Clip", [], {"min": 0.0, "max": 6.0}),
    "clip below by attribute": (9, "Clip", [], {"min": -0.5}),
    "leaky relu": (17, "LeakyRelu", [], {"alpha": 0.1}),
    "hard sigmoid": (17, "HardSigmoid", [], {}),
    "hard swish": (17, "HardSwish", [], {}),
}
"""Version of the operators, operator, names of bounds, attributes."""


@pytest.mark.parametrize("case", CASES)
def test_an_operator_between_convolutions_is_in_the_function_of_the_first(host_target: Target, case: str) -> None:
    opset, op_type, bounds, attributes = CASES[case]
    rng = np.random.default_rng(0)
    weights = {"first": rng.normal(size=(8, 8, 1, 1)), "second": rng.normal(size=(8, 8, 1, 1))}
    constants = weights | {name: np.array(BOUNDS[name]) for name in bounds if name}
    nodes = [
        helper.make_node("Conv", ["x", "first"], ["conv"]),
        helper.make_node(op_type, ["conv", *bounds], ["bounded"], **attributes),
        helper.make_node("Conv", ["bounded", "second"], ["y"]),
    ]
    model = make_model(nodes, [tensor("x", SHAPE)], [tensor("y", SHAPE)], constants, opset)
    x = 3 * np.random.default_rng(1).normal(size=SHAPE).astype(np.float32)
    lowered = assert_computes_the_same(model, host_target, {"x": x})
    names = [task.info.name for task in lowered.tasks]
    assert sum("conv2d" in name for name in names) == 2
    assert sum("transpose" in name for name in names) == len(names) - 2 == 2  # of the input and of the output
