"""Outputs are compared without mercy, and contenders are timed in processes of their own, in turns."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import mlflow
import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import ansor_mlflow as am
from ansor_mlflow import flavor, names
from ansor_mlflow.errors import CorrectnessError, MachineError, UserInputError
from ansor_mlflow.lowering.lower import lower
from ansor_mlflow.measuring import timing
from ansor_mlflow.measuring.checking import TOLERANCES, Deviation, compare_outputs
from ansor_mlflow.measuring.timing import Latency, call_once, measure_in_turns
from ansor_mlflow.model.library import compile_untuned
from ansor_mlflow.model.package import CompiledNetwork
from ansor_mlflow.networks.graph import GraphBuilder
from ansor_mlflow.processes import in_child_process
from ansor_mlflow.tensors import TensorSpec

if TYPE_CHECKING:
    from tvm.target import Target

# -- outputs ---------------------------------------------------------------------------------------------------------

EXPECTED = {"a": np.array([1.0, -4.0, 2.0], np.float32), "b": np.array([[0.5]], np.float32)}


def changed(**outputs: np.ndarray) -> dict[str, np.ndarray]:
    return {**EXPECTED, **outputs}


def test_equal_outputs() -> None:
    assert compare_outputs(EXPECTED, EXPECTED) == Deviation(0.0, 0.0)


def test_errors_are_relative_to_the_largest_reference() -> None:
    difference = compare_outputs(changed(a=np.array([1.0, -4.0, 2.5], np.float32)), EXPECTED)
    assert difference == Deviation(max_abs_error=0.5, max_rel_error=0.125)


def test_the_worst_output_counts_for_each_of_the_two_errors() -> None:
    actual = {"a": EXPECTED["a"] + np.float32(0.5), "b": EXPECTED["b"] + np.float32(0.25)}
    assert compare_outputs(actual, EXPECTED) == Deviation(max_abs_error=0.5, max_rel_error=0.5)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_an_infinite_error(value: float) -> None:
    assert compare_outputs(changed(b=np.array([[value]], np.float32)), EXPECTED) == Deviation(math.inf, math.inf)


def test_an_infinity_that_both_have_is_no_error() -> None:
    """As logits have that are masked."""
    expected = {"a": np.array([-math.inf, 4.0, 2.0, math.inf], np.float32)}
    assert compare_outputs(expected, expected) == Deviation(0.0, 0.0)
    actual = {"a": np.array([-math.inf, 4.0, 3.0, math.inf], np.float32)}
    assert compare_outputs(actual, expected) == Deviation(1.0, 0.25)
    only = {"a": np.full(3, -math.inf, np.float32)}
    assert compare_outputs(only, only) == Deviation(0.0, 0.0)
    assert compare_outputs({"a": -only["a"]}, only) == Deviation(math.inf, math.inf)


def test_an_output_of_another_shape_is_an_infinite_error() -> None:
    assert compare_outputs(changed(b=np.array([0.5], np.float32)), EXPECTED) == Deviation(math.inf, math.inf)


def test_a_missing_output_is_an_infinite_error() -> None:
    assert compare_outputs({"a": EXPECTED["a"]}, EXPECTED) == Deviation(math.inf, math.inf)


def test_what_is_near_zero_is_not_asked_for_more_digits_than_there_are() -> None:
    """One value from three kernels: TVM's, and two of ONNX Runtime's."""
    compiled, optimized, plain = ({"a": np.array([value], np.float32)} for value in (5.9952e-7, 6.26e-7, 5.66e-7))
    for expected in (optimized, plain):
        assert compare_outputs(compiled, expected).max_rel_error < TOLERANCES["float32"] / 10
    wrong = {"a": np.array([1e-4], np.float32)}
    assert compare_outputs(wrong, plain).max_rel_error > 10 * TOLERANCES["float32"]


def test_a_reference_of_zeros() -> None:
    zeros = {"a": np.zeros(3, np.float32)}
    assert compare_outputs(zeros, zeros) == Deviation(0.0, 0.0)
    assert compare_outputs({"a": np.full(3, 0.25, np.float32)}, zeros) == Deviation(0.25, 25.0)


def test_an_empty_output_has_no_error() -> None:
    empty = {"a": np.zeros((0, 4), np.float32)}
    assert compare_outputs(empty, empty) == Deviation(0.0, 0.0)


def test_integers_are_compared_as_numbers() -> None:
    """Unsigned integers would wrap around."""
    actual, expected = {"a": np.array([0], np.uint8)}, {"a": np.array([200], np.uint8)}
    assert compare_outputs(actual, expected) == Deviation(200.0, 1.0)
    assert compare_outputs({"a": np.array([True])}, {"a": np.array([False])}).max_abs_error == 1


# -- the inputs of the user ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def right_for_small_values(
    compiled_network: CompiledNetwork, host_target: Target, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A model whose library computes min(max(x, 0), 9), and whose network says 99; (2, 3) -> (2, 3)."""
    directory = tmp_path_factory.mktemp("clip")
    builder = GraphBuilder(seed=0)
    limits = [builder.weight(name, np.array(value)) for name, value in (("least", 0), ("most", 9))]
    builder.node("Clip", "y", builder.input("x", (2, 3)), *limits)
    model = builder.build("clip", {"y": (2, 3)})
    compile_untuned(lower(model, host_target), host_target, directory / "model.so")
    model.graph.initializer[1].CopyFrom(numpy_helper.from_array(np.array(99, np.float32), "most"))
    onnx.save(model, directory / "clip.onnx")
    values = {"inputs": (TensorSpec("x", (2, 3), "float32"),), "outputs": (TensorSpec("y", (2, 3), "float32"),)}
    files = {"library": directory / "model.so", "network": directory / "clip.onnx"}
    flavor.save_model(replace(compiled_network, **values, **files), str(directory / "model"), code_paths=[])
    return directory / "model"


