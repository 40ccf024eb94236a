"""The log says in one line what a round brought, and in one how the tuning ended."""

from __future__ import annotations

import logging
import re

import pytest

from ansor_mlflow.trials import (
    Durations,
    StopReason,
    TaskInfo,
    TaskState,
    Trial,
    TrialStatus,
    TuningResult,
    TuningRound,
)
from ansor_mlflow.tuning.ledger import RoundLog

CRASH = Trial(step=2, task="conv", status=TrialStatus.CRASHED, error="no\nmemory")


@pytest.fixture
def state() -> TaskState:
    state = TaskState(info=TaskInfo(index=0, name="conv", weight=2, flops=1e6, workload_hash="0x1"))
    state.add(Trial(step=1, task="conv", status=TrialStatus.OK, run_s=(2e-3,)))
    return state


def line_of_round(caplog: pytest.LogCaptureFixture, state: TaskState, *trials: Trial) -> str:
    caplog.set_level(logging.INFO, logger="ansor_mlflow")
    round_ = TuningRound(
        trials=trials, task=state, tasks=(state,), total_trials=30, elapsed_s=90.0, durations=Durations()
    )
    RoundLog().round_finished(round_)
    (line,) = caplog.messages
    assert re.match(r"^ +\d+ trials +[\d.]+ s  ", line)
    return line


def line_of_end(caplog: pytest.LogCaptureFixture, state: TaskState) -> str:
    caplog.set_level(logging.INFO, logger="ansor_mlflow")
    result = TuningResult(
        tasks=(state,), total_trials=30, elapsed_s=90.0, durations=Durations(), stop_reason=StopReason.TRIALS
    )
    RoundLog().tuning_finished(result)
    (line,) = caplog.messages
    return line


def test_a_round(caplog: pytest.LogCaptureFixture, state: TaskState) -> None:
    line = line_of_round(caplog, state)
    assert line == "   30 trials   90.0 s  conv: 2000.0 µs  network: 4.000 ms  20.0/min"


def test_a_round_that_ended_its_task(caplog: pytest.LogCaptureFixture, state: TaskState) -> None:
    state.stop_reason = StopReason.PLATEAU
    line = line_of_round(caplog, state, CRASH)
    assert line.endswith("  20.0/min  ended by: plateau  (1 failed, first crashed: no memory)")


def test_the_end_without_second_measurements(caplog: pytest.LogCaptureFixture, state: TaskState) -> None:
    assert line_of_end(caplog, state) == "30 trials in 90.0 s, stopped by: trials"


def test_the_end_with_second_measurements(caplog: pytest.LogCaptureFixture, state: TaskState) -> None:
    state.confirmed_s = 2.1e-3
    assert line_of_end(caplog, state) == ("30 trials in 90.0 s, stopped by: trials; confirmed: 4.200 ms, optimism 1.05")


def test_a_busy_machine_is_said_once(caplog: pytest.LogCaptureFixture, state: TaskState) -> None:
    round_ = TuningRound(
        trials=(), task=state, tasks=(state,), total_trials=30, elapsed_s=90.0, durations=Durations(), probe_spread=2.0
    )
    log = RoundLog()
    for _ in range(3):
        log.round_finished(round_)
    busy = "other programs use the CPUs: what they disturb is measured again, which takes longer"
    assert caplog.messages.count(busy) == 1
