"""The run of a step says where it is and how the step ended, whoever calls it."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import mlflow
import pytest
from helpers.servers import free_port

from ansor_mlflow import names
from ansor_mlflow.commands.sync import sync
from ansor_mlflow.errors import AnsorMlflowError, MachineError, RecordsError, UserInputError, notes_of
from ansor_mlflow.parameters import EvaluateOptions, Options, PipelineOptions, TuneOptions, load_options
from ansor_mlflow.tracking.environment import translated_errors
from ansor_mlflow.tracking.outbox import Message, UndeliveredError, as_logged, open_outbox
from ansor_mlflow.tracking.report.note import pipeline_note
from ansor_mlflow.tracking.report.pages import run_address
from ansor_mlflow.tracking.run import StepRun, params_used, step_run

OPTIONS = EvaluateOptions(model_uri="models:/small/1")


@pytest.fixture(autouse=True)
def _cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, experiment_id: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", experiment_id)


def record_a_trial(run: StepRun) -> None:
    (run.directory / names.RECORDS_DIR).mkdir()
    (run.directory / names.RECORDS_DIR / "database_tuning_record.json").write_text("[]\n")


def test_a_run_inside_of_an_active_run_is_its_child() -> None:
    with mlflow.start_run() as parent, step_run("evaluate", OPTIONS, "inner") as run:
        tags = mlflow.get_run(run.run_id).data.tags
    assert tags["mlflow.parentRunId"] == parent.info.run_id
    assert (tags[names.TAG_STEP], tags["mlflow.runName"]) == ("evaluate", "inner")


def test_what_a_user_says_of_a_run_is_what_it_is_called_and_where_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "MLFLOW_RUN_CONTEXT", '{"build": "17", "mlflow.runName": "of CI", "mlflow.note.content": "nightly"}'
    )
    with mlflow.start_run() as parent:
        pass
    experiment = f"made by {tmp_path.name}"
    given = {
        "run_name": "mine",
        "tags": '{"team": "vision"}',
        "parent_run": parent.info.run_id,
        "experiment": experiment,
    }
    options = load_options(TuneOptions, given)
    with (
        step_run("tune", options, "tune") as run,
        open_outbox(run.run_id, run.directory, keeps_name=run.is_named) as outbox,
    ):
        run.log_note("ours")
        outbox.put(Message(tags={"mlflow.runName": "tune x", "other": "y"}))
        with step_run("evaluate", OPTIONS, "evaluate") as inner:
            inner.log_tags({"mlflow.runName": "evaluate x"})
    found, below = mlflow.get_run(run.run_id), mlflow.get_run(inner.run_id)
    tags = {"team": "vision", "build": "17", "other": "y", "mlflow.parentRunId": parent.info.run_id}
    assert found.data.tags.items() >= {**tags, "mlflow.runName": "mine", "mlflow.note.content": "nightly"}.items()
    assert not given.keys() & found.data.params.keys()
    assert mlflow.get_experiment(found.info.experiment_id).name == experiment
    assert (below.info.run_name, below.info.experiment_id) == ("evaluate x", found.info.experiment_id)
    with step_run("tune", TuneOptions(), "tune") as run:
        run.log_tags({"mlflow.runName": "tune x"})
    assert mlflow.get_run(run.run_id).info.run_name == "of CI"
    monkeypatch.delenv("MLFLOW_RUN_CONTEXT")
    with step_run("tune", TuneOptions(run_name="later"), "tune", resume=run.run_id):
        pass
    with step_run("tune", TuneOptions(), "tune", resume=run.run_id) as run:
        run.log_tags({"mlflow.runName": "tune x"})
    assert mlflow.get_run(run.run_id).info.run_name == "later"


@pytest.mark.parametrize("given", [None, "mine", "tune mine"])
def test_a_name_that_mlflow_run_was_given_stays(monkeypatch: pytest.MonkeyPatch, given: str | None) -> None:
    with mlflow.start_run(run_name=given) as made:
        pass
    monkeypatch.setenv("MLFLOW_RUN_ID", made.info.run_id)
    with step_run("tune", TuneOptions(), "tune ours") as run:
        run.log_tags({"mlflow.runName": "tune ours"})
    assert run.run_id == made.info.run_id
    assert mlflow.get_run(run.run_id).info.run_name == (given or "tune ours")


def test_a_run_that_cannot_stand_where_it_is_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refused(match: str, **given: str) -> None:
        with pytest.raises(UserInputError, match=match), step_run("tune", load_options(TuneOptions, given), "tune"):
            pass

    with mlflow.start_run() as made:
        refused("is active, and a new one stands below it", parent_run="0" * 32)
    refused(f"cannot find parent_run={'0' * 32}", parent_run="0" * 32)
    deleted = mlflow.create_experiment(f"deleted {tmp_path}")
    mlflow.delete_experiment(deleted)
    refused("experiments restore", experiment=deleted)
    monkeypatch.setenv("MLFLOW_RUN_ID", made.info.run_id)
    refused("give --experiment-name to `mlflow run`", experiment=f"another of {tmp_path.name}")
    refused(r"tags=.*names do not begin with ansor\.", tags='{"ansor.step": "mine"}')


@pytest.mark.parametrize("num_sizes", [2, 600, 1500])
def test_parameters_that_mlflow_cuts_are_read_as_they_were(num_sizes: int) -> None:
    shapes = {"ids": [1, list(range(1000, 1000 + num_sizes))]}
    options = TuneOptions(network="some network.onnx", input_shapes=shapes)
    with step_run("tune", options, "tune") as run:
        pass
    used = params_used(mlflow.get_run(run.run_id), TuneOptions)
    assert load_options(TuneOptions, used) == options


def test_a_value_of_an_older_run_that_is_gone_is_left_out() -> None:
    with mlflow.start_run() as run:
        mlflow.log_params({"trials": "8", "build_workers": "ray://10.0.0.1:10001"})
    assert params_used(mlflow.get_run(run.info.run_id), TuneOptions) == {"trials": "8"}


def test_the_page_has_what_was_given_and_the_file_all_of_it(tmp_path: Path) -> None:
    """The file is one that the step takes, with nothing else."""
    given = TuneOptions(
        network="s3://me:hunter2@host/x.onnx", trials=8, input_shapes={"data": [1, 3]}, warm_start=("a",)
    )
    with step_run("tune", given, "tune x") as run:
        pass
    found = mlflow.get_run(run.run_id)
    assert found.data.params.keys() == {"network", "trials", "input_shapes", "warm_start", *names.SEARCH_PARAMS}
    text = mlflow.artifacts.load_text(f"runs:/{run.run_id}/{names.PARAMETERS_FILE}")
    assert "hunter2" not in text
    (tmp_path / "given.yaml").write_text(text)
    masked = load_options(TuneOptions, {}, str(tmp_path / "given.yaml"))
    assert masked == given.model_copy(update={"network": masked.network})
    assert load_options(TuneOptions, params_used(found, TuneOptions)) == masked


def test_metrics_are_logged_in_the_order_of_the_page() -> None:
    metrics = {names.TRIALS_MEASURED: 8.0, names.LATENCY_P90_MS: 2.0, names.BEST_LATENCY_MS: 1.0}
    metrics |= {names.SPEEDUP_VS_BEST: 1.23456789, names.LATENCY_MS: 1.0}
    ordered = as_logged(metrics)
    assert [*ordered] == [
        names.LATENCY_MS,
        names.SPEEDUP_VS_BEST,
        names.BEST_LATENCY_MS,
        names.LATENCY_P90_MS,
        names.TRIALS_MEASURED,
    ]
    assert ordered[names.SPEEDUP_VS_BEST] == 1.2346


def test_a_description_shows_whole_commands_or_none() -> None:
    for length in (10, 5000, 20_000):
        note = pipeline_note(
            "small", ["ansor-mlflow main --network " + "a" * length, "mlflow run . -P network=" + "a" * length]
        )
        assert len(note) < 8000
        assert ("    ansor-mlflow main" in note) == (length == 10)
        assert ("parameters are in `parameters.yaml`" in note) == (length != 10)


def test_credentials_in_uris_stay_out_of_params_tags_and_messages() -> None:
    options = EvaluateOptions(model_uri="https://bob:hunter@2@host/model")
    with step_run("evaluate", options, f"evaluate {options.model_uri}") as run:
        run.log_tags({names.TAG_MODEL_URI: options.model_uri})
    info, data = mlflow.get_run(run.run_id).info, mlflow.get_run(run.run_id).data
    assert data.params["model_uri"] == data.tags[names.TAG_MODEL_URI] == "https://…@host/model"
    assert info.run_name == "evaluate https://…@host/model"
    assert str(AnsorMlflowError(f"{options.model_uri}: no")) == "https://…@host/model: no"
    away = pytest.raises(MachineError, match="cannot read https://…@host/model: no connection")
    with away, translated_errors(f"read {options.model_uri}"):
        raise ConnectionError(f"{options.model_uri} is away")


def test_success_leaves_nothing_on_disk(tmp_path: Path) -> None:
    with step_run("evaluate", OPTIONS, "good") as run:
        record_a_trial(run)
    assert mlflow.get_run(run.run_id).info.status == "FINISHED"
    assert list(tmp_path.iterdir()) == []


def test_failure_leaves_records_and_the_message(tmp_path: Path) -> None:
    run, _ = fail("evaluate", OPTIONS, RecordsError("these are damaged"))
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


def test_a_run_that_begins_says_its_id_and_its_address(caplog: pytest.LogCaptureFixture, experiment_id: str) -> None:
    """After the command for a server, which the outer one of nested runs says for all."""
    caplog.set_level(logging.INFO, "ansor_mlflow")
    with step_run("main", PipelineOptions(), "outer") as outer, step_run("evaluate", OPTIONS, "inner") as inner:
        pass
    start, first, second = caplog.messages
    assert start == f"start  mlflow server --backend-store-uri {mlflow.get_tracking_uri()}"
    address = f"http://127.0.0.1:5000/#/experiments/{experiment_id}/runs"
    assert first == f"main run {outer.run_id}  {address}/{outer.run_id}?workflowType=machine_learning"
    assert second == f"evaluate run {inner.run_id}  {address}/{inner.run_id}?workflowType=machine_learning"


def test_an_address_is_that_of_the_server_without_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://bob:hunter2@mlflow.example.com:5000/team/")
    assert (
        run_address("1", "2")
        == "https://mlflow.example.com:5000/team/#/experiments/1/runs/2?workflowType=machine_learning"
    )


def fail(step: str, options: Options, error: BaseException, *, with_records: bool = True) -> tuple[StepRun, list[str]]:
    try:
        with step_run(step, options, step) as run:
            if with_records:
                record_a_trial(run)
            raise error
    except type(error) as raised:
        return run, [line for note in notes_of(raised) for line in note.splitlines()]


@pytest.mark.parametrize("error", [RecordsError("damaged"), KeyboardInterrupt(), ZeroDivisionError()])
def test_an_error_says_which_tuning_goes_on_and_how(error: BaseException) -> None:
    run, lines = fail("tune", TuneOptions(network="resnet-34", trials=640), error)
    assert lines == [f"run    {run.run_id}", f"go on  ansor-mlflow tune --resume-run {run.run_id}"]


def test_only_a_tuning_with_records_goes_on() -> None:
    tuning, lines = fail("tune", TuneOptions(), RecordsError("damaged"), with_records=False)
    assert lines == [f"run    {tuning.run_id}"]
    run, lines = fail("evaluate", OPTIONS, RecordsError("damaged"))
    assert lines == [f"run    {run.run_id}"]


def test_a_tuning_that_had_gone_on_with_other_parameters_goes_on_with_them() -> None:
    """Its run has those that it was started with."""
    run, lines = fail("tune", TuneOptions(resume_run="0" * 32, trials=2000), KeyboardInterrupt())
    assert lines[1] == f"go on  ansor-mlflow tune --trials 2000 --resume-run {run.run_id}"


def test_a_pipeline_goes_on_with_its_tuning_and_with_what_a_tuning_does_not_know() -> None:
    options = PipelineOptions(network="resnet-34", trials=640, turns=1, seed=3, register_as="it's", promote=True)
    tunings: list[str] = []

    def interrupted_pipeline() -> None:
        with step_run("main", options, "main"):
            tuning, lines = fail("tune", TuneOptions(), KeyboardInterrupt())
            assert lines == []  # it is the pipeline that says it
            tunings.append(tuning.run_id)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as raised:
        interrupted_pipeline()
    (note,) = notes_of(raised.value)
    first, second = note.splitlines()
    assert re.fullmatch(r"run    \w{32}", first)
    assert first.split()[1] != tunings[0]
    assert second.startswith("go on  ansor-mlflow main ")
    assert set(second.removeprefix("go on  ansor-mlflow main --").split(" --")) == {
        "seed 3",
        "turns 1",
        """register-as 'it'"'"'s'""",
        "promote true",
        f"resume-run {tunings[0]}",
    }


def test_what_mlflow_run_has_started_goes_on_in_the_same_way(
    monkeypatch: pytest.MonkeyPatch, experiment_id: str
) -> None:
    made = mlflow.MlflowClient().create_run(experiment_id).info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", made)
    run, lines = fail("tune", TuneOptions(), KeyboardInterrupt())
    assert run.run_id == made
    command = f"mlflow run . --env-manager local --experiment-id {experiment_id} -e tune -P resume_run={made}"
    assert lines == [f"run    {made}", f"go on  {command}"]


def test_a_step_of_a_pipeline_leaves_it_to_the_pipeline_how_that_goes_on(
    monkeypatch: pytest.MonkeyPatch, experiment_id: str
) -> None:
    tags = {"mlflow.parentRunId": "0" * 32}
    made = mlflow.MlflowClient().create_run(experiment_id, tags=tags).info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", made)
    _, lines = fail("tune", TuneOptions(), KeyboardInterrupt())
    assert lines == [f"run    {made}"]


def tune_while_the_server_goes_away(monkeypatch: pytest.MonkeyPatch, error: BaseException | None = None) -> StepRun:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr("ansor_mlflow.tracking.outbox.GRACE_S", 0.5)
    monkeypatch.setattr("ansor_mlflow.tracking.outbox.GRACE_AFTER_ERROR_S", 0.5)
    with step_run("tune", TuneOptions(), "tune") as run, open_outbox(run.run_id, run.directory) as outbox:
        record_a_trial(run)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
        outbox.put(Message(status="FINISHED"))
        if error:
            raise error
    return run


def test_a_tuning_that_is_whole_is_not_said_to_have_failed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    message = (
        r"^the tuning is whole, but 1 messages to the run \w+ are undelivered .* run ansor-mlflow sync in this dir"
    )
    with pytest.raises(UndeliveredError, match=message) as raised:
        tune_while_the_server_goes_away(monkeypatch)
    assert not [line for line in caplog.messages if "FAILED" in line or "marked" in line]
    (note,) = notes_of(raised.value)
    assert note.startswith("run    ")
    assert "go on" not in note  # it has ended; what is left is to be delivered
    assert mlflow.active_run() is None


def test_a_tuning_that_failed_while_the_server_was_away_is_marked_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    uri = mlflow.get_tracking_uri()
    with pytest.raises(KeyboardInterrupt) as raised:
        tune_while_the_server_goes_away(monkeypatch, KeyboardInterrupt())
    run, go_on = (line.split()[-1] for line in notes_of(raised.value)[0].splitlines())
    assert run == go_on
    warning = caplog.messages[-1]
    assert warning.startswith(f"the run {run} is not marked KILLED: ")
    assert warning.endswith("; ansor-mlflow sync does it when the server is back")
    assert mlflow.active_run() is None
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert [delivered.run_id for delivered in sync()] == [run]
    assert mlflow.get_run(run).info.status == "KILLED"
