"""NaN and infinities go through operators as they do in ONNX Runtime, and all other values and dtypes."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
from helpers.one_operator import one_operator, run_lowered, run_onnxruntime
from onnx import TensorProto, helper

from ansor_mlflow.codegen import pass_config, tir_pipeline
from ansor_mlflow.device.targets import resolve_target
from ansor_mlflow.errors import CorrectnessError, UserInputError
from ansor_mlflow.lowering.lower import lower
from ansor_mlflow.measuring.checking import (
    broken,
    expected_of,
    is_finite,
    require_broken_stays_broken,
    swallowing,
    with_broken,
)
from ansor_mlflow.networks.graph import GraphBuilder
from ansor_mlflow.settings import LoweringSettings
from ansor_mlflow.tensors import Arrays

if TYPE_CHECKING:
    from tvm.target import Target

RNG = np.random.default_rng(0)


def vector(dtype: Any = np.float32) -> np.ndarray:
    values = (3 * RNG.normal(size=37)).astype(dtype)  # vectors, and what is left of them
    values[[0, 5, 17, 33, 36]], values[[1, 18]], values[[2, 20, 35]], values[3] = np.nan, np.inf, -np.inf, -0.0
    return values


def rows() -> np.ndarray:
    """The NaN of a row is the first value, or all are: what is kept of others depends on the vectors of a kernel."""
    values = RNG.normal(size=(5, 8)).astype(np.float32)
    values[0, 0], values[1, 3], values[2, 3], values[3], values[4] = np.nan, np.inf, -np.inf, np.nan, -np.inf
    return values


def image() -> np.ndarray:
    values = RNG.normal(size=(1, 16, 9, 9)).astype(np.float32)
    values[0, 2, 3, 4], values[0, 9, 8, 8] = np.nan, np.inf
    return values


X = {"x": vector()}
XY = {**X, "y": np.roll(X["x"], 3)}
XYZ = {**XY, "z": np.roll(X["x"], 7)}
ROWS = {"x": rows()}
FEW = {"x": np.array([[1, np.nan, 7, 4, -1], [np.nan, 2, np.nan, -2, 0.5]], np.float32)}
IMAGE = {"x": image()}
BOUNDS = {"low": -1.0, "high": 6.0}
PLACE = {"outputs": [TensorProto.INT64]}
ELEMENTWISE = [
    *("Abs", "Ceil", "Elu", "Erf", "Exp", "Floor", "HardSigmoid", "LeakyRelu", "Log", "Neg", "Reciprocal", "Relu"),
    *("Round", "Selu", "Sigmoid", "Sign", "Softplus", "Softsign", "Sqrt", "Tanh", "ThresholdedRelu"),
]
CASES: dict[str, tuple[str, dict[str, np.ndarray], dict[str, Any]]] = {
    **{name: (name, X, {}) for name in ELEMENTWISE},
    "Celu": ("Celu", X, {"alpha": 0.7}),
    "HardSwish": ("HardSwish", X, {"opset": 17}),
    "Mish": ("Mish", X, {"opset": 18}),
    "Gelu": ("Gelu", X, {"opset": 20}),
    "PRelu": ("PRelu", X, {"constants": {"slope": [0.3]}}),
    "Clip": ("Clip", X, {"constants": BOUNDS}),
    "Clip of tensors": ("Clip", {**X, "low": np.array(-1, np.float32), "high": np.array(1, np.float32)}, {}),
    "Clip, NaN": ("Clip", X, {"constants": {"low": np.nan, "high": 1.0}}),
    **{f"{name} of two": (name, XY, {}) for name in ("Max", "Min", "Add", "Mul", "Div", "Pow")},
    **{f"{name} of three": (name, XYZ, {}) for name in ("Max", "Min", "Mean")},
    **{f"{name} of a constant": (name, X, {"constants": {"c": 0.5}}) for name in ("Max", "Min")},
    **{f"{name} of a NaN": (name, X, {"constants": {"c": np.nan}}) for name in ("Max", "Min")},
    **{f"{name} of a number": (name, {**X, "n": np.array(np.nan, np.float32)}, {}) for name in ("Max", "Min")},
    "Max of one element": ("Max", {"x": np.float32([np.nan]), "y": np.float32([1])}, {}),
    "Min of one element": ("Min", {"x": np.float32([1]), "y": np.float32([[np.nan]])}, {}),
    "Max of two numbers": ("Max", {"m": np.float32([1]), "n": np.float32([np.nan]), **X}, {}),
    "fmod": ("Mod", XY, {"fmod": 1}),
    **{f"{name} of rows": (name, ROWS, {"axis": 1}) for name in ("Softmax", "LogSoftmax")},
    **{name: (name, ROWS, {"axes": [1]}) for name in ("ReduceMax", "ReduceMin", "ReduceMean", "ReduceL2")},
    "ReduceMax without the axis": ("ReduceMax", ROWS, {"axes": [-1], "keepdims": 0}),
    "ReduceMin of all": ("ReduceMin", ROWS, {"keepdims": 0}),
    "ReduceMax, opset 18": ("ReduceMax", ROWS, {"constants": {"axes": np.array([1])}, "opset": 18}),
    **{name: (name, ROWS, {"axis": 1, **PLACE}) for name in ("ArgMax", "ArgMin")},
    **{f"{n} last": (n, ROWS, {"axis": 1, "select_last_index": 1, **PLACE}) for n in ("ArgMax", "ArgMin")},
    **{f"{name} of few": (name, FEW, {"axes": [1]}) for name in ("ReduceMax", "ReduceMin")},
    **{f"{name} of few": (name, FEW, {"axis": 1, **PLACE}) for name in ("ArgMax", "ArgMin")},
    "constant channels": (
        "MeanVarianceNormalization",
        {"x": np.repeat(np.float32([[1, 3]]), 9).reshape(1, 2, 3, 3)},
        {},
    ),
    "AveragePool": ("AveragePool", IMAGE, {"kernel_shape": [2, 2], "pads": [1, 1, 0, 0]}),
    **{f"{n} after a convolution": (n, IMAGE, {"after_conv": True}) for n in ("Relu", "LeakyRelu", "HardSwish")},
    "Relu6": ("Clip", IMAGE, {"constants": {"low": 0.0, "high": 6.0}, "after_conv": True}),
}
"""Operator, inputs, and what else `one_operator` takes."""


def assert_same_numbers(actual: np.ndarray, expected: np.ndarray, rtol: float = 1e-5) -> None:
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=rtol, equal_nan=True)  # infinities are equal, too


@pytest.mark.filterwarnings("ignore:.*encountered in")
@pytest.mark.parametrize("case", CASES)
def test_nan_and_infinities_are_those_of_onnxruntime(case: str, host_target: Target) -> None:
    op_type, data, others = CASES[case]
    model = one_operator(op_type, data, **{"opset": 17 if "Hard" in case else 13, **others})
    lowered = lower(model, host_target, LoweringSettings(layout="NHWC"))
    for actual, expected in zip(run_lowered(lowered, host_target, data), run_onnxruntime(model, data), strict=True):
        assert_same_numbers(actual, expected)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
@pytest.mark.parametrize("op_type", ["Max", "Min", "Relu"])
def test_nan_stays_in_other_floats(op_type: str, dtype: Any, host_target: Target) -> None:
    x = vector(dtype)
    data = {"x": x} if op_type == "Relu" else {"x": x, "y": np.roll(x, 3)}
    model = one_operator(op_type, data, opset=14, outputs=[helper.np_dtype_to_tensor_dtype(np.dtype(dtype))])
    (actual,) = run_lowered(lower(model, host_target), host_target, data)
    assert_same_numbers(actual, run_onnxruntime(model, data)[0])


def test_a_number_that_is_computed_before_its_maximum(host_target: Target) -> None:
    """It is no bound, though the other one looks like one."""
    data = {"x": np.float32([1]), "y": np.float32([np.nan])}
    model = one_operator("Max", data)
    model.graph.node[0].input[0] = "negative"
    model.graph.node.insert(0, helper.make_node("Neg", ["x"], ["negative"]))
    (actual,) = run_lowered(lower(model, host_target), host_target, data)
    assert np.isnan(actual).all()


@pytest.mark.filterwarnings("ignore:.*encountered in")
def test_a_chain_of_rectifiers_is_compiled_in_the_time_of_its_links(host_target: Target) -> None:
    """TVM's simplifier sees what a `Let` binds again in every condition above it: minutes for this chain."""
    builder = GraphBuilder(seed=0)
    data = builder.dense("dense", builder.input("x", (2, 8)), units=8, in_units=8)
    leaky = builder.node("LeakyRelu", "leaky", data, alpha=0.1)
    below = builder.node("Less", "below", leaky, builder.weight("zero", np.zeros(1)))
    either = builder.node("Where", "either", below, leaky, builder.node("Log", "log", builder.relu("relu", leaky)))
    elu = builder.node("Elu", "elu", builder.node("Mul", "halved", either, builder.weight("half", np.full(1, 0.5))))
    builder.node("Add", "sum", elu, leaky)
    model = builder.build("chain", {"sum": (2, 8)})
    x = {"x": RNG.normal(size=(2, 8)).astype(np.float32)}
    (actual,) = run_lowered(lower(model, host_target), host_target, x)
    assert_same_numbers(actual, run_onnxruntime(model, x)[0], rtol=1e-4)


