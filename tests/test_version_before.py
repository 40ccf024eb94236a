"""Models, records and runs that the version before wrote: they are loaded, resumed, compared and built again.

`data/version_before.tar.xz` is a store that commit e7397a8 filled, by the commands

    ansor-mlflow tune --network small.onnx --target '{"kind":"llvm","mcpu":"x86-64-v3"}' --num-threads 1 --trials 16
        --record-pool pool …
    ansor-mlflow tune … --seed 1
    ansor-mlflow compile --tune-run … --network small.onnx

on a CPU called "AMD EPYC": MLflow's database as SQL, its artifacts without pictures and reports, and the record pool.
"""

from __future__ import annotations

import io
import re
import sqlite3
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
from helpers.commands import MLFLOW, ROOT, RunCommand

import ansor_mlflow as am
from ansor_mlflow import names
from ansor_mlflow.device import fingerprints
from ansor_mlflow.errors import RecordsError
from ansor_mlflow.measuring.reference import ReferenceSession

ARCHIVE = ROOT / "tests" / "data" / "version_before.tar.xz"
EARLIER = "/earlier"
"""Where the store was."""


@pytest.fixture(scope="module")
def restored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store, here and now."""
    directory = tmp_path_factory.mktemp("earlier")
    with tarfile.open(fileobj=io.BytesIO(ARCHIVE.read_bytes())) as archive:
        archive.extractall(directory, filter="data")
    for path in [directory / "mlflow.sql", *directory.glob("artifacts/models/*/artifacts/MLmodel")]:
        path.write_text(path.read_text().replace(EARLIER, str(directory)))
    database = sqlite3.connect(directory / "mlflow.db")
    database.executescript((directory / "mlflow.sql").read_text())
    database.close()
    upgrade = [MLFLOW, "db", "upgrade", f"sqlite:///{directory}/mlflow.db"]  # nothing, for the MLflow that made it
    subprocess.run(upgrade, check=True, capture_output=True)
    return directory


@pytest.fixture
def store(restored: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The store as MLflow's; this host is called as the one that tuned."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{restored}/mlflow.db")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "before")
    monkeypatch.chdir(restored)
    monkeypatch.setattr(fingerprints, "_cpu_model", lambda: "AMD EPYC")
    return restored


def runs_of(step: str) -> list[Any]:
    """The runs of a step, oldest first."""
    return mlflow.search_runs(
        search_all_experiments=True,
        filter_string=f"tags.`{names.TAG_STEP}` = '{step}'",
        order_by=["attributes.start_time ASC"],
        output_format="list",
    )


def test_the_model_is_loaded_and_right(store: Path) -> None:
    (run,) = runs_of("compile")
    model = am.load_model(run.data.tags[names.TAG_MODEL_URI], num_threads=1)
    assert am.explain_load(model).level in ("exact", "compatible")
    data = {"data": np.random.default_rng(0).standard_normal((1, 3, 8, 8)).astype(np.float32)}
    expected = ReferenceSession(store / "small.onnx", 1).run(data)["logits"]
    np.testing.assert_allclose(model.run(data)["logits"], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("store")
def test_the_tuning_does_not_go_on_with_other_tasks() -> None:
    """Another version of the lowering made them; `warm_start` takes what still applies."""
    run = runs_of("tune")[0]
    before = am.load_trials(run.info.run_id)
    assert len(before) == 16
    with pytest.raises(RecordsError, match=r"lowering version 5, this is \d"):
        am.tune(resume_run=run.info.run_id, trials=20)
    assert len(am.load_trials(run.info.run_id)) == 16


def test_the_tunings_are_compared(store: Path) -> None:
    first, second = (run.info.run_id for run in runs_of("tune"))
    difference = am.diff(first, second)
    assert difference.params["seed"] == ("0", "1")
    assert difference.device == {}
    assert len(difference.tasks) == 5
    assert {task.verdict for task in difference.tasks} <= {"faster", "slower", "same"}


def test_the_model_is_built_again_from_its_records(store: Path, run_here: RunCommand) -> None:
    (run,) = runs_of("compile")
    assert run_here("recompile", "--run", run.info.run_id) == 0
    (rebuilt,) = runs_of("recompile")
    assert rebuilt.data.metrics[names.COVERAGE_TASKS] == 1
    assert rebuilt.data.metrics[names.RECORDS_LOST] == 0


def test_the_records_are_shown_pooled_and_begun_with(
    store: Path, run_here: RunCommand, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (run.info.run_id for run in runs_of("tune"))
    assert run_here("records", "show", second) == 0
    assert "16 records of 5 workloads" in capsys.readouterr().out
    device = ["--target", '{"kind":"llvm","mcpu":"x86-64-v3"}', "--num-threads", "1"]
    assert run_here("pool", "pull", "pool", *device, "--output", "pulled") == 0
    pulled = re.match(r"(\d+) records of 5 workloads", capsys.readouterr().out)
    assert pulled is not None
    assert int(pulled[1]) == 16
    quick = ["--strategy", "random", "--min-repeat-ms", "0", "--number", "1", "--trials", "5"]
    network = ["--network", "small.onnx", *device]
    assert run_here("tune", *network, *quick, "--warm-start", f"{first},pulled,{second}") == 0
    begun = mlflow.get_run(runs_of("tune")[-1].info.run_id).data.metrics
    assert begun[names.WARM_START_APPLIED] >= 16
    assert begun[names.WARM_START_TASKS] == 5
