"""A tuning run goes on: the same run, the same axis, its own parameters."""

from __future__ import annotations

import json
import re
from pathlib import Path

import mlflow
import pytest
from helpers.commands import RunCommand
from helpers.finished import FinishedWork
from helpers.runs_here import artifacts_of, newest_run

from ansor_mlflow import names
from ansor_mlflow.records.pieces import write_manifest
from ansor_mlflow.records.store import JOURNAL_FILE, RECORD_FILE

pytestmark = pytest.mark.system  # whole pipelines


@pytest.fixture
def tuned(finished_work: FinishedWork) -> str:
    """ID of a finished tuning run of a network from a file, with 12 trials."""
    return finished_work.tuned


def test_a_finished_run_goes_on_with_more_trials(
    tuned: str, finished_work: FinishedWork, run_here: RunCommand, tmp_path: Path
) -> None:
    """Its network is the copy that it has."""
    (tmp_path / "small.onnx").unlink()
    before = mlflow.get_run(tuned)
    mlflow.MlflowClient().set_tag(tuned, names.TAG_ERROR, "of an earlier end")
    assert run_here("tune", "--resume-run", tuned, "--trials", "20") == 0
    runs = mlflow.MlflowClient().search_runs([finished_work.experiment_id])
    assert {run.info.run_id for run in runs} == {tuned, finished_work.compiled}
    after = mlflow.get_run(tuned)
    assert after.info.status == "FINISHED"
    assert after.data.params == before.data.params
    assert names.TAG_ERROR not in after.data.tags
    assert after.data.tags[names.TAG_NUM_TRIALS] == "20"
    assert after.data.tags["mlflow.runName"].endswith(" · 20 trials · strategy random · cost model none")
    history = mlflow.MlflowClient().get_metric_history(tuned, names.TRIALS_MEASURED)
    steps = [metric.step for metric in history]
    assert steps == sorted(set(steps))
    assert steps[-1] == 20
    records = artifacts_of(tuned) / names.RECORDS_DIR
    assert len((records / RECORD_FILE).read_text().splitlines()) == 20
    assert len(json.loads((artifacts_of(tuned) / names.TRIALS_TABLE).read_text())["data"]) == 20
    assert len(mlflow.load_table(names.TRIALS_TABLE, run_ids=[tuned])) == 20
    assert not (tmp_path / ".ansor").exists()


def test_a_run_that_has_its_trials_ends_at_once(tuned: str, run_here: RunCommand) -> None:
    assert run_here("tune", "--resume-run", tuned) == 0
    assert mlflow.get_run(tuned).data.metrics[names.TRIALS_MEASURED] == 12


def test_a_run_without_records_begins_again(tuned: str, run_here: RunCommand) -> None:
    """As one that was killed before it had any."""
    for path in (artifacts_of(tuned) / names.RECORDS_DIR).glob("*.json*"):
        path.unlink()
    assert run_here("tune", "--resume-run", tuned) == 0
    assert len((artifacts_of(tuned) / names.RECORDS_DIR / JOURNAL_FILE).read_text().splitlines()) >= 12


@pytest.mark.parametrize(
    ("given", "exit_code", "message"),
    [
        (
            ["--network", "resnet-34"],
            2,
            "network=resnet-34, but the run {run} has network=.*small.onnx; leave network",
        ),
        (["--layout", "NCHW"], 2, "layout=NCHW, but the run {run} has layout=auto; leave layout out, or start a new"),
    ],
)
def test_what_the_records_hang_on_cannot_change(
    tuned: str, run_here: RunCommand, capsys: pytest.CaptureFixture[str], given: list[str], exit_code: int, message: str
) -> None:
    assert run_here("tune", "--resume-run", tuned, *given) == exit_code
    assert_error(capsys, message.format(run=tuned))
    assert mlflow.get_run(tuned).info.status == "FINISHED"


