"""Outputs are compared without mercy, and contenders are timed in processes of their own, in turns."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from functools import partial
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest

from ansor_mlflow.errors import MachineError
from ansor_mlflow.measuring import timing
from ansor_mlflow.measuring.comparison import Deviation, compare_outputs
from ansor_mlflow.measuring.timing import Latency, call_once, in_child_process, measure_in_turns

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


def test_an_output_of_another_shape_is_an_infinite_error() -> None:
    assert compare_outputs(changed(b=np.array([0.5], np.float32)), EXPECTED) == Deviation(math.inf, math.inf)


def test_a_missing_output_is_an_infinite_error() -> None:
    assert compare_outputs({"a": EXPECTED["a"]}, EXPECTED) == Deviation(math.inf, math.inf)


def test_a_reference_of_zeros_has_an_absolute_error_only() -> None:
    zeros = {"a": np.zeros(3, np.float32)}
    assert compare_outputs(zeros, zeros) == Deviation(0.0, 0.0)
    assert compare_outputs({"a": np.full(3, 0.25, np.float32)}, zeros) == Deviation(0.25, 0.25)


def test_an_empty_output_has_no_error() -> None:
    empty = {"a": np.zeros((0, 4), np.float32)}
    assert compare_outputs(empty, empty) == Deviation(0.0, 0.0)


def test_integers_are_compared_as_numbers() -> None:
    """Unsigned integers would wrap around."""
    actual, expected = {"a": np.array([0], np.uint8)}, {"a": np.array([200], np.uint8)}
    assert compare_outputs(actual, expected) == Deviation(200.0, 1.0)
    assert compare_outputs({"a": np.array([True])}, {"a": np.array([False])}) == Deviation(1.0, 1.0)


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
    latencies = measure_in_turns(contenders, turns=2)
    names, pids = zip(*(line.split() for line in log.read_text().splitlines()), strict=True)
    assert [name for name, _ in groupby(names)] == ["fast", "slow", "fast", "slow"]  # some again, if disturbed
    assert len({*pids, str(os.getpid())}) == len(pids) + 1
    assert 2.0 <= latencies["fast"].median_ms < 50
    assert len(latencies["fast"].samples_ms) > 100
    assert latencies["slow"].median_ms >= 1100
    assert len(latencies["slow"].samples_ms) == 2  # a slow call is measured once a turn


def test_summary_of_samples() -> None:
    latency = Latency(np.arange(101.0))
    np.testing.assert_allclose([latency.median_ms, latency.p90_ms, latency.std_ms], [50.0, 90.0, np.arange(101).std()])


def test_a_call_runs_in_another_process() -> None:
    assert in_child_process(call_once, make_pid_call) != os.getpid()


@pytest.mark.parametrize("make_call", [die, die_when_called])
def test_a_process_that_dies_is_an_error_of_the_machine(make_call: Callable[[], Callable[[], None]]) -> None:
    with pytest.raises(MachineError, match=r"a process that runs the network died \(out of memory, or a crash"):
        measure_in_turns({"dying": make_call}, turns=1)


def test_an_exception_in_the_process_is_raised_here() -> None:
    with pytest.raises(ValueError, match="the network cannot be prepared"):
        in_child_process(call_once, prepare_badly)


def test_a_slow_call_is_timed_when_it_is_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_SLOW_S", 0.02)
    pauses_s = iter([0.05, 0.0])
    (sample_s,) = timing.measure_call(lambda: time.sleep(next(pauses_s)))
    assert sample_s < 0.02