def clip(length: int = 64, lanes: int = 16) -> Any:
    """A vectorised min(max(x, 0), 6)."""
    import tvm
    from tvm import te

    data = te.placeholder((length,), "float32")
    low, high = (tvm.tirx.const(bound, "float32") for bound in (0.0, 6.0))
    result = te.compute((length,), lambda i: te.min(te.max(data[i], low), high), "result")
    schedule = tvm.s_tir.Schedule(te.create_prim_func([data, result]))
    schedule.vectorize(schedule.split(schedule.get_loops(schedule.get_sblock("result"))[0], [None, lanes])[1])
    return schedule.mod


def assembly(spec: str, pipeline: str = "") -> list[str]:
    import tvm
    from tvm.driver import build

    target = resolve_target(spec, 1)
    with tvm.transform.PassContext(config=pass_config(target)):
        library = build(clip(), target=target, pipeline=pipeline or tir_pipeline(target))
    lines = (line.split("#")[0].split() for line in library.inspect_source("asm").splitlines())
    return [words[0] for words in lines if words and not words[0].startswith(".")]


@pytest.mark.parametrize("spec", ["llvm -mcpu=haswell", "llvm -mcpu=skylake-avx512"])
def test_a_rectifier_takes_as_many_instructions_as_without_nan(spec: str) -> None:
    assert len(assembly(spec)) <= len(assembly(spec, "default"))


