"""Recurrent layers are one function of all steps, or written out, and compute what ONNX Runtime computes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
import tvm
from helpers.exports import text_recogniser
from helpers.one_operator import MICROSOFT, assert_computes_the_same, one_operator, run_lowered, run_onnxruntime
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from ansor_mlflow.codegen import pass_config, tir_pipeline
from ansor_mlflow.device.targets import resolve_target
from ansor_mlflow.graphs import fallback_reasons, rewrite_operators
from ansor_mlflow.lowering import LoweredNetwork
from ansor_mlflow.lowering.lower import lower
from ansor_mlflow.lowering.lower_graph import lower_graph
from ansor_mlflow.lowering.recurrence import Blocking, RecurrentLayer, all_steps
from ansor_mlflow.networks.load import load_network
from ansor_mlflow.settings import LoweringSettings

if TYPE_CHECKING:
    from tvm.target import Target

NUM_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
STEPS, BATCH, IN_UNITS, UNITS = 5, 2, 4, 3
INPUTS = ["X", "W", "R", "B", "sequence_lens", "initial_h", "initial_c", "P"]


def recurrent(
    op_type: str,
    *,
    steps: int = STEPS,
    batch: int = BATCH,
    units: int = UNITS,
    states: bool = True,
    extra: dict[str, Any] | None = None,
    **attributes: Any,
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A model of one operator, and inputs for it.

    Args:
        op_type: The operator.
        steps: Length of the sequence.
        batch: Number of sequences.
        units: Size of a state.
        states: There is a bias, and initial states are inputs of the model.
        extra: More constants, by the names that the inputs have in ONNX's specification.
        attributes: The node's.
    """
    rng = np.random.default_rng(0)
    directions = 2 if attributes.get("direction") == "bidirectional" else 1
    rows, scale = NUM_GATES[op_type] * units, 1 / np.sqrt(units)
    shapes = {"X": (steps, batch, IN_UNITS), "state": (directions, batch, units)}
    if attributes.get("layout"):
        shapes = {name: (shape[1], shape[0], shape[2]) for name, shape in shapes.items()}
    data = {"X": rng.normal(size=shapes["X"])}
    constants: dict[str, Any] = {
        name: rng.normal(size=(directions, rows, size)) * scale for name, size in (("W", IN_UNITS), ("R", units))
    }
    if states:
        constants["B"] = rng.normal(size=(directions, 2 * rows)) * scale
        initial = ("initial_h", "initial_c") if op_type == "LSTM" else ("initial_h",)
        data |= {name: rng.normal(size=shapes["state"]) for name in initial}
    data = {name: value.astype(np.float32) for name, value in data.items()}
    constants |= extra or {}
    inputs = [name if name in data.keys() | constants.keys() else "" for name in INPUTS]
    while not inputs[-1]:
        inputs.pop()
    outputs = [TensorProto.FLOAT] * (3 if op_type == "LSTM" else 2)
    model = one_operator(
        op_type, data, constants, inputs=inputs, outputs=outputs, opset=14, hidden_size=units, **attributes
    )
    return model, data


def operators(model: onnx.ModelProto) -> set[str]:
    return {node.op_type for node in model.graph.node}


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("GRU", {"linear_before_reset": 1}),
    ("GRU", {"linear_before_reset": 1, "direction": "bidirectional", "states": False}),
    ("GRU", {"states": False}),
    ("LSTM", {"states": False, "steps": 1}),
    ("LSTM", {"extra": {"sequence_lens": np.array([STEPS, STEPS], np.int32)}}),
    ("LSTM", {"activations": ["Sigmoid", "Relu", "Tanh"]}),
    (
        "LSTM",
        {"activations": ["Sigmoid", "Tanh", "Tanh", "Sigmoid", "Relu", "Relu"], "direction": "bidirectional"},
    ),
    ("RNN", {"activations": ["Relu"]}),
]


@pytest.mark.parametrize("direction", ["bidirectional", "forward", "reverse"])
@pytest.mark.parametrize("op_type", NUM_GATES)
def test_each_direction_computes_what_onnxruntime_computes(host_target: Target, op_type: str, direction: str) -> None:
    model, data = recurrent(op_type, direction=direction)
    assert not assert_computes_the_same(model, host_target, data).parts


@pytest.mark.parametrize(("op_type", "arguments"), VARIANTS)
def test_each_variant_computes_what_onnxruntime_computes(
    host_target: Target, op_type: str, arguments: dict[str, Any]
) -> None:
    model, data = recurrent(op_type, **arguments)
    assert not assert_computes_the_same(model, host_target, data).parts


