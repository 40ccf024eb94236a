"""Models, records and runs that the version before wrote: they are loaded, served, resumed, compared and built again.

`data/version_before.tar.xz` is a store that commit 994c35d filled, on a CPU called "AMD EPYC", by the commands

    tune --network small.onnx --trials 12       resumed with --trials 16, and tuned again with --seed 1
    tune --network small.onnx --trials 8        for x86-64-v2
    tune --network parts.onnx --trials 4        of whose operators TVM has not all
    tune --network rows.onnx --trials 4         with --input-shapes '{"data": [[1, 4], 16]}'
    compile --tune-run …                        of the first, of it and that for x86-64-v2, of parts.onnx, of rows.onnx
    evaluate --model-uri …                      of the first

all with `--target '{"kind":"llvm","mcpu":"x86-64-v3"}' --num-threads 1` where nothing else is said: MLflow's database
as SQL, its artifacts without pictures and reports, and in one of the four models, which is enough, the code.
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
from pandas.testing import assert_frame_equal

import ansor_mlflow as am
from ansor_mlflow import names
from ansor_mlflow.device import cpu
from ansor_mlflow.measuring.compare import ReferenceSession

pytestmark = pytest.mark.system

ARCHIVE = ROOT / "tests" / "data" / "version_before.tar.xz"
EARLIER = "/earlier"
"""Where the store was."""
QUICK = {"strategy": "random", "min_repeat_ms": 0, "number": 1}
DEVICE = {"target": '{"kind":"llvm","mcpu":"x86-64-v3"}', "num_threads": 1}
NETWORKS = ["small", "small", "parts", "rows"]
"""Of the models, oldest first."""


@pytest.fixture(scope="module")
def restored(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
    monkeypatch.setattr(type(cpu.CPU), "model", lambda _cpu, _target: "AMD EPYC")
    return restored


def runs_of(step: str) -> list[Any]:
    return mlflow.search_runs(
        search_all_experiments=True,
        filter_string=f"tags.`{names.TAG_STEP}` = '{step}'",
        order_by=["attributes.start_time ASC"],
        output_format="list",
    )


def model_uris() -> list[str]:
    return [run.data.tags[names.TAG_MODEL_URI] for run in runs_of("compile")[: len(NETWORKS)]]


def inputs_of(network: str) -> dict[str, np.ndarray]:
    shape = {"small": (1, 3, 8, 8), "parts": (1, 8, 64, 64), "rows": (4, 16)}[network]
    name = "x" if network == "parts" else "data"
    return {name: np.random.default_rng(0).standard_normal(shape).astype(np.float32)}


def assert_right(outputs: dict[str, np.ndarray], store: Path, network: str, inputs: dict[str, np.ndarray]) -> None:
    expected = ReferenceSession(store / f"{network}.onnx", 1).run(inputs)
    assert outputs.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(outputs[name], values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("index", "network"), list(enumerate(NETWORKS)))
def test_a_model_is_loaded_and_right(store: Path, index: int, network: str) -> None:
    model = am.load_model(model_uris()[index], num_threads=1)
    assert am.explain_load(model).level in ("exact", "compatible")
    inputs = inputs_of(network)
    assert_right(model.run(inputs), store, network, inputs)


def test_models_are_served(store: Path) -> None:
    small, _, _, rows = (mlflow.pyfunc.load_model(uri) for uri in model_uris())
    inputs = inputs_of("small")
    assert_right({"logits": small.predict(inputs["data"])}, store, "small", inputs)
    inputs = inputs_of("rows")
    assert_right({"scores": rows.predict(inputs["data"])}, store, "rows", inputs)


def test_a_tuning_goes_on(store: Path) -> None:
    run = runs_of("tune")[0]
    before = am.load_trials(run.info.run_id)
    assert len(before) == 16
    am.tune(resume_run=run.info.run_id, trials=18)
    after = am.load_trials(run.info.run_id)
    assert len(after) == 18
    measured = ["task", "status", "latency_us"]
    assert_frame_equal(after.head(16)[measured], before[measured], rtol=1e-4)  # of five digits now
    assert after.sketch.notna().all()  # the records of that version say it, too


@pytest.mark.usefixtures("store")
def test_tunings_are_compared() -> None:
    first, second = (run.info.run_id for run in runs_of("tune")[:2])
    difference = am.diff(first, second)
    assert difference.params["seed"] == ("0", "1")
    assert difference.device == {}
    assert len(difference.tasks) == 5
    assert {task.verdict for task in difference.tasks} <= {"faster", "slower", "same"}


@pytest.mark.usefixtures("store")
def test_a_model_is_built_again_from_its_records(run_here: RunCommand) -> None:
    first = runs_of("tune")[0].info.run_id
    assert run_here("compile", "--tune-run", first, "--allow-missing") == 0
    metrics = runs_of("compile")[-1].data.metrics
    assert metrics[names.COVERAGE_TASKS] == 1
    assert metrics[names.RECORDS_LOST] == 0


@pytest.mark.usefixtures("store")
def test_records_are_shown_and_begun_with(run_here: RunCommand, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (run.info.run_id for run in runs_of("tune")[:2])
    assert run_here("records", "show", second) == 0
    assert re.search(r"12 records of 5 workloads", capsys.readouterr().out)
    am.tune("small.onnx", **DEVICE, **QUICK, trials=5, warm_start=(first, second))
    begun = mlflow.get_run(runs_of("tune")[-1].info.run_id).data.metrics
    assert begun[names.WARM_START_APPLIED] >= 12
    assert begun[names.WARM_START_TASKS] == 5


@pytest.mark.usefixtures("store")
def test_an_evaluation_of_the_model_is_compared(run_here: RunCommand, capsys: pytest.CaptureFixture[str]) -> None:
    (evaluated,) = runs_of("evaluate")
    second = runs_of("tune")[1].info.run_id
    assert run_here("diff", evaluated.info.run_id, second) == 0
    assert "seed" in capsys.readouterr().out
