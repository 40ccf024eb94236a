"""What is left when processes are killed and servers go away in the middle of a tuning."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import mlflow
import pytest
from commands import ANSOR_MLFLOW, Finished, environment, run
from mlflow.entities import Run
from servers import SECRET_KEY, free_port, mlflow_server, s3_server
from tuner_process import Tuning, assert_gone, assert_readable, kill, tuning

from ansor_mlflow import names
from ansor_mlflow.records import PARTS_DIR, RECORD_FILE

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


# -- resuming --------------------------------------------------------------------------------------------------------


def assert_exactly(run: Run, artifacts: Path, num_trials: int, scratch: Path) -> None:
    """Asserts that a run has so many trials, each measured once, on one axis without a gap."""
    assert_complete(run, artifacts, num_trials, scratch)
    records = [
        json.loads(line)[1][0] for line in (artifacts / names.RECORDS_DIR / RECORD_FILE).read_text().splitlines()
    ]
    assert len(records) == num_trials
    table = json.loads((artifacts / names.TRIALS_TABLE).read_text())
    assert [row[table["columns"].index("step")] for row in table["data"]] == list(range(1, num_trials + 1))


def test_a_tuning_that_is_killed_at_random_moments_and_resumed_has_exactly_its_trials(
    small_onnx: Path, store: str, tmp_path: Path
) -> None:
    """Each time on another machine, as it were: nothing is left of it but what the run has."""
    draw = random.Random(0)
    env, run_id, trials = local_environment(store), "", 150
    for attempt in range(20):
        parameters = {"trials": trials, **({"resume_run": run_id} if run_id else {})}
        with tuning(small_onnx, tmp_path / f"cwd{attempt}", env, **parameters) as tuner:
            tuner.wait_for_rounds(1)
            run_id = only_run(store).info.run_id
            time.sleep(draw.uniform(0, 1.5))
            if tuner.process.poll() is not None:
                break
            descendants = tuner.descendants
            tuner.process.kill()
            assert_gone(descendants, 5)
    with tuning(small_onnx, tmp_path / "last", env, trials=trials, resume_run=run_id) as tuner:
        finished = tuner.wait(180)
    assert finished.exit_code == 0, finished.stderr
    artifacts = tmp_path / "artifacts" / run_id / "artifacts"
    assert_exactly(only_run(store), artifacts, trials, tmp_path)
    assert not (artifacts / names.RECORDS_DIR / PARTS_DIR).exists()


# -- servers ---------------------------------------------------------------------------------------------------------


def assert_machine_error(finished: Finished, message: str) -> str:
    """Asserts that a command ended with one line about its environment, and returns the line without its prefix."""
    assert finished.exit_code == 3, finished.stderr
    (error,) = finished.errors
    assert re.search(message, error)
    assert "Traceback" not in finished.stderr
    return error.removeprefix("Error: ")


def sync(cwd: Path, env: Mapping[str, str]) -> Finished:
    return run([ANSOR_MLFLOW, "sync"], cwd, env)


def assert_complete(run: Run, artifacts: Path, num_trials: int, scratch: Path) -> None:
    """Asserts that a run knows all of a tuning that went well."""
    assert run.info.status == "FINISHED"
    assert names.TAG_ERROR not in run.data.tags
    assert run.data.tags[names.TAG_STOP_REASON] == "trials"
    assert run.data.metrics[names.TRIALS_MEASURED] == num_trials
    assert_readable(artifacts / names.RECORDS_DIR, scratch / "best", min_trials=num_trials)
    assert len(json.loads((artifacts / names.TRIALS_TABLE).read_text())["data"]) == num_trials


def test_a_tracking_server_that_comes_back_knows_everything(small_onnx: Path, tmp_path: Path) -> None:
    port = free_port()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(mlflow_server(tmp_path / "server", port=port))
        tuner = stack.enter_context(
            tuning(small_onnx, tmp_path / "cwd", environment(server.url), trials=60, min_repeat_ms=50)
        )
        tuner.wait_for_rounds(4)
        server.stop()
        tuner.wait_for_rounds(tuner.num_rounds + 4)  # the tuning goes on
        server = stack.enter_context(mlflow_server(tmp_path / "server", port=port))
        finished = tuner.wait(120)
        assert finished.exit_code == 0, finished.stderr
        assert "the MLflow run cannot be reached and will be told later" in finished.stderr
        assert "the MLflow run is reached again" in finished.stderr
        client = mlflow.MlflowClient(server.url)
        (run,) = client.search_runs(["0"])
        steps = [metric.step for metric in client.get_metric_history(run.info.run_id, names.TRIALS_MEASURED)]
        artifacts = Path(client.download_artifacts(run.info.run_id, "", str(tmp_path)))
    assert_complete(run, artifacts, 60, tmp_path)
    assert len(steps) == len(set(steps)) == tuner.num_rounds
    assert list((tmp_path / "cwd").glob(".ansor/*/outbox")) == []


def test_what_a_tracking_server_that_stays_away_was_not_told_is_delivered_by_sync(
    small_onnx: Path, tmp_path: Path
) -> None:
    port, cwd = free_port(), tmp_path / "cwd"
    with mlflow_server(tmp_path / "server", port=port) as server:
        env = environment(server.url)
        with tuning(small_onnx, cwd, env, trials=40) as tuner:
            tuner.wait_for_rounds(4)
            descendants = tuner.descendants
            server.stop()
            finished = tuner.wait(180)
            assert_gone(descendants, 5)
            message = r"\d+ messages to the run \w+ are undelivered .*outbox, beside the records; .*ansor-mlflow sync"
            assert_machine_error(finished, message)
            assert_readable(tuner.records, tmp_path / "best", min_trials=40)
    assert_machine_error(sync(cwd, env), "cannot deliver the messages to the run .*; check MLFLOW_TRACKING_URI")
    with mlflow_server(tmp_path / "server", port=port) as server:
        assert sync(cwd, env).exit_code == 0
        client = mlflow.MlflowClient(server.url)
        (run,) = client.search_runs(["0"])
        assert_complete(run, Path(client.download_artifacts(run.info.run_id, "", str(tmp_path))), 40, tmp_path)
        assert "nothing is left to deliver" in sync(cwd, env).stdout
    assert not (cwd / ".ansor").exists()


def test_what_an_s3_server_that_stays_away_was_not_given_is_delivered_by_sync(small_onnx: Path, tmp_path: Path) -> None:
    uri, port, cwd = f"sqlite:///{tmp_path / 'mlflow.db'}", free_port(), tmp_path / "cwd"
    mlflow.MlflowClient(uri).create_experiment("faults", "s3://bucket/faults")
    with s3_server(tmp_path / "s3", "bucket", port=port) as s3:
        env = environment(uri, {**s3.environment(), "MLFLOW_EXPERIMENT_ID": "1"})
        with tuning(small_onnx, cwd, env, trials=24) as tuner:
            tuner.wait_for_rounds(4)
            s3.stop()
            finished = tuner.wait(180)
            message = assert_machine_error(finished, r"messages to the run \w+ are undelivered \(.*Could not connect")
    run = only_run(uri)
    assert run.info.status == "FAILED"
    assert run.data.tags[names.TAG_ERROR] == message
    assert run.data.metrics[names.TRIALS_MEASURED] == 24  # the tracking server was told
    with s3_server(tmp_path / "s3", "bucket", port=port):
        assert sync(cwd, env).exit_code == 0
    artifacts = tmp_path / "s3" / "data" / "bucket" / "faults" / run.info.run_id / "artifacts"
    assert_complete(only_run(uri), artifacts, 24, tmp_path)


def test_credentials_that_expire_in_the_middle(small_onnx: Path, tmp_path: Path) -> None:
    """Nothing is lost, and no secret is told."""
    uri, port, cwd = f"sqlite:///{tmp_path / 'mlflow.db'}", free_port(), tmp_path / "cwd"
    mlflow.MlflowClient(uri).create_experiment("faults", "s3://bucket/faults")
    with s3_server(tmp_path / "s3", "bucket", port=port) as s3:
        env = environment(uri, {**s3.environment(), "MLFLOW_EXPERIMENT_ID": "1"})
        with tuning(small_onnx, cwd, env, trials=24) as tuner:
            tuner.wait_for_rounds(4)
            s3.stop()
            with s3_server(tmp_path / "s3", "bucket", port=port, secret_key="another-secret-key"):
                finished = tuner.wait(180)
                assert_machine_error(finished, r"are undelivered \(.*SignatureDoesNotMatch|403|Forbidden")
        assert SECRET_KEY not in finished.stderr
    with s3_server(tmp_path / "s3", "bucket", port=port):
        assert sync(cwd, env).exit_code == 0
    assert only_run(uri).info.status == "FINISHED"