def test_arm_s_own_instructions_keep_nan() -> None:
    found = assembly("llvm -mtriple=aarch64-linux-gnu -mcpu=cortex-a76")
    assert {"fmax", "fmin"} <= set(found)
    assert {"fmaxnm", "fminnm", "fcmgt"}.isdisjoint(found)


def test_gpus_choose_in_the_order_that_keeps_nan() -> None:
    """Their functions fmaxf and fminf pass over NaN."""
    import tvm
    from tvm.driver import build

    target = resolve_target("cuda -arch=sm_80", 1)
    schedule = tvm.s_tir.Schedule(clip(lanes=4))
    schedule.bind(schedule.get_loops(schedule.get_sblock("result"))[0], "threadIdx.x")
    source = build(schedule.mod, target=target, pipeline=tir_pipeline(target)).imports[0].inspect_source()
    kernel = source[source.rindex("__global__") :]
    assert "?" in kernel
    assert not re.search(r"max|min\(", kernel.partition("{")[2])


def arrays(*values: float) -> dict[str, np.ndarray]:
    return {"y": np.array(values, np.float32)}


@pytest.mark.parametrize(
    ("actual", "expected", "is_lost"),
    [
        (arrays(0, 1), arrays(np.nan, 1), True),
        (arrays(1, 1), arrays(np.inf, 1), True),
        (arrays(np.inf), arrays(-np.inf), True),
        (arrays(np.nan, np.nan), arrays(np.nan, np.inf), False),
        (arrays(np.nan), arrays(1), False),  # spread by a transformation
        (arrays(np.inf), arrays(np.finfo(np.float32).max), False),
        ({"y": np.array([1])}, {"y": np.array([2])}, False),
    ],
)
def test_what_is_lost_of_nan_and_infinities(
    actual: dict[str, np.ndarray], expected: dict[str, np.ndarray], is_lost: bool
) -> None:
    assert swallowing(actual, expected) == (["y"] if is_lost else [])