@pytest.mark.parametrize(("batch", "units"), [(1, 40), (3, 33), (9, 50)])
@pytest.mark.parametrize(
    ("op_type", "attributes"), [("LSTM", {}), ("GRU", {}), ("GRU", {"linear_before_reset": 1}), ("RNN", {})]
)
def test_long_sequences_of_any_size(
    host_target: Target, op_type: str, attributes: dict[str, Any], batch: int, units: int
) -> None:
    """Rows and units are no multiples of a tile."""
    model, data = recurrent(op_type, steps=300, batch=batch, units=units, **attributes)
    lowered = assert_computes_the_same(model, host_target, data)
    assert len(lowered.tasks) <= 2  # a product and a change of shape


@pytest.mark.parametrize(("op_type", "attributes"), [("LSTM", {}), ("GRU", {}), ("RNN", {})])
@pytest.mark.parametrize("threads", ["none", "jobs", "units"])
def test_threads_compute_the_same(
    op_type: str, attributes: dict[str, Any], threads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small layers are left to one thread; here none is."""
    target = resolve_target("auto", 2)
    chosen = Blocking.of
    monkeypatch.setattr(Blocking, "of", lambda layer, target: replace(chosen(layer, target), threads=threads, rows=2))
    model, data = recurrent(op_type, steps=20, batch=4, units=70, direction="bidirectional", **attributes)
    assert_computes_the_same(model, target, data)


def blocking(spec: str, num_threads: int, **sizes: Any) -> Blocking:
    layer = {"kind": "LSTM", "steps": 50, "batch": 1, "units": 64, "reverses": (False,), "activations": ((),)}
    return Blocking.of(RecurrentLayer(**{**layer, **sizes}), resolve_target(spec, num_threads))


@pytest.mark.parametrize(
    ("spec", "lanes", "num_registers"),
    [
        ("llvm -mcpu=znver4", 16, 32),
        ("llvm -mcpu=haswell", 8, 16),
        ("llvm -mtriple=aarch64-linux-gnu -mcpu=cortex-a72", 4, 32),
    ],
)
@pytest.mark.parametrize("kind", NUM_GATES)
def test_a_tile_fits_the_registers(spec: str, lanes: int, num_registers: int, kind: str) -> None:
    for batch in (1, 2, 8, 33):
        found = blocking(spec, 1, kind=kind, batch=batch, units=128, linear_before_reset=kind == "GRU")
        num_sums = found.rows * found.vectors * NUM_GATES[kind]
        assert found.lanes == lanes
        assert num_sums < num_registers
        assert num_sums >= 8 or found.rows == batch
        assert found.threads == "none"


def test_threads_are_started_where_they_pay() -> None:
    both = {"reverses": (False, True)}
    assert blocking("llvm -mcpu=znver4", 2).threads == "none"
    assert blocking("llvm -mcpu=znver4", 2, **both).threads == "jobs"
    assert blocking("llvm -mcpu=znver4", 2, steps=1, **both).threads == "none"
    assert blocking("llvm -mcpu=znver4", 2, units=256).threads == "units"
    assert blocking("llvm -mcpu=znver4", 2, units=256, **both).threads == "jobs"
    assert blocking("llvm -mcpu=znver4", 2, batch=8).threads == "jobs"
    assert blocking("llvm -mcpu=znver4", 8, units=256).threads == "none"
    assert blocking("llvm -mcpu=znver4", 8, units=512, **both).threads == "units"
    assert blocking("llvm -mcpu=znver4", 8, **both).threads == "jobs"


@pytest.mark.parametrize("threads", ["none", "jobs", "units"])
def test_code_is_made_for_boards(threads: str, tmp_path: Path) -> None:
    target = resolve_target("llvm -mtriple=aarch64-linux-gnu -mcpu=cortex-a72", 4)
    activations = ("Sigmoid", "Tanh", "Tanh")
    layer = RecurrentLayer(
        kind="LSTM", steps=9, batch=8, units=50, reverses=(False, True), activations=(activations, activations)
    )
    function = all_steps(layer, replace(Blocking.of(layer, target), threads=threads)).with_attr("global_symbol", "main")
    with tvm.transform.PassContext(config=pass_config(target)):
        library = tvm.tirx.build(tvm.IRModule({"main": function}), target=target, pipeline=tir_pipeline(target))
    library.write_to_file(str(tmp_path / "code.s"), "s")
    code = (tmp_path / "code.s").read_text()
    assert "fmla" in code
    assert "expf" not in code
    assert ("TVMBackendParallelBarrier" in code) == (threads == "units")


def test_a_few_units_do_not_fill_a_vector() -> None:
    assert blocking("llvm -mcpu=znver4", 1, units=3).lanes == 4
    assert blocking("llvm -mcpu=znver4", 1, units=9).lanes == 16


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_steps_stay_float32_where_all_else_has_16_bits(host_target: Target, dtype: str) -> None:
    model, data = recurrent("LSTM", steps=20)
    lowered = lower(model, host_target, LoweringSettings(dtype=dtype))
    assert not lowered.parts
    for output, expected in zip(run_lowered(lowered, host_target, data), run_onnxruntime(model, data), strict=True):
        np.testing.assert_allclose(output, expected, atol=0.05)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"extra": {"sequence_lens": np.array([STEPS, 2], np.int32)}}, "sequences of different lengths"),
        ({"extra": {"P": np.ones((1, 3 * UNITS), np.float32)}}, "peepholes"),
        ({"clip": 1.0}, "clipped or coupled gates"),
        ({"activations": ["HardSigmoid", "Tanh", "Tanh"]}, "activations of its own"),
    ],
)
def test_what_tvm_does_not_compute_stays(arguments: dict[str, Any], reason: str) -> None:
    model, _ = recurrent("LSTM", **arguments)
    rewritten = rewrite_operators(model, writes_out_steps=True)
    assert operators(rewritten) == {"LSTM"}
    assert fallback_reasons(rewritten) == {0: reason}


@pytest.mark.parametrize(
    ("op_type", "arguments"), [*VARIANTS, *((op_type, {"direction": "bidirectional"}) for op_type in NUM_GATES)]
)
def test_steps_that_are_written_out_compute_the_same(op_type: str, arguments: dict[str, Any]) -> None:
    model, data = recurrent(op_type, **arguments)
    rewritten = rewrite_operators(model, writes_out_steps=True)
    assert op_type not in operators(rewritten)
    for output, expected in zip(run_onnxruntime(rewritten, data), run_onnxruntime(model, data), strict=True):
        np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-6)


def test_long_sequences_are_not_written_out() -> None:
    model, _ = recurrent("LSTM", steps=65)
    assert operators(rewrite_operators(model, writes_out_steps=True)) == {"LSTM"}


@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
@pytest.mark.parametrize("op_type", NUM_GATES)
def test_batch_may_be_the_first_axis(host_target: Target, op_type: str, direction: str) -> None:
    """ONNX Runtime has no such kernel, so that the steps are the first axis of what it is compared with."""
    model, data = recurrent(op_type, batch=3, layout=1, direction=direction)
    by_step, _ = recurrent(op_type, batch=3, direction=direction)
    outputs, *last = run_onnxruntime(by_step, {name: value.swapaxes(0, 1) for name, value in data.items()})
    expected = [outputs.transpose(2, 0, 1, 3), *(state.swapaxes(0, 1) for state in last)]
    written_out = ReferenceEvaluator(rewrite_operators(model, writes_out_steps=True)).run(None, data)
    lowered = LoweredNetwork(lower_graph(model, host_target, LoweringSettings()), ())
    for results in (written_out, run_lowered(lowered, host_target, data)):
        for output, value in zip(results, expected, strict=True):
            np.testing.assert_allclose(output, value, rtol=1e-4, atol=1e-5)


VNNI = "llvm -mcpu=znver4"
"""A CPU that adds products of bytes; on another one its functions are plain loops."""


def byte_recurrent(
    *, steps: int = 12, batch: int = 1, units: int = 32, by_unit: bool = False, zero_point: int = 0, **attributes: Any
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A DynamicQuantizeLSTM, as ONNX Runtime's quantiser writes it, and inputs for it.

    Its weights have seven bits: beyond them CPUs without an instruction for them saturate sums in ONNX Runtime.
    """
    rng = np.random.default_rng(0)
    directions = 2 if attributes.get("direction") == "bidirectional" else 1
    rows, scales = 4 * units, (directions, 4 * units) if by_unit else (directions,)
    data: dict[str, Any] = {"X": rng.normal(size=(steps, batch, 8))}
    data |= {name: rng.normal(size=(directions, batch, units)) / 2 for name in ("initial_h", "initial_c")}
    constants: dict[str, Any] = {
        name: rng.integers(-63, 64, (directions, size, rows)).astype(np.int8) for name, size in (("W", 8), ("R", units))
    }
    constants |= {"B": rng.normal(size=(directions, 2 * rows)) / 4}
    constants |= {name: rng.uniform(0.5, 1, scales) / (40 * np.sqrt(units)) for name in ("W_scale", "R_scale")}
    zeros = np.full(scales, zero_point, np.int8)
    inputs = ["X", "W", "R", "B", "", "initial_h", "initial_c", "", "W_scale", "W_zero", "R_scale", "R_zero"]
    model = one_operator(
        "DynamicQuantizeLSTM",
        data := {name: value.astype(np.float32) for name, value in data.items()},
        constants | {"W_zero": zeros, "R_zero": zeros},
        inputs=inputs,
        outputs=[TensorProto.FLOAT] * 3,
        domain=MICROSOFT,
        hidden_size=units,
        **attributes,
    )
    state = (directions, batch, units)
    for output, shape in zip(model.graph.output, ((steps, *state), state, state), strict=True):
        output.CopyFrom(helper.make_tensor_value_info(output.name, TensorProto.FLOAT, shape))
    return model, data


def assert_bytes_are_multiplied(target: Target, **arguments: Any) -> None:
    model, data = byte_recurrent(**arguments)
    lowered = lower(model, resolve_target(VNNI, 2))
    assert not lowered.parts
    results = run_onnxruntime(model, data)
    for each in (target, resolve_target("llvm -mcpu=x86-64", 2)):
        for output, expected in zip(run_lowered(lowered, each, data), results, strict=True):
            np.testing.assert_allclose(output, expected, atol=0.02)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"direction": "bidirectional", "units": 48, "by_unit": True},
        {"direction": "reverse", "batch": 5},
        {"units": 160, "steps": 40},
        {"steps": 1},
    ],
    ids=str,
)
def test_weights_of_bytes_are_multiplied_as_bytes(host_target: Target, arguments: dict[str, Any]) -> None:
    assert_bytes_are_multiplied(host_target, **arguments)


