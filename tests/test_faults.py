"""What is left when processes are killed, and when the disk is full, in the middle of a tuning."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mlflow
import pytest
from helpers.commands import environment
from helpers.tuner_process import assert_gone, assert_readable, kill, tuning
from mlflow.entities import Run
from test_survival import can_mount

from ansor_mlflow import names
from ansor_mlflow.records import PARTS_DIR, RECORD_FILE

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]


@pytest.fixture
def store(tmp_path: Path) -> str:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    mlflow.MlflowClient(uri).create_experiment("faults", (tmp_path / "artifacts").as_uri())
    return uri


def only_run(store: str) -> Run:
    (run,) = mlflow.MlflowClient(store).search_runs(["1"])
    return run


def local_environment(store: str) -> dict[str, str]:
    return environment(store, {"MLFLOW_EXPERIMENT_ID": "1"})


def test_an_interrupt_ends_the_run_as_killed_with_its_records(
    small_onnx: Path, store: str, tmp_path: Path, short_path: Path
) -> None:
    """Every process of the job is signalled, as a terminal does it."""
    with tuning(small_onnx, short_path / "cwd", local_environment(store), trials=5000) as tuner:
        tuner.wait_for_rounds(4)
        descendants = tuner.descendants
        os.killpg(tuner.process.pid, signal.SIGINT)
        finished = tuner.wait(120)
        assert_gone(descendants)
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


@pytest.mark.nightly
def test_workers_killed_from_outside_cost_their_trials_only(small_onnx: Path, store: str, short_path: Path) -> None:
    """As the system does when memory runs out."""
    parameters = {"trials": 40, "num_threads": 2, "min_repeat_ms": 100}
    with tuning(small_onnx, short_path / "cwd", local_environment(store), **parameters) as tuner:
        for delay_s in (0.0, 0.2, 0.4, 0.6, 0.8):  # while they search, build or measure
            tuner.wait_for_rounds(tuner.num_rounds + 1)
            time.sleep(delay_s)
            for worker in tuner.workers:
                kill(worker)
        finished = tuner.wait()
    assert finished.exit_code == 0, finished.stderr
    run = only_run(store)
    assert run.info.status == "FINISHED"
    assert run.data.metrics[names.TRIALS_MEASURED] == 40
    assert run.data.metrics["trials/ok"] >= 20


def assert_complete(run: Run, artifacts: Path, num_trials: int, scratch: Path) -> None:
    assert run.info.status == "FINISHED"
    assert names.TAG_ERROR not in run.data.tags
    assert run.data.tags[names.TAG_STOP_REASON] == "trials"
    assert run.data.metrics[names.TRIALS_MEASURED] == num_trials
    assert_readable(artifacts / names.RECORDS_DIR, scratch / "best", min_trials=num_trials)
    assert len(json.loads((artifacts / names.TRIALS_TABLE).read_text())["data"]) == num_trials


def assert_exactly(run: Run, artifacts: Path, num_trials: int, scratch: Path) -> None:
    """Asserts that a run has so many trials, each measured once, on one axis without a gap."""
    assert_complete(run, artifacts, num_trials, scratch)
    records = [
        json.loads(line)[1][0] for line in (artifacts / names.RECORDS_DIR / RECORD_FILE).read_text().splitlines()
    ]
    assert len(records) == num_trials
    table = json.loads((artifacts / names.TRIALS_TABLE).read_text())
    assert [row[table["columns"].index("step")] for row in table["data"]] == list(range(1, num_trials + 1))


@pytest.mark.parametrize("num_kills", [2, pytest.param(10, marks=pytest.mark.nightly)])
def test_a_tuning_that_is_killed_at_random_moments_and_resumed_has_exactly_its_trials(
    small_onnx: Path, store: str, tmp_path: Path, short_path: Path, num_kills: int
) -> None:
    """Each time on another machine, as it were: nothing is left of it but what the run has."""
    draw = random.Random(0)
    env, run_id, trials = local_environment(store), "", 15 * num_kills
    for attempt in range(num_kills):
        parameters = {"trials": trials, **({"resume_run": run_id} if run_id else {})}
        with tuning(small_onnx, short_path / f"cwd{attempt}", env, **parameters) as tuner:
            tuner.wait_for_rounds(1)
            run_id = only_run(store).info.run_id
            time.sleep(draw.uniform(0, 1.5))
            if tuner.process.poll() is not None:
                break
            descendants = tuner.descendants
            tuner.process.kill()
            assert_gone(descendants)
    with tuning(small_onnx, short_path / "last", env, trials=trials, resume_run=run_id) as tuner:
        finished = tuner.wait()
    assert finished.exit_code == 0, finished.stderr
    artifacts = tmp_path / "artifacts" / run_id / "artifacts"
    assert_exactly(only_run(store), artifacts, trials, tmp_path)
    assert not (artifacts / names.RECORDS_DIR / PARTS_DIR).exists()


MOUNT = 'mount -t tmpfs -o size=64m tmpfs "$1" && echo mounted && exec cat'
CHANGE_DIRECTORY = 'cd "$1" && shift && exec "$@"'


@contextmanager
def small_disk(directory: Path) -> Iterator[int]:
    """Mounts a disk of 64 MiB, which only processes in the namespaces of the one whose ID is given see."""
    command = ["unshare", "-rm", "sh", "-c", MOUNT, "sh", str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "mounted\n"
        yield process.pid


@pytest.mark.nightly
@pytest.mark.skipif(not can_mount(), reason="needs user namespaces")
def test_a_tuning_whose_disk_was_full_goes_on_when_there_is_space_again(
    small_onnx: Path, store: str, tmp_path: Path, short_path: Path
) -> None:
    disk, env, trials = tmp_path / "disk", local_environment(store), 120
    disk.mkdir()
    with small_disk(disk) as pid:
        there = Path(f"/proc/{pid}/root{disk}")
        enter = ["nsenter", f"--target={pid}", "--user", "--mount", "--preserve-credentials"]
        enter += ["sh", "-c", CHANGE_DIRECTORY, "sh", str(disk)]
        with tuning(small_onnx, short_path / "first", env, wrapper=enter, trials=trials) as tuner:
            tuner.wait_for_rounds(4)
            (there / "big").write_bytes(bytes(60 * 2**20))
            finished = tuner.wait(200)
        assert finished.exit_code == 3, finished.stderr
        (error,) = finished.errors
        assert re.search(r"no space is left for records in .*\.ansor/\w+/records; free some, and tune again", error)
        assert "Traceback" not in finished.stderr
        run = only_run(store)
        assert run.info.status == "FAILED"
        assert 0 < run.data.metrics[names.TRIALS_MEASURED] < trials
        (there / "big").unlink()
        parameters = {"trials": trials, "resume_run": run.info.run_id}
        with tuning(small_onnx, short_path / "second", env, wrapper=enter, **parameters) as tuner:
            finished = tuner.wait()
        assert finished.exit_code == 0, finished.stderr
    assert_exactly(only_run(store), tmp_path / "artifacts" / run.info.run_id / "artifacts", trials, tmp_path)
