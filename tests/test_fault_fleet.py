"""Servers that die, hang and lie while a tuning measures on them: every trial of the budget is measured or says why."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import TYPE_CHECKING

import mlflow
import pytest
from helpers.commands import ANSOR_MLFLOW, Finished, environment, flags, run
from helpers.fleet import KEY, Fleet, lying_server, running_fleet, wait_for
from helpers.tuner_process import Tuning, assert_gone, tuning
from test_measuring import TENSORS, local_builder, settings

from ansor_mlflow import names
from ansor_mlflow.fleet import FleetSettings, RpcRunner, build_reference_kernel
from ansor_mlflow.workers import RunJob

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.target import Target

pytestmark = [pytest.mark.faults, pytest.mark.timeout(700)]

TRIALS = 60
SHORT = {"measure_timeout_s": 20, "rpc_wait_s": 40, "min_repeat_ms": 20}
"""A server that hangs is given up soon, but no program whose server is only slow."""


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'mlflow.db'}"


@pytest.fixture
def fleet(short_path: Path) -> Iterator[Fleet]:
    with running_fleet(short_path, num_servers=2) as fleet:
        yield fleet


def tuning_on(
    fleet: Fleet, network: Path, cwd: Path, store: str, **parameters: object
) -> AbstractContextManager[Tuning]:
    return tuning(network, cwd, environment(store), **{"trials": TRIALS, **SHORT, **fleet.flags, **parameters})


def assert_whole(finished: Finished, store: str, num_trials: int = TRIALS) -> dict[str, float]:
    """Checks that every trial of the budget was measured, and returns the run's metrics."""
    assert finished.exit_code == 0, finished.stderr
    client = mlflow.MlflowClient(store)
    (found,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    assert found.data.metrics[names.TRIALS_MEASURED] == num_trials
    assert found.data.metrics["trials/ok"] >= num_trials
    return dict(found.data.metrics)


def test_a_server_that_is_killed_while_it_measures(
    fleet: Fleet, small_onnx: Path, short_path: Path, store: str
) -> None:
    with tuning_on(fleet, small_onnx, short_path / "cwd", store) as tuner:
        tuner.wait_for_rounds(2)
        wait_for(lambda: bool(fleet.servers[0].sessions()))
        fleet.servers[0].kill()
        finished = tuner.wait()
    assert_whole(finished, store)
    assert f"server {fleet.servers[0].address}" in finished.stderr


@pytest.mark.nightly
def test_all_servers_are_killed_and_another_one_comes(
    fleet: Fleet, small_onnx: Path, short_path: Path, store: str
) -> None:
    with tuning_on(fleet, small_onnx, short_path / "cwd", store) as tuner:
        tuner.wait_for_rounds(2)
        for server in fleet.servers:
            server.kill()
        wait_for(lambda: f"has 0 servers of key {KEY}" in tuner.stderr)
        fleet.add_server()
        finished = tuner.wait()
    assert_whole(finished, store)


@pytest.mark.nightly
def test_a_server_that_hangs(fleet: Fleet, small_onnx: Path, short_path: Path, store: str) -> None:
    with tuning_on(fleet, small_onnx, short_path / "cwd", store, min_repeat_ms=300, trials=120) as tuner:
        tuner.wait_for_rounds(2)
        wait_for(fleet.servers[0].is_measuring)  # one that hangs without a program may never be given another
        fleet.servers[0].hang()
        finished = tuner.wait()
    assert_whole(finished, store, num_trials=120)
    assert re.search(rf"server {fleet.servers[0].address}.* killed after [\d.]+ s", finished.stderr), finished.stderr


def test_a_server_that_lies(fleet: Fleet, small_onnx: Path, short_path: Path, store: str) -> None:
    liar = fleet.add_server(lying_server())
    fleet.servers[0].kill()
    with tuning_on(fleet, small_onnx, short_path / "cwd", store) as tuner:
        finished = tuner.wait()
    metrics = assert_whole(finished, store)
    assert re.search(
        rf"server {liar.address}( is set aside .*)?: it computes wrong results, max_rel_error=", finished.stderr
    ), finished.stderr
    assert metrics.get(f"fleet/127.0.0.1_{liar.address.port}/trials", 0) == 0


@pytest.mark.nightly
def test_a_tracker_that_is_started_again(fleet: Fleet, small_onnx: Path, short_path: Path, store: str) -> None:
    """Sessions are short, so that the tracker is needed again and again."""
    with tuning_on(fleet, small_onnx, short_path / "cwd", store, measure_timeout_s=7, rpc_session_s=14) as tuner:
        tuner.wait_for_rounds(2)
        fleet.restart_tracker()
        for server in fleet.servers:
            wait_for(lambda server=server: bool(server.sessions()))  # type: ignore[misc]
        finished = tuner.wait()
    assert_whole(finished, store)


def test_a_key_without_servers(fleet: Fleet, small_onnx: Path, short_path: Path, store: str) -> None:
    given = {"network": small_onnx, **fleet.flags, "rpc_key": "nobody", "rpc_wait_s": 12}
    started_s = time.monotonic()
    finished = run([ANSOR_MLFLOW, "tune", *flags(given)], short_path / "cwd", environment(store))
    assert finished.exit_code == 3
    assert time.monotonic() - started_s < 40
    there_is = f"the tracker at {fleet.tracker.address} has 0 servers of key nobody, 0 of them free, and of other keys"
    assert any(f"{there_is} {KEY} (2); waiting for" in line for line in finished.stderr.splitlines())
    (error,) = finished.errors
    assert error.startswith(f"Error: no server was free for 12 s (rpc_wait_s): {there_is}")


@pytest.mark.nightly
def test_an_interrupted_tuning_gives_its_servers_back(
    fleet: Fleet, small_onnx: Path, short_path: Path, store: str
) -> None:
    with tuning_on(fleet, small_onnx, short_path / "cwd", store, min_repeat_ms=300, trials=120) as tuner:
        tuner.wait_for_rounds(2)
        descendants = tuner.descendants
        os.kill(tuner.process.pid, signal.SIGINT)
        assert tuner.wait().exit_code == 130
    assert_gone(descendants, 10)
    wait_for(lambda: not any(server.sessions() for server in fleet.servers), 20)


def hostile(body: str) -> IRModule:
    """A module whose "main" does something that it should not."""
    import tvm

    return tvm.script.from_source(f"""
@I.ir_module
class Module:
    @T.prim_func(s_tir=True)
    def main(data: T.Buffer((64,), "float32"), result: T.Buffer((64,), "float32")):
        T.func_attr({{"global_symbol": "main"}})
        {body}
""")


CRASHES = 'T.evaluate(T.call_extern("int32", "abort"))'
HANGS = "while T.bool(True):\n            result[0] = data[0]"


@pytest.mark.parametrize(
    ("body", "failure"), [(CRASHES, "crashed"), pytest.param(HANGS, "timed_out", marks=pytest.mark.nightly)]
)
def test_a_program_that_ends_its_session_is_a_failed_trial_and_the_server_goes_on(
    fleet: Fleet, host_target: Target, body: str, failure: str
) -> None:
    settings_of_fleet = FleetSettings(
        tracker=fleet.tracker.address, key=KEY, wait_s=60.0, session_s=60.0, num_retries=1
    )
    brief = settings(1)
    brief = type(brief)(**{**vars(brief), "timeout_s": 2.0})
    with closing(local_builder(host_target)) as builder:
        kernel = build_reference_kernel(builder)
        bad, good = (outcome.value for outcome in builder.build([hostile(body), hostile("result[0] = data[0]")]))
        assert bad is not None
        assert good is not None
        with closing(RpcRunner(brief, settings_of_fleet, kernel)) as runner:
            outcomes = runner.run([RunJob(bad, TENSORS, task="bad"), RunJob(good, TENSORS, task="good")])
            again = runner.run([RunJob(good, TENSORS, task="good")] * 4)
            servers = runner.servers
    assert [outcome.failure for outcome in outcomes] == [failure, ""]
    assert [outcome.failure for outcome in again] == [""] * 4
    assert sum(server.num_set_aside for server in servers) == 0
