"""What docs/compare.md says of trials and filters holds for real runs."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import pandas as pd
import pytest
from helpers.commands import FAST, ROOT, flags
from helpers.runs_here import artifacts_of
from mlflow.utils.mlflow_tags import MLFLOW_PROJECT_ENTRY_POINT
from pandas.testing import assert_frame_equal

import ansor_mlflow
from ansor_mlflow import names
from ansor_mlflow.cli.main import main
from ansor_mlflow.errors import UserInputError
from ansor_mlflow.parameters import EvaluateOptions
from ansor_mlflow.records import JOURNAL_FILE, PARTS_DIR, RECORD_FILE, WORKLOAD_FILE, PartWriter, write_manifest
from ansor_mlflow.tracking import step_run

DOCUMENT = (ROOT / "docs" / "compare.md").read_text()
FILTERS = dict(re.findall(r"^(\S[^\n]*):\n\n```sql\n(.+)\n```$", DOCUMENT, re.MULTILINE))
"""What each filter of the document is for, up to the first comma or semicolon, and the filter."""
FILTERS = {re.split("[,;]", purpose)[0]: text for purpose, text in FILTERS.items()}
EXAMPLES = re.findall(r"^```python\n(.+?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)
NUM_TRIALS = 12
pytestmark = [pytest.mark.system, pytest.mark.nightly]  # whole pipelines

EXPECTED = {
    "The best model for a target": {"evaluated"},
    "All tunings of a network": {"tuned", "plateau"},
    "Runs for the same target and number of threads": {"tuned", "plateau", "compiled", "partial", "evaluated"},
    "What failed": {"wrong"},
    "Tunings in which programs did not compile": {"plateau"},
    "Tunings that ended before their trials were spent": {"plateau"},
    "Models that do without a record for some task": {"partial"},
    "Everything that was made from one tuning run": {"compiled"},
}


@pytest.fixture(scope="module")
def real_runs(
    _mlflow_store: tuple[str, str], small_onnx: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, str]]:
    directory = tmp_path_factory.mktemp("compare")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", _mlflow_store[0])
        patch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
        experiment = mlflow.MlflowClient().create_experiment("compare", (directory / "artifacts").as_uri())
        patch.setenv("MLFLOW_EXPERIMENT_ID", experiment)
        patch.chdir(directory)
        shutil.copy(small_onnx, "small.onnx")
        yield make_runs(experiment)


def make_runs(experiment: str) -> dict[str, str]:
    def run(*args: str) -> str:
        main(args)
        newest = mlflow.MlflowClient().search_runs([experiment], order_by=["start_time DESC"], max_results=1)
        return str(newest[0].info.run_id)

    quick = {**FAST, "network": "small.onnx", "num_trials_per_round": 2}
    runs = {
        "tuned": run("tune", *flags({**quick, "cost_model": "none", "trials": NUM_TRIALS})),
        "plateau": run("tune", *flags({**quick, "cost_model": "random", "trials": 400, "patience": 1})),
    }
    runs["compiled"] = run("compile", "--tune-run", runs["tuned"])
    shutil.copytree(artifacts_of(runs["tuned"]) / names.RECORDS_DIR / names.BEST_DIR, "partial")
    lines = Path("partial", RECORD_FILE).read_text().splitlines(keepends=True)
    Path("partial", RECORD_FILE).write_text("".join(lines[:-1]))
    runs["partial"] = run("compile", "--network", "small.onnx", "--records", "partial")
    runs["wrong"] = wrong(experiment)
    runs["evaluated"] = evaluated(runs["compiled"])
    mlflow.MlflowClient().log_metric(runs["plateau"], "trials/build_failed", 3, step=1000)
    return runs


def wrong(experiment: str) -> str:
    """ID of a run that `mlflow run` made for parameters that are refused: without it there is none."""
    run_id = str(mlflow.MlflowClient().create_run(experiment, tags={MLFLOW_PROJECT_ENTRY_POINT: "tune"}).info.run_id)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_RUN_ID", run_id)
        with pytest.raises(SystemExit):
            main(["tune", "--network", "small.onnx", "--num-threads", "100000"])
    mlflow.MlflowClient().set_terminated(run_id, "FAILED")  # as `mlflow run` does
    return run_id


def evaluated(compiled: str) -> str:
    """ID of a run such as `evaluate` opens; measuring would take longer than everything else here."""
    tags = mlflow.get_run(compiled).data.tags
    told = (names.TAG_NETWORK, names.TAG_TARGET, names.TAG_NUM_THREADS, names.TAG_MODEL_URI)
    with step_run("evaluate", EvaluateOptions(model_uri=tags[names.TAG_MODEL_URI]), "evaluate") as run:
        run.log_tags({name: tags[name] for name in told})
        run.log_metrics({names.LATENCY_MS: 1.5})
    return run.run_id


def about(real_runs: dict[str, str], text: str) -> str:
    """A text of the document, with what it names replaced by what was tuned here."""
    tags = mlflow.get_run(real_runs["tuned"]).data.tags
    target = tags[names.TAG_TARGET]
    for documented, actual in {
        "resnet-18": tags[names.TAG_NETWORK],
        "llvm znver4 ×2": target,
        "znver4": target.split()[1],
        "num_threads` = '2'": f"num_threads` = '{tags[names.TAG_NUM_THREADS]}'",
        "93ab0000000000000000000000000000": real_runs["tuned"],
        "93ab…": real_runs["tuned"],
        '"tuning"': '"compare"',
    }.items():
        text = text.replace(documented, actual)
    return text


def test_every_filter_of_the_document_is_tested() -> None:
    assert FILTERS.keys() == EXPECTED.keys()
    assert len(FILTERS) == DOCUMENT.count("```sql")


@pytest.mark.nightly
@pytest.mark.parametrize("purpose", EXPECTED)
@pytest.mark.usefixtures("experiment_id")
def test_a_filter_finds_what_it_is_for(purpose: str, real_runs: dict[str, str]) -> None:
    found = mlflow.search_runs(
        experiment_names=["compare"],
        filter_string=about(real_runs, FILTERS[purpose]),
        order_by=["metrics.latency_ms ASC"],
    )
    labels = {run_id: label for label, run_id in real_runs.items()}
    assert {labels[run_id] for run_id in found.run_id} == EXPECTED[purpose]


@pytest.mark.nightly
@pytest.mark.usefixtures("experiment_id")
def test_the_examples_run(real_runs: dict[str, str]) -> None:
    assert len(EXAMPLES) == 2
    for example in EXAMPLES:
        *lines, last = about(real_runs, example).strip().splitlines()
        scope: dict[str, Any] = {}
        exec("\n".join(lines), scope)
        shown = eval(last, scope)
        assert isinstance(shown, (pd.DataFrame, pd.Series))
        if "runs" in scope:
            assert set(shown.run_id) == {real_runs["tuned"], real_runs["plateau"]}
            assert shown["metrics.best_latency_ms"].is_monotonic_increasing


COLUMNS = ["step", "task", "status", "latency_us", "error", "weight", "workload_hash", "round", "algorithm", "sketch"]


@pytest.mark.usefixtures("experiment_id")
def test_the_trials_of_a_run(real_runs: dict[str, str]) -> None:
    artifacts = artifacts_of(real_runs["tuned"])
    table = json.loads((artifacts / names.TRIALS_TABLE).read_text())["data"]
    tasks = {task["task"]: task for task in json.loads((artifacts / names.TASKS_FILE).read_text())}
    trials = ansor_mlflow.load_trials(real_runs["tuned"])
    assert list(trials.columns[: len(COLUMNS)]) == COLUMNS
    assert {"lanes", "vectors", "columns", "rows", "parallel"} <= set(trials.columns)
    assert set(trials.sketch) >= {"register tile", "rows"}
    assert [tasks[row.task]["algorithm"] for row in trials.itertuples()] == list(trials.algorithm)
    assert trials["round"].is_monotonic_increasing
    assert trials.groupby("round").task.nunique().max() == 1
    assert list(trials.step) == list(range(1, NUM_TRIALS + 1))
    assert list(trials.latency_us.astype(object).where(trials.latency_us.notna(), None)) == [row[3] for row in table]
    assert set(trials.task) == set(tasks)
    assert [tasks[row.task]["weight"] for row in trials.itertuples()] == list(trials.weight)
    assert [tasks[row.task]["workload_hash"] for row in trials.itertuples()] == list(trials.workload_hash)
    assert_frame_equal(ansor_mlflow.load_trials(real_runs["compiled"]), trials)


@pytest.mark.usefixtures("experiment_id")
def test_the_trials_of_a_run_that_was_killed(real_runs: dict[str, str], tmp_path: Path) -> None:
    """It has its first records, the others in a part, and no tables."""
    whole = ansor_mlflow.load_trials(real_runs["tuned"])
    killed = killed_run(real_runs["tuned"], tmp_path)
    trials = ansor_mlflow.load_trials(killed)
    known = [name for name in whole.columns if name not in ("task", "weight", "algorithm")]
    assert_frame_equal(trials[known], whole[known])
    assert trials.algorithm.isna().all()
    assert trials.task.isna().all()
    assert trials.weight.isna().all()


@pytest.mark.usefixtures("experiment_id")
def test_the_trials_of_a_run_that_went_on_and_was_killed(real_runs: dict[str, str], tmp_path: Path) -> None:
    """Its tables are those of its first end."""
    killed = killed_run(real_runs["tuned"], tmp_path)
    client, artifacts = mlflow.MlflowClient(), artifacts_of(real_runs["tuned"])
    table = json.loads((artifacts / names.TRIALS_TABLE).read_text())
    (tmp_path / names.TRIALS_TABLE).write_text(json.dumps({**table, "data": table["data"][:5]}))
    client.log_artifact(killed, str(tmp_path / names.TRIALS_TABLE))
    client.log_artifact(killed, str(artifacts / names.TASKS_FILE))
    client.log_metric(killed, names.TRIALS_MEASURED, NUM_TRIALS)
    assert_frame_equal(ansor_mlflow.load_trials(killed), ansor_mlflow.load_trials(real_runs["tuned"]))


def killed_run(tuned: str, directory: Path) -> str:
    """A run with the records of another as they are while a tuning goes on."""
    whole, records = artifacts_of(tuned) / names.RECORDS_DIR, directory / names.RECORDS_DIR
    records.mkdir()
    shutil.copy(whole / WORKLOAD_FILE, records)
    for name, num_lines in ((RECORD_FILE, 4), (JOURNAL_FILE, 8)):  # a header, and a line after each round
        lines = (whole / name).read_text().splitlines(keepends=True)
        (records / name).write_text("".join(lines[:num_lines]))
    client = mlflow.MlflowClient()
    run_id = str(client.create_run(mlflow.get_run(tuned).info.experiment_id).info.run_id)
    client.set_terminated(run_id, "KILLED")
    write_manifest(records, records / names.MANIFEST_FILE)
    client.log_artifacts(run_id, str(records), names.RECORDS_DIR)
    writer = PartWriter(records, directory / PARTS_DIR)
    for name in (RECORD_FILE, JOURNAL_FILE):
        shutil.copy(whole / name, records)
    part = writer.write()
    assert part is not None
    client.log_artifact(run_id, str(part), f"{names.RECORDS_DIR}/{PARTS_DIR}")
    return run_id


@pytest.mark.usefixtures("experiment_id")
def test_a_run_without_trials(real_runs: dict[str, str]) -> None:
    with pytest.raises(UserInputError, match=f"run_id={real_runs['evaluated']}: the run has no trials; give the ID of"):
        ansor_mlflow.load_trials(real_runs["evaluated"])
    with pytest.raises(UserInputError, match=r"cannot read the trials of run 0+: .*not found"):
        ansor_mlflow.load_trials("0" * 32)