@pytest.mark.parametrize("arguments", [{"direction": "bidirectional"}, {"batch": 3}], ids=str)
def test_each_thread_quantises_the_state(arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = Blocking.of
    monkeypatch.setattr(Blocking, "of", lambda layer, target: replace(chosen(layer, target), threads="units", chunks=2))
    assert_bytes_are_multiplied(resolve_target("auto", 2), units=128, **arguments)


def test_units_of_bytes_are_shared_where_it_pays() -> None:
    assert blocking(VNNI, 2, units=256, has_byte_weights=True).threads == "none"
    large = blocking(VNNI, 2, units=512, has_byte_weights=True)
    assert (large.threads, large.chunks) == ("units", 2)
    assert blocking(VNNI, 2, units=512 + 32, has_byte_weights=True).threads == "none"  # 17 blocks


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"zero_point": 1}, "weights with a zero point"),
        ({"units": 24}, "units that are no vectors"),
        ({"input_forget": 1}, "clipped or coupled gates"),
    ],
)
def test_other_weights_of_bytes_stay(arguments: dict[str, Any], reason: str) -> None:
    assert fallback_reasons(byte_recurrent(**arguments)[0]) == {0: reason}


def test_without_an_instruction_weights_of_bytes_stay() -> None:
    """ONNX Runtime's kernel takes a third of the time of one of float32."""
    lowered = lower(byte_recurrent()[0], resolve_target("llvm -mcpu=haswell", 2))
    assert [part.graph.runs_in for part in lowered.parts] == ["onnxruntime"]


