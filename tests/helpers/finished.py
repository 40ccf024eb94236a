"""What is made once for all workers of a session, and copied for each test: a store, a tuning, and its model."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock
from helpers.commands import flags
from helpers.runs_here import QUICK
from mlflow import MlflowClient
from mlflow.tracking._tracking_service import utils as mlflow_utils

from ansor_mlflow.cli.main import main

Fill = Callable[[Path], None]
MadeOnce = Callable[[str, Fill], Path]
_PLACES = {"experiments": "artifact_location", "runs": "artifact_uri", "logged_models": "artifact_location"}
"""Columns of MLflow's tables with a path of the store."""


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> MadeOnce:
    """Gives a directory by its name, which the first worker that asks for it fills. It is not to be written to."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def make(name: str, fill: Fill) -> Path:
        directory, made = shared / name, shared / f"made-{name}"
        with FileLock(shared / f"making-{name}.lock"):
            if not made.exists():
                shutil.rmtree(directory, ignore_errors=True)  # of a worker that failed
                directory.mkdir()
                fill(directory)
                made.touch()
        return directory

    return make


@pytest.fixture(scope="session")
def empty_store(made_once: MadeOnce) -> Path:
    """An sqlite store, whose tables take seconds to make."""
    return made_once("store", lambda directory: _make_tables(directory / "mlflow.db")) / "mlflow.db"


def _make_tables(database: Path) -> None:
    MlflowClient(f"sqlite:///{database}").search_experiments()


@dataclass(frozen=True)
class FinishedWork:
    """IDs of runs in a store of this test alone; `small.onnx`, their network, is beside it."""

    experiment_id: str
    tuned: str
    """Of 12 trials: see `runs_here.QUICK`."""
    compiled: str


@pytest.fixture(scope="session")
def _finished_work(made_once: MadeOnce, empty_store: Path, small_onnx: Path) -> Path:
    def fill(directory: Path) -> None:
        shutil.copy(small_onnx, directory / "small.onnx")
        shutil.copy(empty_store, directory / "mlflow.db")
        client = MlflowClient(f"sqlite:///{directory}/mlflow.db")
        experiment_id = client.create_experiment("work", (directory / "artifacts").as_uri())
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{directory}/mlflow.db")
            patch.setenv("MLFLOW_EXPERIMENT_ID", experiment_id)
            patch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")  # the commands set it
            patch.chdir(directory)
            main(["tune", *flags({**QUICK, "network": "small.onnx", "trials": 12})])
            (tuned,) = client.search_runs([experiment_id])
            main(["compile", "--tune-run", tuned.info.run_id, "--runtimes", "tvm"])
        (compiled,) = client.search_runs([experiment_id], f"tags.`ansor.tune_run` = '{tuned.info.run_id}'")
        ids = {"experiment_id": experiment_id, "tuned": tuned.info.run_id, "compiled": compiled.info.run_id}
        (directory / "runs.json").write_text(json.dumps(ids))

    return made_once("work", fill)


@pytest.fixture
def finished_work(_finished_work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FinishedWork:
    """A copy in the current directory, which is `tmp_path`; its store is that of this process and those it starts."""
    shutil.copytree(_finished_work, tmp_path, dirs_exist_ok=True)
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        for table, column in _PLACES.items():
            text = f"UPDATE {table} SET {column} = replace({column}, ?, ?)"
            database.execute(text, (str(_finished_work), str(tmp_path)))
    database.close()
    work = FinishedWork(**json.loads((tmp_path / "runs.json").read_text()))
    mlflow_utils._artifact_repos_cache.clear()  # by the IDs of runs and models, which are those of another copy, too
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", work.experiment_id)
    monkeypatch.chdir(tmp_path)
    return work
