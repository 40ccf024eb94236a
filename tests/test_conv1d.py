"""Convolutions along one axis, as of sound and text, have the channels last and the programs of other convolutions."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from helpers.one_operator import assert_computes_the_same
from onnx import TensorProto, helper, numpy_helper
from tvm.target import Target

from ansor_mlflow.lowering.lower import lower
from ansor_mlflow.settings import LoweringSettings
from ansor_mlflow.sketches.sketch import find_programs

CHANNELS, LENGTH = 16, 50
CASES: dict[str, dict[str, Any]] = {
    "as long as before": {"pads": [1, 1]},
    "shorter": {},
    "stride": {"strides": [2], "pads": [1, 1]},
    "dilation": {"dilations": [3]},
    "pads of two lengths": {"pads": [0, 2]},
    "groups": {"group": 2, "pads": [1, 1]},
    "depthwise": {"group": CHANNELS, "pads": [1, 1]},
}


def model(case: str) -> onnx.ModelProto:
    """Two convolutions with an activation between them."""
    rng = np.random.default_rng(0)
    group = CASES[case].get("group", 1)
    constants = {
        "w": rng.normal(size=(CHANNELS, CHANNELS // group, 3)),
        "b": rng.normal(size=CHANNELS),
        "v": rng.normal(size=(CHANNELS, CHANNELS, 1)),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["h"], **CASES[case]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("Conv", ["r", "v"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "sound",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (2, CHANNELS, LENGTH))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in constants.items()],
    )
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 17)])


@pytest.mark.parametrize("case", CASES)
def test_it_computes_what_onnxruntime_computes(host_target: Target, case: str) -> None:
    data = np.random.default_rng(1).normal(size=(2, CHANNELS, LENGTH)).astype(np.float32)
    assert_computes_the_same(model(case), host_target, {"x": data})


@pytest.mark.parametrize("case", CASES)
def test_its_programs_are_near_what_the_machine_can_do(host_target: Target, case: str) -> None:
    """With the channels first, as ONNX has them, they take ten to fifty times as long."""
    convolutions = [task for task in lower(model(case), host_target).tasks if "conv1d" in task.info.name]
    assert convolutions
    for task in convolutions:
        programs = find_programs(task.mod, host_target)
        assert programs is not None
        assert programs.are_enough


def test_the_layout_may_be_onnxs(host_target: Target) -> None:
    tasks = lower(model("stride"), host_target, LoweringSettings(layout="NCHW")).tasks
    assert not any("transpose" in task.info.name for task in tasks)
