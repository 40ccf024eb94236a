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
from typing import TYPE_CHECKING, Any

import mlflow
import numpy as np
import onnx
import pytest
from helpers.contenders import die, die_when_called, report_pid
from onnx import numpy_helper

import ansor_mlflow as am
from ansor_mlflow import flavor, names
from ansor_mlflow.errors import CorrectnessError, MachineError, UserInputError
from ansor_mlflow.lowering.lower import lower
from ansor_mlflow.measuring import (
    QUANTIZED_TOLERANCE,
    TOLERANCES,
    Deviation,
    Latency,
    allowed_error,
    compare_outputs,
    measure_in_turns,
    time_first_calls,
    timing,
)
from ansor_mlflow.model import CompiledNetwork, compile_untuned
from ansor_mlflow.networks.graph import GraphBuilder
from ansor_mlflow.tensors import TensorSpec

if TYPE_CHECKING:
    from tvm.target import Target

QUICK = {"turns": 1, "measure_s": 0.1, "rivals": "none", "baseline": "none"}


EXPECTED = {"a": np.array([1.0, -4.0, 2.0], np.float32), "b": np.array([[0.5]], np.float32)}


MASKED = {"a": np.array([-math.inf, 4.0, 2.0, math.inf], np.float32)}
SHORT = np.array([0.5], np.float32)


@pytest.mark.parametrize(
    ("actual", "expected", "deviation"),
    [
        (EXPECTED, EXPECTED, (0, 0)),
        ({**EXPECTED, "a": np.array([1.0, -4.0, 2.5], np.float32)}, EXPECTED, (0.5, 0.125)),
        ({"a": EXPECTED["a"] + np.float32(0.5), "b": EXPECTED["b"] + np.float32(0.25)}, EXPECTED, (0.5, 0.5)),
        ({**EXPECTED, "b": np.array([[math.nan]], np.float32)}, EXPECTED, (math.inf, math.inf)),
        ({**EXPECTED, "b": np.array([[-math.inf]], np.float32)}, EXPECTED, (math.inf, math.inf)),
        ({**EXPECTED, "b": SHORT}, EXPECTED, (math.inf, math.inf)),
        ({"a": EXPECTED["a"]}, EXPECTED, (math.inf, math.inf)),
        ({"a": np.zeros(3)}, {"a": np.zeros(3)}, (0, 0)),
        ({"a": np.full(3, 0.25)}, {"a": np.zeros(3)}, (0.25, 25)),
        ({"a": np.zeros((0, 4))}, {"a": np.zeros((0, 4))}, (0, 0)),
        ({"a": np.array([0], np.uint8)}, {"a": np.array([200], np.uint8)}, (200, 1)),  # which would wrap around
        ({"a": np.array([True])}, {"a": np.array([False])}, (1, 100)),
        (MASKED, MASKED, (0, 0)),
        ({"a": np.array([-math.inf, 4, 3, math.inf])}, MASKED, (1, 0.25)),
        ({"a": np.full(3, -math.inf)}, {"a": np.full(3, -math.inf)}, (0, 0)),
        ({"a": np.full(3, math.inf)}, {"a": np.full(3, -math.inf)}, (math.inf, math.inf)),
    ],
    ids=[
        *("equal", "relative to the largest", "the worst output counts", "not a number", "infinite", "another shape"),
        *("missing", "zeros", "beside zeros", "empty", "unsigned", "booleans", "masked logits", "beside infinities"),
        *("infinities alone", "the other infinity"),
    ],
)
def test_outputs_are_compared(actual: Any, expected: Any, deviation: tuple[float, float]) -> None:
    assert compare_outputs(actual, expected) == Deviation(*deviation)


def test_what_is_near_zero_is_not_asked_for_more_digits_than_there_are() -> None:
    """One value from three kernels: TVM's, and two of ONNX Runtime's."""
    compiled, optimized, plain = ({"a": np.array([value], np.float32)} for value in (5.9952e-7, 6.26e-7, 5.66e-7))
    for expected in (optimized, plain):
        assert compare_outputs(compiled, expected).max_rel_error < TOLERANCES["float32"] / 10
    wrong = {"a": np.array([1e-4], np.float32)}
    assert compare_outputs(wrong, plain).max_rel_error > 10 * TOLERANCES["float32"]


