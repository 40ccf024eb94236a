"""Elementwise operators become part of the function before them, whatever TVM's layout pass knows of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime
import pytest
from helpers.exports import make_model, tensor
from onnx import helper

from ansor_mlflow.lowering.lower import lower
from ansor_mlflow.settings import LoweringSettings

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


def between_convolutions(case: str) -> onnx.ModelProto:
    opset, op_type, bounds, attributes = CASES[case]
    rng = np.random.default_rng(0)
    weights = {"first": rng.normal(size=(8, 8, 1, 1)), "second": rng.normal(size=(8, 8, 1, 1))}
    constants = weights | {name: np.array(BOUNDS[name]) for name in bounds if name}
    nodes = [
        helper.make_node("Conv", ["x", "first"], ["conv"]),
        helper.make_node(op_type, ["conv", *bounds], ["bounded"], **attributes),
        helper.make_node("Conv", ["bounded", "second"], ["y"]),
    ]
    return make_model(nodes, [tensor("x", SHAPE)], [tensor("y", SHAPE)], constants, opset)


@pytest.mark.parametrize("case", CASES)
def test_an_operator_between_convolutions_is_in_the_function_of_the_first(host_target: Target, case: str) -> None:
    import tvm

    model = between_convolutions(case)
    lowered = lower(model, host_target, LoweringSettings(layout="NHWC"))
    names = [task.info.name for task in lowered.tasks]
    assert sum("conv2d" in name for name in names) == 2
    assert sum("transpose" in name for name in names) == len(names) - 2 == 2  # of the input and of the output

    x = 3 * np.random.default_rng(1).normal(size=SHAPE).astype(np.float32)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {"x": x})
    machine = tvm.relax.VirtualMachine(tvm.compile(lowered.mod, host_target), tvm.cpu())
    np.testing.assert_allclose(machine["main"](tvm.runtime.tensor(x)).numpy(), expected, rtol=1e-5, atol=1e-5)
