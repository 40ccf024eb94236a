"""Functions are computed in vectors: by no call for an element, within bounds, and right at the ends of the range."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from helpers.one_operator import assert_computes_the_same, one_operator, run_lowered, run_onnxruntime
from onnx import TensorProto, helper, numpy_helper

from ansor_mlflow.codegen import pass_config
from ansor_mlflow.device.device import Device, fingerprint, why_not_runnable
from ansor_mlflow.device.targets import resolve_target
from ansor_mlflow.lowering.lower import lower
from ansor_mlflow.model.library import compile_tuned, compile_untuned
from ansor_mlflow.parameters import TuneOptions
from ansor_mlflow.records.store import RecordPair, distill
from ansor_mlflow.tuning.job import TuningJob, tune_job
from ansor_mlflow.workers.builder import LocalBuilder

if TYPE_CHECKING:
    from tvm.runtime import Module
    from tvm.target import Target

OTHERS = ["llvm -mcpu=x86-64", "llvm -mcpu=haswell", "llvm -mcpu=skylake-avx512"]
LANES = 16
STEP = 4099
"""Of the float32 numbers in the order of their bits, every one so far from the one before is tried."""
SPECIAL = [0.0, np.inf, np.nan, 2.0**-149, 1e-39, 2.0**-126, 1.0, 87.3, 87.4, 88.72, 88.73, 103.9, 104.1, 3.4e38]
SMALLEST_NORMAL = 2.0**-126
FUNCTIONS: dict[str, tuple[Callable[[np.ndarray], np.ndarray], float]] = {
    "erf": (np.vectorize(math.erf, otypes=[np.float64]), 5e-7),
    "exp": (np.exp, 1e-7),
    "log": (np.log, 1e-7),
    "sigmoid": (lambda x: 1 / (1 + np.exp(-x)), 2e-7),
    "tanh": (np.tanh, 5e-7),
}
"""What each computes, in float64, and the bound of its relative error."""
CALLS = {"erff", "expf", "logf", "powf", "tanhf"}
"""Functions of the C library."""


def whole_range() -> np.ndarray:
    numbers = np.arange(0, 2**32, STEP, dtype=np.uint64).astype(np.uint32).view(np.float32)
    special = np.array(SPECIAL, np.float32)
    numbers = np.concatenate([special, -special, numbers])
    return numbers[: len(numbers) // LANES * LANES]


def elementwise(name: str, length: int, target: Target, dtype: str = "float32", *, vectorized: bool = True) -> Module:
    """A function of `length` elements, in a loop that is vectorised while scheduling, or left to the compiler."""
    import tvm
    from tvm import te

    data = te.placeholder((length,), dtype)
    result = te.compute((length,), lambda index: getattr(te, name)(data[index]), "result")
    schedule = tvm.s_tir.Schedule(te.create_prim_func([data, result]))
    if vectorized:
        (loop,) = schedule.get_loops(schedule.get_sblock("result"))
        schedule.vectorize(schedule.split(loop, [None, LANES])[1])
    with tvm.transform.PassContext(config=pass_config(target)):
        return tvm.compile(schedule.mod, target)


def call(compiled: Module, data: np.ndarray) -> np.ndarray:
    import tvm

    result = tvm.runtime.empty(data.shape, str(data.dtype))
    compiled(tvm.runtime.tensor(data), result)
    return result.numpy()


@pytest.mark.parametrize("spec", ["auto", *(pytest.param(spec, marks=pytest.mark.nightly) for spec in OTHERS)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_error_is_within_its_bound_over_the_whole_range(name: str, spec: str) -> None:
    exactly, bound = FUNCTIONS[name]
    data, target = whole_range(), resolve_target(spec, 1)
    module = elementwise(name, len(data), target)
    if why_not_runnable(fingerprint(target, 1)):
        return  # it was compiled, which is all that can be done here
    result = call(module, data)
    with np.errstate(all="ignore"):
        exact = exactly(data.astype(np.float64))
        expected = exact.astype(np.float32)
    np.testing.assert_array_equal(np.isnan(result), np.isnan(expected))
    np.testing.assert_array_equal(np.isinf(result), np.isinf(expected))
    np.testing.assert_array_equal(np.signbit(result)[~np.isnan(result)], np.signbit(expected)[~np.isnan(result)])
    normal = np.isfinite(expected) & (abs(exact) >= SMALLEST_NORMAL)
    assert np.max(abs(result[normal] / exact[normal] - 1)) <= bound
    below = np.isfinite(expected) & ~normal
    is_coarse = name in ("exp", "sigmoid")
    assert np.max(abs(result[below] - exact[below]), initial=0) <= (SMALLEST_NORMAL if is_coarse else 2.0**-149)
    assert name != "exp" or not np.any((result > 0) & (result < SMALLEST_NORMAL)), "a product of each takes 150 cycles"


@pytest.mark.parametrize("name", ["erf", "sigmoid", "tanh"])
def test_no_result_is_outside_of_the_function_s_range(name: str, host_target: Target) -> None:
    data = np.linspace(-20, 20, 2**20, dtype=np.float32)
    result = call(elementwise(name, len(data), host_target), data)
    assert (result.min(), result.max()) == (-1 if name != "sigmoid" else pytest.approx(2e-9, rel=0.1), 1)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_16_bits_are_the_nearest_to_the_exact_result(name: str, dtype: type, host_target: Target) -> None:
    """Nearly always: what is computed in float32 may be rounded a second time the other algorithm, by one step."""
    data = np.arange(2**16, dtype=np.uint16).view(dtype)
    result = call(elementwise(name, len(data), host_target, np.dtype(dtype).name), data)
    with np.errstate(all="ignore"):
        expected = FUNCTIONS[name][0](data.astype(np.float64)).astype(np.float32).astype(dtype)
    result, expected = result.astype(np.float32), expected.astype(np.float32)
    np.testing.assert_array_equal(np.isnan(result), np.isnan(expected))
    numbers = np.isfinite(expected) & (abs(expected) >= SMALLEST_NORMAL)
    np.testing.assert_array_equal(np.isinf(result), np.isinf(expected))
    differences = abs(result[numbers] - expected[numbers]) / abs(expected[numbers])
    assert np.max(differences) <= 2 * float(ml_dtypes.finfo(dtype).eps)
    assert np.mean(differences > 0) < 1e-3


@pytest.mark.parametrize("exponent", [0.5, 0.75, 2.0, 3.0])
def test_a_power_without_a_call(exponent: float, host_target: Target) -> None:
    data = {"x": np.array([*np.linspace(-5, 5, 1022), 0.0, -0.0, np.inf, -np.inf, 3e38, 1e-38], np.float32)}
    model = one_operator("Pow", data, {"exponent": np.float32(exponent)})
    lowered = assert_computes_the_same(model, host_target, data)
    assert calls_in(lowered.mod, host_target) == set()
    (result,) = run_lowered(lowered, host_target, data)
    assert math.copysign(1, result[1023]) == math.copysign(1, math.pow(-0.0, exponent))


def test_another_power(host_target: Target) -> None:
    data = {"x": np.linspace(0, 5, 64, dtype=np.float32), "exponent": np.linspace(-1, 4, 64, dtype=np.float32)}
    assert_computes_the_same(one_operator("Pow", data), host_target, data)
    data = {"x": np.linspace(0, 5, 64, dtype=np.float32)}
    assert_computes_the_same(one_operator("Pow", data, {"exponent": np.float32(2.5)}), host_target, data)


def test_64_bits_are_left_to_the_c_library(host_target: Target) -> None:
    data = np.linspace(-5, 5, 64)
    np.testing.assert_allclose(call(elementwise("erf", 64, host_target, "float64"), data), FUNCTIONS["erf"][0](data))


def calls_in(mod: Any, target: Target, config: dict[str, bool] | None = None) -> set[str]:
    import tvm

    with tvm.transform.PassContext(config=pass_config(target) if config is None else config):
        compiled = tvm.compile(mod, target)
    return CALLS & set(re.findall(r"\w+", compiled.mod.imports[0].inspect_source("s")))


ACTIVATIONS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "Elu": ("Elu", 17, {}),
    "Erf": ("Erf", 17, {}),
    "Exp": ("Exp", 17, {}),
    "Gelu": ("Gelu", 20, {}),
    "Gelu by tanh": ("Gelu", 20, {"approximate": "tanh"}),
    "Log": ("Log", 17, {}),
    "LogSoftmax": ("LogSoftmax", 17, {}),
    "Mish": ("Mish", 18, {}),
    "Selu": ("Selu", 17, {}),
    "Sigmoid": ("Sigmoid", 17, {}),
    "Softmax": ("Softmax", 17, {}),
    "Softplus": ("Softplus", 17, {}),
    "Tanh": ("Tanh", 17, {}),
}


def activation(case: str) -> onnx.ModelProto:
    op_type, opset, attributes = ACTIVATIONS[case]
    return one_operator(op_type, {"x": np.zeros((16, 64), np.float32)}, opset=opset, **attributes)


@pytest.mark.parametrize("case", ACTIVATIONS)
def test_an_activation_is_computed_as_by_onnxruntime_and_without_a_call(case: str, host_target: Target) -> None:
    data = {"x": 4 * np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)}
    if case == "Log":
        data["x"] = abs(data["x"])
    lowered = assert_computes_the_same(activation(case), host_target, data)
    assert calls_in(lowered.mod, host_target) == set()


@pytest.mark.parametrize("masked", [0, 1, 63, 64])
def test_softmax_with_a_mask(masked: int, host_target: Target) -> None:
    """What is masked has no share; a row that is masked altogether gives what ONNX Runtime gives."""
    data = {"x": np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)}
    data["x"][3, :masked] = -np.inf
    (result,) = run_lowered(lower(activation("Softmax"), host_target), host_target, data)
    (expected,) = run_onnxruntime(activation("Softmax"), data)
    np.testing.assert_allclose(result, expected, rtol=1e-6)
    assert (result[3, :masked] == 0).all() or masked == 64


def called_by(library: Path) -> set[str]:
    return {name for name in CALLS if name.encode() in library.read_bytes().split(b"\0")}


@pytest.fixture(scope="module")
def attention() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    weights = {"first": rng.normal(size=(32, 48)), "second": rng.normal(size=(48, 32))}
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "first"], ["scores"]),
            helper.make_node("Softmax", ["scores"], ["shares"]),
            helper.make_node("MatMul", ["shares", "second"], ["hidden"]),
            helper.make_node("Gelu", ["hidden"], ["y"]),
        ],
        "attention",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (16, 32))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (16, 32))],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()],
    )
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 20)])


@pytest.mark.nightly
def test_tuned_and_untuned_libraries_call_no_function(
    attention: onnx.ModelProto, host_target: Target, tmp_path: Path
) -> None:
    import tvm

    lowered = lower(attention, host_target)
    compile_untuned(lowered, host_target, tmp_path / "untuned.so")
    device = Device.of(host_target, 1)
    options = TuneOptions(trials=16, trials_per_task=4, strategy="random", cost_model="none", min_repeat_ms=0)
    job = TuningJob(network="attention", lowered=lowered, device=device, records=tmp_path / "records")
    tune_job(job, options, options)
    distill(RecordPair.in_directory(tmp_path / "records"), tmp_path / "best", device.fingerprint.target)
    coverage = compile_tuned(lowered, host_target, tmp_path / "best", tmp_path / "tuned.so")
    assert coverage.task_share == 1
    data = {"x": np.random.default_rng(1).normal(size=(16, 32)).astype(np.float32)}
    (expected,) = run_onnxruntime(attention, data)
    for library in (tmp_path / "untuned.so", tmp_path / "tuned.so"):
        assert called_by(library) == set()
        machine = tvm.relax.VirtualMachine(tvm.runtime.load_module(str(library)), tvm.cpu())
        np.testing.assert_allclose(machine["main"](tvm.runtime.tensor(data["x"])).numpy(), expected, atol=1e-5)


def test_candidates_of_other_tuners_are_as_tvm_compiles_them(host_target: Target) -> None:
    import tvm
    from tvm import te

    data = te.placeholder((64,))
    program = tvm.IRModule({"main": te.create_prim_func([data, te.compute((64,), lambda index: te.erf(data[index]))])})
    for as_in_models, expected in ((True, set()), (False, {"erff"})):
        builder = LocalBuilder(host_target, max_workers=1, timeout_s=60, as_in_models=as_in_models)
        with contextlib.closing(builder):
            (outcome,) = builder.build([program])
            assert outcome.value, outcome.error
            assert called_by(outcome.value) == expected


def test_another_architecture(attention: onnx.ModelProto) -> None:
    target = resolve_target("llvm -mtriple=aarch64-linux-gnu -mcpu=cortex-a72", 4)
    mod = lower(attention, target).mod
    assert calls_in(mod, target, config={}) == {"erff", "expf"}
    assert calls_in(mod, target) == set()


def test_graphics_processors_have_functions_of_their_own() -> None:
    assert pass_config(resolve_target("cuda -arch=sm_90", 1)) == {}
