"""ONNX's own tests of single operators: what is lowered without a complaint computes what ONNX says."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
from helpers.one_operator import run_lowered
from onnx import numpy_helper

from ansor_mlflow.graphs import reasons_to_stay, rewrite_operators
from ansor_mlflow.lowering.lower import LoweredNetwork, lower

if TYPE_CHECKING:
    from tvm.target import Target

pytestmark = pytest.mark.system

CONSTANT_INPUTS = {
    "Conv": {1, 2},
    "ConvTranspose": {1, 2},
    "CumSum": {1},
    "DequantizeLinear": {1, 2},
    "Dropout": {1, 2},
    "Expand": {1},
    "GRU": {1, 2, 3, 4},
    "InstanceNormalization": {1, 2},
    "LSTM": {1, 2, 3, 4, 7},
    "LayerNormalization": {1, 2},
    "OneHot": {1, 2},
    "Pad": {1, 2, 3},
    "QLinearConv": {*range(1, 9)},
    "QuantizeLinear": {1, 2},
    "RNN": {1, 2, 3, 4},
    "ReduceSum": {1},
    "Reshape": {1},
    "Resize": {1, 2, 3},
    "Slice": {1, 2, 3, 4},
    "Split": {1},
    "Squeeze": {1},
    "Tile": {1},
    "TopK": {1},
    "Trilu": {1},
    "Unsqueeze": {1},
}
"""Inputs that are constants in exported models, by operator."""
OTHERS = {
    *("ArgMax", "AveragePool", "Clip", "Concat", "ConvInteger", "DepthToSpace", "DynamicQuantizeLinear", "Einsum"),
    *("GatherElements", "GatherND", "Gelu", "Gemm", "GridSample", "GroupNormalization", "IsInf", "IsNaN", "LRN"),
    *("LogSoftmax", "LpNormalization", "MatMul", "MatMulInteger", "Max", "MaxPool", "Mean", "Min", "Mish", "Not"),
    *("PRelu", "QLinearMatMul", "RMSNormalization", "Round", "ScatterElements", "ScatterND", "Sign", "Softmax", "Sum"),
    *("SpaceToDepth", "Transpose", "Where"),
}
NOT_ONNXRUNTIMES = ("align_corners", "_float16", "uint64", "with_argmax")
"""Where ONNX Runtime, to which we keep, differs from ONNX, or a step more or less is allowed."""


@pytest.fixture(scope="module")
def cases() -> list[Any]:
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = collect_testcases(None)
    operators = OTHERS | CONSTANT_INPUTS.keys()
    return [
        case
        for case in found
        if len(case.model.graph.node) == 1
        and case.model.graph.node[0].op_type in operators
        and not any(part in case.name for part in NOT_ONNXRUNTIMES)
        and not any(isinstance(array, onnx.TensorProto) for array in case.data_sets[0][0])  # of less than 8 bits
    ]


def with_constants(case: Any) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """The model of a case, with those inputs as initializers that exporters write so, and its other inputs."""
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    graph = model.graph
    (node,) = graph.node
    values = {value.name: np.asarray(array) for value, array in zip(graph.input, case.data_sets[0][0], strict=True)}
    for position in CONSTANT_INPUTS.get(node.op_type, set()) & set(range(len(node.input))):
        if (name := node.input[position]) in values:
            graph.initializer.append(numpy_helper.from_array(values.pop(name), name))
            graph.input.remove(next(value for value in graph.input if value.name == name))
    return model, values


def test_no_operator_is_silently_wrong(cases: list[Any], host_target: Target) -> None:
    wrong, num_right = {}, 0
    for case in cases:
        model, data = with_constants(case)
        if reasons_to_stay(rewrite_operators(model)) or (lowered := _lowered(model, host_target)) is None:
            continue
        try:
            outputs = run_lowered(lowered, host_target, data)
            for output, expected in zip(outputs, case.data_sets[0][1], strict=True):
                np.testing.assert_allclose(output, expected, rtol=1e-3, atol=1e-5)
        except Exception as err:  # noqa: BLE001 - all that are wrong are shown, not the first
            wrong[case.name] = str(err)[:200]
        else:
            num_right += 1
    assert not wrong
    assert num_right > 300


def _lowered(model: onnx.ModelProto, target: Target) -> LoweredNetwork | None:
    try:
        return lower(model, target)
    except Exception:  # noqa: BLE001 - whatever TVM's passes raise, it is no wrong result
        return None