def test_a_network_of_recurrent_layers_has_few_tasks(host_target: Target) -> None:
    """However long its sequence is; what the steps do is no task."""
    model, data = recurrent("LSTM", steps=100)
    tasks = assert_computes_the_same(model, host_target, data).tasks
    assert [task.info.name for task in tasks if "matmul" in task.info.name]
    assert len(tasks) == 2


def test_without_sketches_steps_are_written_out() -> None:
    """All steps are the same functions."""
    model, _ = recurrent("LSTM", steps=12)
    tasks = lower(model, resolve_target("cuda -arch=sm_80", 1)).tasks
    steps = [task.info for task in tasks if task.info.weight > 2]
    assert len(tasks) < 12
    assert len(steps) == 3  # the product, the cell, and what it gives
    assert all(task.weight >= 10 for task in steps)


def test_no_function_has_the_operators_of_many_steps(tmp_path: Path) -> None:
    """The search takes long for those: the last steps of both directions, and all outputs, would be one of 38."""
    onnx.save(text_recogniser(), tmp_path / "text.onnx")
    tasks = lower(load_network(str(tmp_path / "text.onnx")).model, resolve_target("cuda -arch=sm_80", 1)).tasks
    assert 16 <= max(task.mod.script().count("T.sblock(") for task in tasks) <= 32
