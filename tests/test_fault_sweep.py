"""A sweep goes on where a pipeline's process crashes, and while the tracking server is away."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import mlflow
import psutil
import pytest
from helpers.commands import ANSOR_MLFLOW, environment
from helpers.servers import free_port, mlflow_server
from helpers.sweeps import runs_of, write_sweep

from ansor_mlflow import names

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]


def pipelines_of(driver: int) -> list[psutil.Process]:
    """The processes of entries below a sweep's."""
    return [each for each in psutil.Process(driver).children() if "ansor_mlflow.processes" in " ".join(each.cmdline())]


def test_a_crash_and_a_server_that_is_away_cost_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_sweep(
        tmp_path / "s.yaml",
        {"network": ["dense:16,64,64", "dense:8,32,32"]},
        name="faults",
        defaults={"trials": 0, "rivals": "none"},
    )
    port, log = free_port(), tmp_path / "log"
    with mlflow_server(tmp_path / "server", port=port) as server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
        experiment = mlflow.MlflowClient(server.url).create_experiment("faults")
        env = environment(server.url, {"MLFLOW_EXPERIMENT_ID": experiment})
        with log.open("w") as output:
            driver = subprocess.Popen(
                [ANSOR_MLFLOW, "sweep", path], cwd=tmp_path, env=env, stdout=output, stderr=output
            )
        wait_until(lambda: runs_of(experiment, "tune"), driver, log)
        (crashed,) = pipelines_of(driver.pid)
        os.kill(crashed.pid, signal.SIGSEGV)
        wait_until(lambda: len(runs_of(experiment, "compile")) == 1, driver, log)
    time.sleep(20)
    assert driver.poll() is None, log.read_text()
    with mlflow_server(tmp_path / "server", port=port):
        assert driver.wait(400) == 0, log.read_text()
        (parent,) = runs_of(experiment, "sweep")
        finished = [each for each in runs_of(experiment, "main") if each.info.status == "FINISHED"]
        assert len({each.info.run_name for each in finished}) == len(finished) == 2
        assert (parent.info.status, parent.data.metrics[names.SWEEP_DONE]) == ("FINISHED", 2)
        assert not [each for each in runs_of(experiment, "main") if each.info.status == "RUNNING"]
    assert "the process that tunes dense:16,64,64 died" in log.read_text()


def wait_until(condition: object, driver: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + 200
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline_s, log.read_text()
        assert driver.poll() is None, log.read_text()
        time.sleep(0.2)