def test_a_network_that_loses_digits_in_any_runtime_may_be_off_by_them(tmp_path: Path) -> None:
    """1000.1 - 1000 is 0.09998, or 0.09991 where one of them ends in another bit."""
    builder = GraphBuilder(seed=0)
    builder.node("ReduceSum", "y", builder.input("x", (1, 2)), keepdims=0)
    onnx.save(builder.build("sum", {"y": ()}), tmp_path / "sum.onnx")
    cancelling, adding = ([{"x": np.array([[1000.1, value]], np.float32)}] for value in (-1000.0, 1000.0))
    tolerance = TOLERANCES["float32"]
    allowed = partial(allowed_error, network=tmp_path / "sum.onnx", dtype="float32", num_threads=1)
    assert allowed(5 * tolerance, "auto", examples=cancelling) > 5 * tolerance
    assert allowed(5 * tolerance, "auto", examples=adding) == tolerance
    assert allowed(5 * tolerance, 2e-4, examples=cancelling) == 2e-4  # what a user gives is what holds
    assert allowed(20 * tolerance, "auto", examples=cancelling) == tolerance  # that is no loss of digits


def test_a_network_that_rounds_to_few_steps_may_be_off_by_one_in_any_runtime(tmp_path: Path) -> None:
    """Half-way between two of three steps, the last digit decides for the upper or the lower one."""
    builder = GraphBuilder(seed=0)
    step, zero = builder.constant("step", np.float32(0.4)), builder.constant("zero", np.uint8(0))
    levels = builder.node("QuantizeLinear", "levels", builder.input("x", (1,)), step, zero)
    builder.node("DequantizeLinear", "y", levels, step, zero)
    onnx.save(builder.build("steps", {"y": (1,)}), tmp_path / "steps.onnx")
    between, at_a_step = ([{"x": np.array([value], np.float32)}] for value in (0.6, 0.8))
    allowed = partial(allowed_error, network=tmp_path / "steps.onnx", num_threads=1, tolerance="auto")
    assert allowed(0.2, dtype="float32", examples=between) == pytest.approx(0.3)
    assert allowed(0.2, dtype="float32", examples=at_a_step) == QUANTIZED_TOLERANCE
    assert allowed(0.4, dtype="float32", examples=between) == QUANTIZED_TOLERANCE
    assert allowed(0.2, dtype="bfloat16", examples=between) == QUANTIZED_TOLERANCE


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
    result = am.evaluate(
        model_uri=str(right_for_small_values), data="rows.npy", turns=1, measure_s=0.1, rivals="none", baseline="none"
    )
    (given,) = mlflow.get_run(result.run_id).inputs.dataset_inputs
    assert given.dataset.name == "rows.npy"
    metrics = result.metrics
    assert metrics[names.MAX_REL_ERROR] == 0
    assert metrics[names.LATENCY_MS] > 0
    assert names.UNTUNED_LATENCY_MS not in metrics
    rows[4] = 50
    np.save("rows.npy", rows)
    with pytest.raises(CorrectnessError, match=r"ONNX Runtime's by max_rel_error=0\.82"):
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


def test_a_very_slow_call_is_timed_once_or_ended(tmp_path: Path) -> None:
    latency = time_first_calls(partial(report_pid, tmp_path / "log", "slow", 0.7), 60)
    assert len(latency.samples_ms) == 1
    assert latency.median_ms >= 700
    assert len(time_first_calls(partial(report_pid, tmp_path / "log", "fast", 0.01), 60).samples_ms) > 3
    with pytest.raises(MachineError, match=r"has 0\.5 s for its calls died \(SIGALRM\); give baseline=none"):
        time_first_calls(partial(report_pid, tmp_path / "log", "endless", 60), 0.5)


def test_summary_of_samples() -> None:
    latency = Latency(np.arange(101.0))
    np.testing.assert_allclose([latency.median_ms, latency.p90_ms, latency.std_ms], [50.0, 90.0, np.arange(101).std()])


@pytest.mark.parametrize("make_call", [die, die_when_called])
def test_a_process_that_dies_is_an_error_of_the_machine(make_call: Callable[[], Callable[[], None]]) -> None:
    with pytest.raises(MachineError, match=r"the process that runs the network died \(.+\); free memory"):
        measure_in_turns({"dying": make_call}, turns=1)


def test_a_slow_call_is_timed_when_it_is_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_SLOW_S", 0.5)
    pauses_s = iter([0.6, 0.0])
    (sample_s,), _ = timing.measure_watched(lambda: time.sleep(next(pauses_s)))
    assert sample_s < 0.5