@pytest.mark.nightly
def test_outputs_are_checked_on_all_rows_of_the_user(
    right_for_small_values: Path, new_experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = np.ones((5, 3), np.float32)
    np.save("rows.npy", rows)
    metrics = am.evaluate(
        model_uri=str(right_for_small_values), data="rows.npy", turns=1, measure_s=0.1, rivals="none"
    ).metrics
    assert metrics[names.MAX_REL_ERROR] == 0
    assert metrics[names.LATENCY_MS] > 0
    rows[4] = 50
    np.save("rows.npy", rows)
    with pytest.raises(CorrectnessError, match=r"ONNX Runtime's by max_rel_error=0\.82"):
        am.evaluate(model_uri=str(right_for_small_values), data="rows.npy")


def test_data_that_is_not_for_the_model(
    right_for_small_values: Path, new_experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserInputError, match=r"data=rows.npy: there is no such file; give a .npz"):
        am.evaluate(model_uri=str(right_for_small_values), data="rows.npy")
    assert mlflow.search_runs([new_experiment], output_format="list") == []
    np.save("rows.npy", np.ones((5, 4), np.float32))
    with pytest.raises(UserInputError, match=r"it holds x: float32 \(5, 4\); it must hold x: float32 \(2, 3\),"):
        am.evaluate(model_uri=str(right_for_small_values), data="rows.npy")


def test_a_pipeline_refuses_data_before_it_tunes(
    small_onnx: Path, new_experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserInputError, match=r"data=rows.npy: there is no such file"):
        am.pipeline(str(small_onnx), data="rows.npy")
    np.save("rows.npy", np.ones((5, 4), np.float32))
    with pytest.raises(UserInputError, match=r"it must hold data: float32 \(1, 3, 16, 16\)"):
        am.pipeline(str(small_onnx), data="rows.npy")
    assert mlflow.search_runs([new_experiment], output_format="list") == []


# -- processes: what they call is found by its name in this module, which the child imports ---------------------------


def report_pid(log: Path, name: str, seconds: float) -> Callable[[], None]:
    """Prepares a call that sleeps; notes who prepared it."""
    with log.open("a") as file:
        file.write(f"{name} {os.getpid()}\n")
    return partial(time.sleep, seconds)


def die() -> Callable[[], None]:
    os._exit(9)


def die_when_called() -> Callable[[], None]:
    return partial(os._exit, 9)


def prepare_badly() -> Callable[[], None]:
    raise ValueError("the network cannot be prepared")


def make_pid_call() -> Callable[[], int]:
    return os.getpid


def test_contenders_take_turns_in_fresh_processes(tmp_path: Path) -> None:
    log = tmp_path / "log"
    contenders = {name: partial(report_pid, log, name, s) for name, s in (("fast", 0.002), ("slow", 1.1))}
    latencies = measure_in_turns(contenders, turns=2, measure_s=0.5)
    names, pids = zip(*(line.split() for line in log.read_text().splitlines()), strict=True)
    assert [name for name, _ in groupby(names)] == ["fast", "slow", "fast", "slow"]  # some again, if disturbed
    assert len({*pids, str(os.getpid())}) == len(pids) + 1
    assert 2.0 <= latencies["fast"].median_ms < 50
    assert 50 < len(latencies["fast"].samples_ms) <= 2 * 0.5 / 0.002
    assert latencies["slow"].median_ms >= 1100
    assert len(latencies["slow"].samples_ms) == 2  # a slow call is measured once a turn


def test_summary_of_samples() -> None:
    latency = Latency(np.arange(101.0))
    np.testing.assert_allclose([latency.median_ms, latency.p90_ms, latency.std_ms], [50.0, 90.0, np.arange(101).std()])


def test_a_call_runs_in_another_process() -> None:
    assert in_child_process(call_once, make_pid_call) != os.getpid()


@pytest.mark.parametrize("make_call", [die, die_when_called])
def test_a_process_that_dies_is_an_error_of_the_machine(make_call: Callable[[], Callable[[], None]]) -> None:
    with pytest.raises(MachineError, match=r"the process that runs the network died \(.+\); free memory"):
        measure_in_turns({"dying": make_call}, turns=1)


def test_an_exception_in_the_process_is_raised_here() -> None:
    with pytest.raises(ValueError, match="the network cannot be prepared"):
        in_child_process(call_once, prepare_badly)


def test_a_slow_call_is_timed_when_it_is_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_SLOW_S", 0.5)
    pauses_s = iter([0.6, 0.0])
    (sample_s,) = timing.measure_call(lambda: time.sleep(next(pauses_s)))
    assert sample_s < 0.5
