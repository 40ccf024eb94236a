"""What steps that were killed left here is ended by the next one, and one that the disk refuses anything says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import mlflow
import pytest
from helpers.faulty_disk import FaultyDisk
from mlflow.entities import LoggedModelStatus

from ansor_mlflow import names
from ansor_mlflow.errors import MachineError, notes_of
from ansor_mlflow.parameters import CompileOptions, TuneOptions
from ansor_mlflow.records import RECORD_FILE
from ansor_mlflow.tracking import step_run
from ansor_mlflow.tracking.killed import LOCK_FILE, WORK_ROOT


def leave_directory(run_id: str, *, with_records: bool) -> None:
    """What a killed step leaves: the system has let go of its lock."""
    (WORK_ROOT / run_id / names.RECORDS_DIR).mkdir(parents=True)
    (WORK_ROOT / run_id / LOCK_FILE).touch()
    if with_records:
        (WORK_ROOT / run_id / names.RECORDS_DIR / RECORD_FILE).write_text("[0, 1]\n")


def test_the_next_step_ends_one_that_was_killed(
    own_directory: Path, new_experiment: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = mlflow.MlflowClient()
    compiling, tuning = (client.create_run(new_experiment).info.run_id for _ in range(2))
    model = mlflow.initialize_logged_model(name="model", source_run_id=compiling)
    for run_id in (compiling, tuning):
        leave_directory(run_id, with_records=run_id == tuning)
    with step_run("compile", CompileOptions(), "compile") as run:
        assert (run.directory / LOCK_FILE).exists()
    assert client.get_run(compiling).info.status == "KILLED"
    assert mlflow.get_logged_model(model.model_id).status == LoggedModelStatus.FAILED
    assert client.get_run(tuning).info.status == "RUNNING"  # it can go on
    assert [path.name for path in WORK_ROOT.iterdir()] == [tuning]
    assert f"1 earlier runs have records or messages in .ansor ({tuning}): ansor-mlflow sync says what" in caplog.text


@pytest.mark.parametrize("with_records", [False, True])
def test_a_step_that_goes_on_with_one_that_was_killed_does_not_end_it(
    own_directory: Path, new_experiment: str, caplog: pytest.LogCaptureFixture, with_records: bool
) -> None:
    client = mlflow.MlflowClient()
    run_id = client.create_run(new_experiment).info.run_id
    leave_directory(run_id, with_records=with_records)
    with step_run("tune", TuneOptions(resume_run=run_id), "tune", resume=run_id) as run:
        assert run.has_records == with_records
        assert client.get_run(run_id).info.status == "RUNNING"
        assert not names.END_TAGS & client.get_run(run_id).data.tags.keys()
    assert not [line for line in caplog.messages if "killed" in line or "earlier runs" in line]


@pytest.mark.system
def test_the_next_step_ends_an_autologged_tuning_that_was_killed_and_no_run_of_a_user(
    own_directory: Path, new_experiment: str
) -> None:
    program = """
import os, mlflow
from ansor_mlflow import names
from ansor_mlflow.autologging.logged import open_run

with mlflow.start_run() as mine, open_run({}):
    mlflow.set_tag(names.TAG_STEP, "tune")
    with open_run({}) as (own, *_):
        print(mine.info.run_id, own.info.run_id, flush=True)
        os.kill(os.getpid(), 9)
"""
    killed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    mine, own = killed.stdout.split()
    with step_run("compile", CompileOptions(), "compile"):
        pass
    client = mlflow.MlflowClient()
    assert [client.get_run(run_id).info.status for run_id in (mine, own)] == ["RUNNING", "KILLED"]
    assert not WORK_ROOT.exists()


def test_a_disk_that_refuses_anything_of_a_step_is_an_error_of_the_machine_with_its_run(own_directory: Path) -> None:
    options = TuneOptions(network="some network.onnx", input_shapes={"ids": [1, list(range(1000, 2500))]})
    num_refused = 0
    for step in range(1, 8):
        try:
            with FaultyDisk(own_directory / WORK_ROOT, "EIO", step).inserted(), step_run("tune", options, "tune"):
                pass
        except MachineError as err:
            num_refused += 1
            (note,) = notes_of(err)
            run = mlflow.get_run(note.split()[1])
            assert (run.info.status, run.data.tags[names.TAG_EXIT_CODE]) == ("FAILED", "3")
    assert num_refused >= 3
