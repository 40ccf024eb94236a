"""The network of an old tuning is compiled with the records that still apply."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
from helpers.commands import RunCommand
from helpers.fake_tuning import read_records
from helpers.finished import FinishedWork
from helpers.runs_here import artifacts_of, newest_run

from ansor_mlflow import flavor, names
from ansor_mlflow.records import RECORD_FILE, WORKLOAD_FILE, write_manifest

pytestmark = pytest.mark.system  # whole pipelines


@pytest.fixture
def tuned(finished_work: FinishedWork) -> str:
    Path("small.onnx").unlink()
    return finished_work.tuned


@pytest.fixture
def compile_(tuned: str, run_here: RunCommand) -> Any:
    return lambda *flags: run_here("compile", "--tune-run", tuned, *flags)


def records_of(run_id: str) -> Path:
    return artifacts_of(run_id) / names.RECORDS_DIR


def lost(run: mlflow.entities.Run) -> list[dict[str, Any]]:
    return list(json.loads(mlflow.artifacts.load_text(f"runs:/{run.info.run_id}/{names.LOST_RECORDS_FILE}")))


def outputs(run: mlflow.entities.Run) -> np.ndarray:
    model = flavor.load_model(run.data.tags[names.TAG_MODEL_URI])
    inputs = {spec.name: np.ones(spec.shape, spec.dtype) for spec in model.inputs}
    return np.asarray(next(iter(model.run(inputs).values())))


@pytest.mark.nightly
def test_a_winner_that_does_not_apply_leaves_the_other_records(
    tuned: str, compile_: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    records = records_of(tuned)
    best = records / names.BEST_DIR
    first, *lines = read_records(best)
    changed = [[index, [first[1][0], *rest]] for index, (_, *rest) in lines]
    (best / RECORD_FILE).write_text("".join(f"{json.dumps(line)}\n" for line in [first, *changed]))
    write_manifest(records, records / names.MANIFEST_FILE)
    assert compile_() == 5
    assert "leave out what does not apply (compile with allow_missing=true)" in capsys.readouterr().err
    assert compile_("--allow-missing") == 0
    assert lost(newest_run()) == []
    assert newest_run().data.metrics[names.RECORDS_LOST] == 0
    assert newest_run().data.metrics[names.COVERAGE_TASKS] == 1


@pytest.mark.nightly
def test_records_that_are_lost_are_named(
    tuned: str, compile_: Any, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """One workload is none of today's, as after a change of the lowering; another's schedules do not apply."""
    assert compile_() == 0
    before = newest_run()
    records = records_of(tuned)
    shutil.rmtree(records / names.BEST_DIR)
    provenance = json.loads((records / names.PROVENANCE_FILE).read_text())
    (records / names.PROVENANCE_FILE).write_text(json.dumps({**provenance, "lowering_version": 1}))
    gone, *others = (records / WORKLOAD_FILE).read_text().splitlines()
    (records / WORKLOAD_FILE).write_text("\n".join([json.dumps(["7", json.loads(gone)[1]]), *others]) + "\n")
    lines = read_records(records)
    foreign = next(line for line in lines if line[0] == 0)[1][0]
    changed = [[index, [foreign if index == 1 else trace, *rest]] for index, (trace, *rest) in lines]
    (records / RECORD_FILE).write_text("".join(f"{json.dumps(line)}\n" for line in changed))
    write_manifest(records, records / names.MANIFEST_FILE)

    assert compile_() == 5
    (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("Error: ")]
    assert f"run {tuned} was tuned with lowering version 1, this is " in error
    assert f" tasks have no record; tune again with warm_start={tuned}, or give allow_missing=true" in error
    assert newest_run().info.status == "FAILED"

    assert compile_("--allow-missing") == 0
    run = newest_run()
    assert {records["workload_hash"]: (records["reason"], records["task"] != "") for records in lost(run)} == {
        f"{7:#018x}": ("no_such_kernel", False),
        f"{int(json.loads(others[0])[0]):#018x}": ("does_not_apply", True),
    }
    assert run.data.metrics[names.RECORDS_LOST] == 2
    assert 0 < run.data.metrics[names.COVERAGE_TASKS] < 1
    assert "the records of 2 workloads do not apply any more, such as " in caplog.text
    np.testing.assert_allclose(outputs(run), outputs(before), rtol=1e-4, atol=1e-5)


@pytest.mark.nightly
def test_records_of_another_device(tuned: str, compile_: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = records_of(tuned) / names.FINGERPRINT_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), "cpu_model": "a faster one"}))
    write_manifest(path.parent, path.with_name(names.MANIFEST_FILE))
    assert compile_("--allow-missing") == 5
    assert "on a faster one, this is" in capsys.readouterr().err
    assert compile_("--allow-missing", "--allow-target-mismatch") == 0
    assert "on a faster one" in newest_run().data.tags[names.TAG_TARGET_MISMATCH]
