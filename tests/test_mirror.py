"""What is copied to a run while it goes on gives its records again, wherever the copying stops."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from ansor_mlflow import names
from ansor_mlflow.records.pieces import PARTS_DIR, changed_files, join_parts
from ansor_mlflow.records.store import RECORD_FILE
from ansor_mlflow.tracking.outbox import Message, RecordMirror, whole_records
from ansor_mlflow.trials import TuningPlan, TuningRound

PLAN = TuningPlan(network="net", target="host", tasks=(), num_trials=64)


class Run:
    """A run that takes the artifacts of messages, as an `Outbox` delivers them."""

    def __init__(self, directory: Path, artifacts: Path) -> None:
        self._directory = directory
        self._artifacts = artifacts

    def put(self, message: Message, *, limit: int | None = None) -> None:
        """Copies the artifacts of a message; only the first ones, if it is cut off."""
        for name, place in message.artifacts[:limit]:
            source, destination = self._directory / name, self._artifacts / place
            if source.is_dir():
                shutil.copytree(source, destination, dirs_exist_ok=True)
            else:
                destination.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, destination)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A run's directory with records."""
    records = tmp_path / "run" / names.RECORDS_DIR
    records.mkdir(parents=True)
    (records / RECORD_FILE).write_text("first\nsecond\ntorn")
    (records / names.PROVENANCE_FILE).write_text("{}")
    return tmp_path / "run"


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_an_upload_that_is_cut_off_leaves_no_manifest_of_other_files(
    directory: Path, tmp_path: Path, limit: int
) -> None:
    run = Run(directory, tmp_path / "artifacts")
    run.put(Message(artifacts=whole_records(directory)))
    (directory / names.RECORDS_DIR / names.PROVENANCE_FILE).write_text('{"estimated_latency_ms": 1}')
    run.put(Message(artifacts=whole_records(directory)), limit=limit)
    assert changed_files(tmp_path / "artifacts" / names.RECORDS_DIR) == ()


def test_parts_begin_where_the_records_ended_when_the_tuning_began(directory: Path, tmp_path: Path) -> None:
    """A line that was torn is gone by then."""
    records = directory / names.RECORDS_DIR / RECORD_FILE
    run: Any = Run(directory, tmp_path / "artifacts")
    mirror = RecordMirror(run, directory)
    os.truncate(records, len("first\nsecond\n"))
    mirror.tuning_started(PLAN)
    with records.open("a") as file:
        file.write("third\n")
    mirror.round_finished(TuningRound(**{**ROUND, "total_trials": 64}))
    mirrored = tmp_path / "artifacts" / names.RECORDS_DIR
    assert (mirrored / RECORD_FILE).read_text() == "first\nsecond\n"
    assert len(list((mirrored / PARTS_DIR).iterdir())) == 1
    assert join_parts(mirrored) == 1
    assert (mirrored / RECORD_FILE).read_text() == "first\nsecond\nthird\n"


ROUND: dict[str, Any] = {"trials": (), "task": None, "tasks": (), "elapsed_s": 1.0, "durations": None}
