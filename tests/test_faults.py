"""What is left when processes are killed and servers go away in the middle of a tuning."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import mlflow
import pytest
from commands import Finished, environment
from mlflow.entities import Run
from servers import mlflow_server, s3_server
from tuner_process import Tuning, assert_gone, assert_readable, kill, tuning

from ansor_mlflow import names

pytestmark = pytest.mark.faults


@pytest.fixture
def store(tmp_path: Path) -> str:
    """An sqlite store with an experiment 1."""
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    mlflow.MlflowClient(uri).create_experiment("faults", (tmp_path / "artifacts").as_uri())
    return uri


def only_run(store: str) -> Run:
    (run,) = mlflow.MlflowClient(store).search_runs(["1"])
    return run


def local_environment(store: str) -> dict[str, str]:
    return environment(store, {"MLFLOW_EXPERIMENT_ID": "1"})


# -- the tuner -------------------------------------------------------------------------------------------------------


def press_ctrl_c(tuner: Tuning) -> None:
    """Signals every process of the job, as a terminal does."""
    os.killpg(tuner.process.pid, signal.SIGINT)


def terminate(tuner: Tuning) -> None:
    """Signals the tuner, as a service manager does."""
    tuner.process.terminate()


@pytest.mark.parametrize("interrupt", [press_ctrl_c, terminate])
def test_an_interrupt_ends_the_run_as_killed_with_its_records(
    small_onnx: Path, store: str, tmp_path: Path, interrupt: Callable[[Tuning], None]
) -> None:
    with tuning(small_onnx, tmp_path / "cwd", local_environment(store), trials=5000) as tuner:
        tuner.wait_for_rounds(4)
        descendants = tuner.descendants
        interrupt(tuner)
        finished = tuner.wait(30)
        assert_gone(descendants, 5)
    assert finished.exit_code == 130
    assert "Traceback" not in finished.stderr
    run = only_run(store)
    assert run.info.status == "KILLED"
    assert run.data.tags[names.TAG_ERROR] == "interrupted by the user"
    assert run.data.tags[names.TAG_EXIT_CODE] == "130"
    assert run.data.tags[names.TAG_STOP_REASON] == "interrupted"
    uploaded = tmp_path / "artifacts" / run.info.run_id / "artifacts"
    assert_readable(uploaded / names.RECORDS_DIR, tmp_path / "best", min_trials=4)
    table = json.loads((uploaded / names.TRIALS_TABLE).read_text())
    assert len(table["data"]) == run.data.metrics[names.TRIALS_MEASURED] >= 4


@pytest.mark.parametrize("num_threads", [1, 2])
def test_workers_killed_from_outside_cost_their_trials_only(
    small_onnx: Path, store: str, tmp_path: Path, num_threads: int
) -> None:
    """As the system does when memory runs out."""
    parameters = {"trials": 40, "num_threads": num_threads, "min_repeat_ms": 200}
    with tuning(small_onnx, tmp_path / "cwd", local_environment(store), **parameters) as tuner:
        for delay_s in (0.0, 0.2, 0.4, 0.6, 0.8):  # while they search, build or measure
            tuner.wait_for_rounds(tuner.num_rounds + 1)
            time.sleep(delay_s)
            for worker in tuner.workers:
                kill(worker)
        finished = tuner.wait(180)
    assert finished.exit_code == 0, finished.stderr
    run = only_run(store)
    assert run.info.status == "FINISHED"
    assert run.data.metrics[names.TRIALS_MEASURED] == 40
    assert run.data.metrics["trials/ok"] >= 20


# -- servers ---------------------------------------------------------------------------------------------------------


def assert_machine_error(finished: Finished, message: str) -> str:
    """Asserts that a command ended with one line about its environment, and returns the line without its prefix."""
    assert finished.exit_code == 3, finished.stderr
    (error,) = finished.errors
    assert re.search(message, error)
    assert "Traceback" not in finished.stderr
    return error.removeprefix("Error: ")


def test_tracking_server_that_goes_away(small_onnx: Path, tmp_path: Path) -> None:
    with (
        mlflow_server(tmp_path / "server") as server,
        tuning(small_onnx, tmp_path / "cwd", environment(server.url), trials=5000) as tuner,
    ):
        tuner.wait_for_rounds(4)
        descendants = tuner.descendants
        server.stop()
        finished = tuner.wait(120)
        assert_gone(descendants, 5)
        assert_machine_error(finished, "cannot log the metrics of a round: .*; check MLFLOW_TRACKING_URI")
        assert_readable(tuner.records, tmp_path / "best", min_trials=4)


def test_s3_server_that_goes_away(small_onnx: Path, tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    mlflow.MlflowClient(uri).create_experiment("faults", "s3://bucket/faults")
    with s3_server(tmp_path / "s3", "bucket") as s3:
        env = environment(uri, {**s3.environment(), "MLFLOW_EXPERIMENT_ID": "1"})
        with tuning(small_onnx, tmp_path / "cwd", env, trials=24) as tuner:
            tuner.wait_for_rounds(4)
            s3.stop()
            finished = tuner.wait(180)
            message = assert_machine_error(finished, "the S3 artifact store answered: Could not connect")
            assert_readable(tuner.records, tmp_path / "best", min_trials=24)
    run = only_run(uri)
    assert run.info.status == "FAILED"
    assert run.data.tags[names.TAG_ERROR] == message
    assert run.data.tags[names.TAG_EXIT_CODE] == "3"
