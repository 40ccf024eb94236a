"""The run of a step says how the step ended, whoever calls it."""

from __future__ import annotations

from pathlib import Path

import mlflow
import pytest

from ansor_mlflow import names
from ansor_mlflow.errors import AnsorMlflowError, MachineError, RecordsError
from ansor_mlflow.options import EvaluateOptions
from ansor_mlflow.tracking.error_translation import translated_errors
from ansor_mlflow.tracking.run import StepRun, step_run

OPTIONS = EvaluateOptions(model_uri="models:/small/1")


@pytest.fixture(autouse=True)
def _cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, experiment_id: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", experiment_id)


def record_a_trial(run: StepRun) -> None:
    (run.directory / names.RECORDS_DIR).mkdir()
    (run.directory / names.RECORDS_DIR / "database_tuning_record.json").write_text("[]\n")


def fail_with_records(runs: list[StepRun]) -> None:
    with step_run("evaluate", OPTIONS, "bad") as run:
        runs.append(run)
        record_a_trial(run)
        raise RecordsError("these are damaged")


def test_a_run_inside_of_an_active_run_is_its_child() -> None:
    with mlflow.start_run() as parent, step_run("evaluate", OPTIONS, "inner") as run:
        tags = mlflow.get_run(run.run_id).data.tags
    assert tags["mlflow.parentRunId"] == parent.info.run_id
    assert (tags[names.TAG_STEP], tags["mlflow.runName"]) == ("evaluate", "inner")


def test_metrics_have_five_significant_digits() -> None:
    with step_run("evaluate", OPTIONS, "measured") as run:
        run.log_metrics({names.LATENCY_MS: 0.0501479912, names.WARM_START_APPLIED: 1234567})
    assert mlflow.get_run(run.run_id).data.metrics == {names.LATENCY_MS: 0.050148, names.WARM_START_APPLIED: 1234567}


def test_credentials_in_uris_stay_out_of_params_tags_and_messages() -> None:
    options = EvaluateOptions(model_uri="https://bob:hunter@2@host/model")
    with step_run("evaluate", options, f"evaluate {options.model_uri}") as run:
        run.log_tags({names.TAG_MODEL_URI: options.model_uri})
    info, data = mlflow.get_run(run.run_id).info, mlflow.get_run(run.run_id).data
    assert data.params["model_uri"] == data.tags[names.TAG_MODEL_URI] == "https://…@host/model"
    assert info.run_name == "evaluate https://…@host/model"
    assert str(AnsorMlflowError(f"{options.model_uri}: no")) == "https://…@host/model: no"
    with pytest.raises(MachineError, match="cannot read https://…@host/model: no connection"):
        fail_to_read(options.model_uri)


def fail_to_read(uri: str) -> None:
    with translated_errors(f"read {uri}"):
        raise ConnectionError(f"{uri} is away")


def test_success_leaves_nothing_on_disk(tmp_path: Path) -> None:
    with step_run("evaluate", OPTIONS, "good") as run:
        record_a_trial(run)
    assert mlflow.get_run(run.run_id).info.status == "FINISHED"
    assert list(tmp_path.iterdir()) == []


def test_failure_leaves_records_and_the_message(tmp_path: Path) -> None:
    runs: list[StepRun] = []
    with pytest.raises(RecordsError, match="these are damaged"):
        fail_with_records(runs)
    (run,) = runs
    finished = mlflow.get_run(run.run_id)
    assert finished.info.status == "FAILED"
    assert finished.data.tags[names.TAG_ERROR] == "these are damaged"
    assert finished.data.tags[names.TAG_EXIT_CODE] == "5"
    assert (tmp_path / run.directory).is_dir()


def test_failure_without_records_leaves_nothing_on_disk(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError, match="by zero"), step_run("evaluate", OPTIONS, "bug") as run:
        1 / 0  # noqa: B018
    assert mlflow.get_run(run.run_id).data.tags[names.TAG_ERROR] == "ZeroDivisionError: division by zero"
    assert list(tmp_path.iterdir()) == []