def test_an_input_is_broken_in_few_places() -> None:
    inputs = {"x": np.ones((2, 50), np.float32), "ids": np.ones(3, np.int64)}
    found = broken(inputs)
    assert found is not None
    assert np.isnan(found["x"]).sum() == 1
    assert np.isinf(found["x"]).sum() == 2
    assert found["ids"] is inputs["ids"]
    assert np.isfinite(inputs["x"]).all()
    assert broken({"ids": inputs["ids"]}) is None
    for scalar in (np.float32(1), np.ones(1, np.float16)):
        assert np.isnan(broken({"x": np.asarray(scalar)})["x"]).all()  # type: ignore[index]


@pytest.mark.parametrize("op_type", ["Relu", "MaxPool"])
def test_a_model_that_makes_numbers_of_nan_is_refused_or_warned_of(
    op_type: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    inputs = {"x": np.ones((1, 1, 4, 4), np.float32)}
    attributes = {"kernel_shape": [1, 1]} if op_type == "MaxPool" else {}
    onnx.save(one_operator(op_type, inputs, **attributes), tmp_path / "network.onnx")

    def check(value: float) -> None:
        computed = {"y0": np.full((1, 1, 4, 4), value, np.float32)}
        network = tmp_path / "network.onnx"
        _, expected = with_broken(partial(expected_of, network, 1), [inputs], inputs)
        require_broken_stays_broken(expected, computed, network)

    check(np.nan)
    assert not caplog.messages
    if op_type == "Relu":
        with pytest.raises(CorrectnessError, match=r"are numbers in y0, .* do not deploy this model"):
            check(0)
    else:
        check(0)
        assert "the network has MaxPool" in caplog.text


def test_a_model_that_refuses_nan_is_not_refused(tmp_path: Path) -> None:
    def refuse(examples: Sequence[Arrays]) -> Sequence[Arrays]:
        if not all(map(is_finite, examples)):
            raise UserInputError("ONNX Runtime cannot compute its part of the network")
        return examples

    inputs = {"x": np.ones((2, 3), np.float32)}
    onnx.save(one_operator("Relu", inputs), tmp_path / "network.onnx")
    outputs, computed = with_broken(refuse, [inputs], inputs)
    assert outputs == [inputs]
    assert isinstance(computed, UserInputError)
    require_broken_stays_broken(inputs, computed, tmp_path / "network.onnx")


ROOT = Path(__file__).parent.parent
DIFFER = {"CumSum": {"nan", "infinity", "zeros"}, "ReduceMean": {"extremes"}, "RoiAlign": {"largest"}}
"""Classes of values in which operators may differ, for the reasons in docs/operators.md."""

REFUSED = ("AffineGrid", "float16")
"""ONNX Runtime itself does not load what it makes of this function with the optimisations that shapes need."""


@pytest.mark.nightly
@pytest.mark.timeout(1200)  # two thousand models are compiled
def test_operators_are_the_same_on_all_values(tmp_path: Path) -> None:
    rows = compared(tmp_path)
    assert len({row["operator"] for row in rows}) > 150
    assert sum(int(row["own"] or 0) for row in rows) > 1500


def compared(directory: Path, *arguments: str) -> list[dict[str, str]]:
    """The rows of the benchmark's table, which differ in nothing but what is known."""
    table = directory / "operators.csv"
    command = [sys.executable, str(ROOT / "benchmarks" / "operators.py"), "--table", str(table), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with table.open() as file:
        rows = list(csv.DictReader(file))
    differ = {(row["operator"], row["dtype"]): row["differs"] for row in rows if row["differs"]}
    assert {key for key, what in differ.items() if "own (" in what} <= {REFUSED}
    for (operator, dtype), what in differ.items():
        if operator in {*DIFFER, "ArgMax", "ArgMin", "BatchNormalization", "Conv", "Relu", "Softmax", "TopK"}:
            classes = {part.split(" (")[0] for part in what.split("; ")}
            assert classes <= DIFFER.get(operator, set()), f"{operator}, {dtype}: {what}"
    return rows
