"""Fleets: servers found through a tracker measure as this host does, and each is judged by what it did."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from helpers.commands import FAST, RunCommand, flags
from helpers.fleet import KEY, Fleet, running_fleet
from helpers.runs_here import artifacts_of, newest_run
from test_measuring import TENSORS, add, local_builder, settings

from ansor_mlflow import names
from ansor_mlflow.errors import MachineError, UserInputError
from ansor_mlflow.fleet import HostPort, RpcRunner, ServerLease, build_reference_kernel, servers_by_key
from ansor_mlflow.fleet.session import FleetSettings, LeaseExpiredError, ServerSession, device_of_fleet, fleet_settings
from ansor_mlflow.fleet.tracker import Health, request_server
from ansor_mlflow.parameters import TuneOptions
from ansor_mlflow.records import read_provenance
from ansor_mlflow.trials import TrialStatus, utilisation
from ansor_mlflow.workers import RunJob

if TYPE_CHECKING:
    from tvm.target import Target

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_fleet(tmp_path_factory.mktemp("fleet"), num_servers=2) as fleet:
        yield fleet


def settings_of(fleet: Fleet, *, wait_s: float = 60.0, num_retries: int = 1) -> FleetSettings:
    return FleetSettings(
        tracker=fleet.tracker.address, key=KEY, wait_s=wait_s, session_s=300.0, num_retries=num_retries
    )


def test_an_address_is_a_host_and_a_port() -> None:
    for text, address in (("board:9190", HostPort("board", 9190)), ("[::1]:80", HostPort("::1", 80))):
        assert HostPort.parse(text, "tracker") == address
        assert str(address) == text


@pytest.mark.parametrize("text", ["", "board", "board:", ":9190", "board:port", "board:0", "board:65536", "board:-1"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(UserInputError, match=r"rpc_tracker=.*: it must be host:port, such as 127.0.0.1:9190"):
        HostPort.parse(text, "rpc_tracker")


@pytest.mark.nightly
def test_a_tracker_says_which_servers_it_has(fleet: Fleet) -> None:
    state = servers_by_key(fleet.tracker.address)[KEY]
    assert set(state.servers) == {server.address for server in fleet.servers}
    assert state.num_free <= 2


def test_a_server_that_is_not_free_is_not_waited_for(fleet: Fleet) -> None:
    started_s = time.monotonic()
    assert request_server(fleet.tracker.address, "nobody", 0.2) is None
    assert time.monotonic() - started_s < 2


def test_nothing_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = HostPort("127.0.0.1", free.getsockname()[1])
    with pytest.raises(MachineError, match=r"no tracker can be reached \(Connection refused\); start one there with"):
        servers_by_key(address)


A, B = HostPort("a", 1), HostPort("b", 2)


def test_a_server_that_fails_again_and_again_is_set_aside_for_longer_each_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = SimpleNamespace(now_s=0.0)
    health = Health(lambda: clock.now_s)
    for aside_s in (60, 120):
        health.failed(A, "it hangs")
        assert not health.is_set_aside(A)
        health.failed(A, "it hangs")
        assert health.is_set_aside(A)
        assert f"server a:1 is set aside for {aside_s} s after 2 failures in a row, the last: it hangs" in caplog.text
        clock.now_s += aside_s
        assert not health.is_set_aside(A)
    health.failed(A, "it hangs")
    health.measured(A, 1.0)
    health.failed(A, "it hangs")
    assert not health.is_set_aside(A)
    assert not health.is_set_aside(B)


def test_servers_that_disagree_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    health = Health()
    for _ in range(4):
        health.compared(A, 1e-3)
        health.compared(B, 1.4e-3)
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "server b:2 takes 1.40 times as long as a:1 for the same program" in record.message


def test_time_for_which_a_server_is_set_aside_does_not_count_as_idle() -> None:
    clock = SimpleNamespace(now_s=0.0)
    health = Health(lambda: clock.now_s)
    health.found(A)
    clock.now_s += 10
    health.measured(A, 8.0)
    health.failed(A, "gone")
    health.failed(A, "gone")
    clock.now_s += 30
    (state,) = health.states()
    assert (state.name, state.num_trials, state.num_failures, state.num_set_aside) == ("a_1", 1, 2, 1)
    assert utilisation([state]) == pytest.approx(0.8)
    assert utilisation([]) is None


@pytest.mark.nightly
def test_both_servers_measure_and_a_failure_fails_alone(fleet: Fleet, host_target: Target, tmp_path: Path) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"no library")
    with closing(local_builder(host_target)) as builder:
        kernel = build_reference_kernel(builder)
        paths = [outcome.value for outcome in builder.build([add(float(number)) for number in range(12)])]
        jobs = [RunJob(path, TENSORS, task=str(number)) for number, path in enumerate(paths) if path]
        with closing(RpcRunner(settings(1), settings_of(fleet), kernel)) as runner:
            outcomes = runner.run([*jobs[:6], RunJob(broken, TENSORS), *jobs[6:]])
            num_trials = sum(server.num_trials for server in runner.servers)
            until_s = time.monotonic() + 60
            while sum(server.num_trials > 0 for server in runner.servers) < 2:  # one may be done before the other opens
                assert time.monotonic() < until_s, runner.servers
                runner.run(jobs)
            servers = runner.servers
    assert [outcome.failure for outcome in outcomes] == [""] * 6 + ["failed"] + [""] * 6
    assert "invalid ELF header" in outcomes[6].error or "file too short" in outcomes[6].error
    assert all(outcome.value and 0 < outcome.value[0] < 1 for outcome in outcomes if not outcome.failure)
    assert num_trials == 13
    assert [server.num_failures for server in servers] == [0, 0]
    assert all(server.calibration_s and server.busy_s for server in servers)


def test_a_server_of_tvms_own_measures_too(host_target: Target, tmp_path: Path) -> None:
    with running_fleet(tmp_path, num_servers=0) as fleet, closing(local_builder(host_target)) as builder:
        fleet.add_tvm_server()
        (built,) = builder.build([add(1)])
        assert built.value is not None
        with closing(RpcRunner(settings(1), settings_of(fleet), build_reference_kernel(builder))) as runner:
            (outcome,) = runner.run([RunJob(built.value, TENSORS)])
        assert outcome.value is not None, outcome.error
        with pytest.raises(UserInputError, match=r"is one of TVM's own, which does not say what it is; give both"):
            device_of_fleet(settings_of(fleet), "auto", "auto")
        device = device_of_fleet(settings_of(fleet), "llvm -mcpu=x86-64", 1)
        assert (device.fingerprint.cpu_model, device.num_threads) == ("", 1)


def test_a_lease_that_ran_out_is_no_lost_server(fleet: Fleet) -> None:
    with closing(ServerSession(settings_of(fleet))) as session:
        with pytest.raises(LeaseExpiredError, match=f"server {fleet.servers[0].address} does not answer"):
            session.open(ServerLease(fleet.servers[0].address, "another password"))
        session.open(session.find())
        assert session.description is not None
        assert session.description.is_here


def test_a_tuning_on_a_fleet_and_what_its_run_says(
    fleet: Fleet, small_onnx: Path, run_here: RunCommand, own_directory: Path, host_target: Target
) -> None:
    given = {"network": small_onnx, "trials": 24, **FAST, **fleet.flags}
    assert run_here("tune", *flags(given)) == 0
    assert str(device_of_fleet(settings_of(fleet), "auto", "auto").target) == str(host_target)
    run = newest_run()
    assert run.data.metrics[names.TRIALS_MEASURED] == run.data.metrics[names.trials_with(TrialStatus.OK)] == 24
    assert 0 < run.data.metrics[names.FLEET_UTILISATION] <= 1
    of_servers = [names.server_metric(f"127.0.0.1_{server.address.port}", "trials") for server in fleet.servers]
    assert sum(run.data.metrics.get(name, 0) for name in of_servers) == 24
    provenance = read_provenance(artifacts_of(run.info.run_id) / names.RECORDS_DIR)
    assert provenance is not None
    assert provenance.measure["rpc_key"] == KEY
    assert "cpus" not in provenance.measure
    assert run_here("compile", "--tune-run", run.info.run_id) == 0
    coverage = json.loads((artifacts_of(newest_run().info.run_id) / names.COVERAGE_FILE).read_text())
    assert coverage["num_covered"] == coverage["num_tasks"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rpc_tracker": "127.0.0.1:9190"}, "rpc_key='': give the key of the servers at 127.0.0.1:9190"),
        ({"rpc_key": "pi4"}, "rpc_key='pi4', but no rpc_tracker; give its address, host:port"),
        (
            {"rpc_tracker": "127.0.0.1:9190", "rpc_key": "pi4", "rpc_session_s": 59},
            "rpc_session_s=59: it must be at least twice measure_timeout_s, 30",
        ),
    ],
)
def test_parameters_that_do_not_fit_together(given: dict[str, str], message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        fleet_settings(TuneOptions.model_validate(given))


def test_status_and_test_of_a_fleet(fleet: Fleet, run_here: RunCommand, capsys: pytest.CaptureFixture[str]) -> None:
    tracker = str(fleet.tracker.address)
    assert run_here("fleet", "status", "--tracker", tracker) == 0
    printed = capsys.readouterr().out
    assert all(str(server.address) in printed for server in fleet.servers)
    assert run_here("fleet", "test", "--tracker", tracker, "--key", KEY, "--json", "-") == 0
    found = json.loads(capsys.readouterr().out)
    assert {server["server"] for server in found["servers"]} == {str(server.address) for server in fleet.servers}
    assert all(server["has_own_code"] and 0 < server["calibration_ms"] < 1e3 for server in found["servers"])
    assert run_here("fleet", "test", "--tracker", tracker, "--key", "nobody", "--wait-s", "1") == 3
