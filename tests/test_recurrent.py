"""Recurrent operators over short sequences are written out step by step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
from helpers.exports import text_recogniser
from helpers.one_operator import assert_computes_the_same, one_operator
from onnx import TensorProto

from ansor_mlflow.graphs import rewrite_operators
from ansor_mlflow.lowering.lower import lower
from ansor_mlflow.networks.load import load_network

if TYPE_CHECKING:
    from tvm.target import Target

NUM_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
STEPS, BATCH, IN_UNITS, UNITS = 5, 2, 4, 3


def recurrent(
    op_type: str, *, steps: int = STEPS, states: bool = True, extra: dict[str, Any] | None = None, **attributes: Any
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A model of one operator, and inputs for it.

    Args:
        op_type: The operator.
        steps: Length of the sequence.
        states: There is a bias, and initial states are inputs of the model.
        extra: More constants, by the names that the inputs have in ONNX's specification.
        attributes: The node's.
    """
    rng = np.random.default_rng(0)
    directions = 2 if attributes.get("direction") == "bidirectional" else 1
    rows = NUM_GATES[op_type] * UNITS
    data = {"X": rng.normal(size=(steps, BATCH, IN_UNITS))}
    constants = {"W": rng.normal(size=(directions, rows, IN_UNITS)), "R": rng.normal(size=(directions, rows, UNITS))}
    if states:
        constants["B"] = rng.normal(size=(directions, 2 * rows))
        initial = ("initial_h", "initial_c") if op_type == "LSTM" else ("initial_h",)
        data |= {name: rng.normal(size=(directions, BATCH, UNITS)) for name in initial}
    data = {name: value.astype(np.float32) for name, value in data.items()}
    constants |= extra or {}
    known = data.keys() | constants.keys()
    order = ["X", "W", "R", "B", "sequence_lens", "initial_h", "initial_c", "P"]
    inputs = [name if name in known else "" for name in order]
    while not inputs[-1]:
        inputs.pop()
    outputs = [TensorProto.FLOAT] * (3 if op_type == "LSTM" else 2)
    model = one_operator(
        op_type, data, constants, inputs=inputs, outputs=outputs, opset=14, hidden_size=UNITS, **attributes
    )
    return model, data


def operators(model: onnx.ModelProto) -> set[str]:
    return {node.op_type for node in model.graph.node}


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("op_type", NUM_GATES)
def test_each_direction_computes_what_onnxruntime_computes(host_target: Target, op_type: str, direction: str) -> None:
    model, data = recurrent(op_type, direction=direction)
    assert_computes_the_same(model, host_target, data)


@pytest.mark.parametrize(
    ("op_type", "arguments"),
    [
        ("GRU", {"linear_before_reset": 1}),
        ("GRU", {"states": False}),
        ("LSTM", {"states": False, "steps": 1}),
        ("LSTM", {"extra": {"sequence_lens": np.array([STEPS, STEPS], np.int32)}}),
        ("LSTM", {"activations": ["Sigmoid", "Relu", "Tanh"]}),
        ("RNN", {"activations": ["Relu"]}),
    ],
)
def test_each_variant_computes_what_onnxruntime_computes(
    host_target: Target, op_type: str, arguments: dict[str, Any]
) -> None:
    model, data = recurrent(op_type, **arguments)
    assert_computes_the_same(model, host_target, data)


def test_all_steps_are_the_same_functions(host_target: Target) -> None:
    model, data = recurrent("LSTM", steps=12)
    lowered = assert_computes_the_same(model, host_target, data)
    steps = [task.info for task in lowered.tasks if task.info.weight > 2]
    assert len(lowered.tasks) < 12
    assert len(steps) == 3  # the product, the cell, and what it gives
    assert all(task.weight >= 10 for task in steps)


@pytest.mark.parametrize(
    "arguments",
    [
        {"steps": 65},
        {"extra": {"sequence_lens": np.array([STEPS, 2], np.int32)}},
        {"extra": {"P": np.ones((1, 3 * UNITS), np.float32)}},
        {"clip": 1.0},
        {"activations": ["HardSigmoid", "Tanh", "Tanh"]},
    ],
)
def test_what_is_not_written_out_stays(arguments: dict[str, Any]) -> None:
    model, _ = recurrent("LSTM", **arguments)
    assert operators(rewrite_operators(model)) == {"LSTM"}


def test_batch_may_be_the_first_axis() -> None:
    """ONNX Runtime has no such kernel; ONNX's own implementation has."""
    from onnx.reference import ReferenceEvaluator

    rng = np.random.default_rng(0)
    data = {"X": rng.normal(size=(BATCH, STEPS, IN_UNITS)).astype(np.float32)}
    constants = {"W": rng.normal(size=(1, 4 * UNITS, IN_UNITS)), "R": rng.normal(size=(1, 4 * UNITS, UNITS))}
    model = one_operator("LSTM", data, constants, outputs=[1, 1], opset=14, hidden_size=UNITS, layout=1)
    rewritten = rewrite_operators(model)
    assert "LSTM" not in operators(rewritten)
    for output, expected in zip(
        ReferenceEvaluator(rewritten).run(None, data), ReferenceEvaluator(model).run(None, data), strict=True
    ):
        np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-6)


def test_no_function_has_the_operators_of_many_steps(host_target: Target, tmp_path: Path) -> None:
    """The search takes long for those: the last steps of both directions, and all outputs, would be one of 38."""
    onnx.save(text_recogniser(), tmp_path / "text.onnx")
    tasks = lower(load_network(str(tmp_path / "text.onnx")).model, host_target).tasks
    assert 16 <= max(task.mod.script().count("T.sblock(") for task in tasks) <= 32