def test_records_of_another_device_are_refused(
    tuned: str, run_here: RunCommand, capsys: pytest.CaptureFixture[str]
) -> None:
    path = artifacts_of(tuned) / names.RECORDS_DIR / names.FINGERPRINT_FILE
    fields = json.loads(path.read_text())
    fields["target"]["mcpu"] = "penryn"
    path.write_text(json.dumps(fields))
    write_manifest(path.parent, path.with_name(names.MANIFEST_FILE))
    assert run_here("tune", "--resume-run", tuned, "--trials", "20") == 5
    assert_error(
        capsys, "resume_run=.*: the records are for llvm penryn ×. -O2, this is llvm .*; resume it on such a device"
    )


def test_records_that_were_changed_are_refused(
    tuned: str, run_here: RunCommand, capsys: pytest.CaptureFixture[str]
) -> None:
    path = artifacts_of(tuned) / names.RECORDS_DIR / RECORD_FILE
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(reversed(lines)))
    for command in (["tune", "--resume-run", tuned], ["compile", "--tune-run", tuned]):
        assert run_here(*command) == 5
        changed = (
            f"{RECORD_FILE} of run {tuned}: it is not the file whose SHA-256 is in {names.MANIFEST_FILE}: .* try again"
        )
        assert_error(
            capsys, rf"{changed}, .*`mlflow artifacts download --run-id {tuned} .* records verify records --repair`"
        )


@pytest.mark.parametrize(("field", "value"), [("lowering_version", 1), ("network_sha256", "0" * 64)])
def test_records_of_other_tasks_are_refused(
    tuned: str, run_here: RunCommand, capsys: pytest.CaptureFixture[str], field: str, value: object
) -> None:
    path = artifacts_of(tuned) / names.RECORDS_DIR / names.PROVENANCE_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    write_manifest(path.parent, path.with_name(names.MANIFEST_FILE))
    assert run_here("tune", "--resume-run", tuned, "--trials", "20") == 5
    assert_error(capsys, "resume_run=.*: the network has other tasks today than the run tuned .*; start a new tuning")


@pytest.mark.parametrize("other", ["0" * 32, "evaluate"])
def test_what_is_no_tuning_run_cannot_go_on(
    new_experiment: str, run_here: RunCommand, capsys: pytest.CaptureFixture[str], other: str
) -> None:
    if other == "evaluate":
        run = mlflow.MlflowClient().create_run(new_experiment, tags={names.TAG_STEP: "evaluate"})
        other = run.info.run_id
    assert run_here("tune", "--resume-run", other) == 2
    assert_error(capsys, f"cannot resume the run {other}: .*not found|resume_run={other}: it is not a tuning run; give")


def assert_error(capsys: pytest.CaptureFixture[str], message: str) -> None:

    (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("Error: ")]
    assert re.search(message, error), error


def test_a_tuning_whose_time_was_too_short_is_compiled_and_goes_on(
    new_experiment: str,
    run_here: RunCommand,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A second is enough for some of nineteen tasks. The line that says so has the command that goes on."""
    monkeypatch.chdir(tmp_path)
    assert run_here("tune", "--network", "bert-tiny", "--max-minutes", "0.02") == 0
    tuned = newest_run()
    assert tuned.data.tags[names.TAG_STOP_REASON] == "minutes"
    printed = " ".join(capsys.readouterr().err.split())
    found = re.search(r"max_minutes=0.02 was too short: (\d+) of 19 tasks have no valid trial", printed)
    assert found
    assert f"without a valid trial: {found[1]} of 19 tasks" in tuned.data.tags["mlflow.note.content"]
    assert run_here("compile", "--tune-run", tuned.info.run_id) == 0
    assert 0 < newest_run().data.metrics[names.COVERAGE_TASKS] < 1
    command = re.search(r"go on with ansor-mlflow (tune --resume-run \w+ --max-minutes [\d.]+)", printed)
    assert command
    assert run_here(*command[1].split(), "--trials", "20") == 0
    after = mlflow.get_run(tuned.info.run_id)
    assert after.data.metrics[names.TRIALS_MEASURED] > tuned.data.metrics[names.TRIALS_MEASURED]
