"""Two tunings are compared task by task, and what is noise is called noise."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import mlflow
import pytest
from helpers.commands import RunCommand
from helpers.fake_tuning import read_records
from helpers.finished import FinishedWork
from helpers.runs_here import artifacts_of, tune_here

from ansor_mlflow import names
from ansor_mlflow.commands.diff import TuningDifference, diff_runs
from ansor_mlflow.parameters import DiffOptions
from ansor_mlflow.records import RECORD_FILE, write_manifest

pytestmark = pytest.mark.system  # whole pipelines


@pytest.fixture
def tuned(finished_work: FinishedWork) -> str:
    run_id = finished_work.tuned
    set_error(run_id, 0.01)  # these tasks take microseconds, and are noisy
    if names.TAG_UNRELIABLE in mlflow.get_run(run_id).data.tags:  # the machine may be busy
        mlflow.MlflowClient().delete_tag(run_id, names.TAG_UNRELIABLE)
    return run_id


def copy_of(run_id: str) -> str:
    """ID of a run with the same params, tags and artifacts."""
    run = mlflow.get_run(run_id)
    copy = mlflow.MlflowClient().create_run(run.info.experiment_id, tags=run.data.tags)
    for name, value in run.data.params.items():
        mlflow.MlflowClient().log_param(copy.info.run_id, name, value)
    shutil.copytree(artifacts_of(run_id), artifacts_of(copy.info.run_id), dirs_exist_ok=True)
    return str(copy.info.run_id)


def set_error(run_id: str, error: float) -> None:
    path = artifacts_of(run_id) / names.TASKS_FILE
    path.write_text(json.dumps([{**row, "confirmed_error": error} for row in json.loads(path.read_text())]))


def change_times(run_id: str, factor: float, only: int | None = None) -> None:
    """Multiplies the times of the winners, or of one of them."""
    best = artifacts_of(run_id) / names.RECORDS_DIR / names.BEST_DIR / RECORD_FILE
    lines = [
        [index, [trace, [s * factor if only in (None, index) else s for s in run_s], *rest]]
        for index, (trace, run_s, *rest) in read_records(best.parent)
    ]
    best.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    seal(run_id)


def seal(run_id: str) -> None:
    records = artifacts_of(run_id) / names.RECORDS_DIR
    write_manifest(records, records / names.MANIFEST_FILE)


def diff(first: str, second: str) -> TuningDifference:
    return diff_runs(DiffOptions(runs=(first, second)))


def verdicts(difference: TuningDifference) -> dict[str, str]:
    return {task.task: task.verdict for task in difference.tasks}


def test_a_run_does_not_differ_from_itself(tuned: str, run_here: RunCommand) -> None:
    difference = diff(tuned, tuned)
    assert set(verdicts(difference).values()) == {"same"}
    assert {task.ratio for task in difference.tasks} == {1.0}
    assert sum(task.share for task in difference.tasks) == pytest.approx(1)
    assert (difference.ratio, difference.params, difference.device, difference.versions) == (1.0, {}, {}, {})
    assert run_here("diff", tuned, tuned, "--fail-if-slower", "0%") == 0


@pytest.mark.parametrize(("factor", "verdict"), [(0.5, "faster"), (1.0, "same"), (1.5, "slower")])
def test_one_task_differs(tuned: str, factor: float, verdict: str) -> None:
    other = copy_of(tuned)
    change_times(other, factor, only=0)
    difference = diff(tuned, other)
    counts = list(verdicts(difference).values())
    assert counts.count("same") == len(counts) - (verdict != "same")
    assert verdict in counts
    (changed, *_) = [task for task in difference.tasks if task.verdict == verdict]
    assert changed.ratio == pytest.approx(factor)
    assert difference.ratio is not None
    assert difference.ratio == pytest.approx(1 + changed.share * (factor - 1)) or verdict == "same"


def test_a_difference_within_the_noise_is_none(tuned: str) -> None:
    other = copy_of(tuned)
    for run_id in (tuned, other):
        set_error(run_id, 0.05)
    change_times(other, 1.14)
    assert set(verdicts(diff(tuned, other)).values()) == {"same"}  # within 2 * sqrt(2) * 5 %
    change_times(other, 1.02)
    assert set(verdicts(diff(tuned, other)).values()) == {"slower"}


def test_times_that_cannot_be_trusted_are_compared_with_a_word_and_fail_only_when_forced(
    tuned: str, run_here: RunCommand, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    other = copy_of(tuned)
    change_times(other, 1.5)
    gate = ("diff", tuned, other, "--fail-if-slower", "3%")
    assert run_here(*gate) == 8
    mlflow.MlflowClient().set_tag(other, names.TAG_UNRELIABLE, "other programs used the CPUs")
    capsys.readouterr()
    assert run_here(*gate) == 0
    said = " ".join("".join(capsys.readouterr()).split())
    assert f"the times cannot be trusted: {other}: other programs used the CPUs" in said
    assert "% slower than" in caplog.text
    assert run_here(*gate, "--force") == 8
    assert diff(tuned, other).unreliable == f"{other}: other programs used the CPUs"
    assert diff(tuned, tuned).unreliable == ""
    assert "the times cannot be trusted" in caplog.text


def test_tasks_whose_records_are_lost_are_found(
    tuned: str, run_here: RunCommand, capsys: pytest.CaptureFixture[str]
) -> None:
    other = copy_of(tuned)
    records = artifacts_of(other) / names.RECORDS_DIR
    for directory in (records, records / names.BEST_DIR):
        lines = [json.dumps(line) for line in read_records(directory) if line[0] % 2]
        (directory / RECORD_FILE).write_text("\n".join(lines) + "\n")
    seal(other)
    kept = {line[0] for line in read_records(records / names.BEST_DIR)}
    all_ = read_records(artifacts_of(tuned) / names.RECORDS_DIR / names.BEST_DIR)
    difference = diff(tuned, other)
    found = verdicts(difference)
    assert list(found.values()).count("only_first") == len(all_) - len(kept) > 0
    assert list(found.values()).count("same") == len(kept)
    assert list(verdicts(diff(other, tuned)).values()).count("only_second") == len(all_) - len(kept)
    lost = next(task.task for task in difference.tasks if task.verdict == "only_first")
    assert run_here("diff", tuned, other, "--fail-if-slower", "3%") == 8
    assert (
        f"no record of {len(all_) - len(kept)} tasks that {tuned} has, such as {lost}; tune" in capsys.readouterr().err
    )


def test_what_else_differs(tuned: str, run_here: RunCommand) -> None:
    other = tune_here(run_here, seed=3, trials=14).info.run_id
    path = artifacts_of(other) / names.RECORDS_DIR / names.FINGERPRINT_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), "cpu_model": "another"}))
    seal(other)
    environment = artifacts_of(other) / names.ENVIRONMENT_FILE
    fields = json.loads(environment.read_text())
    environment.write_text(json.dumps({**fields, "packages": {**fields["packages"], "apache-tvm": "9.9"}}))
    difference = diff(tuned, other)
    assert difference.params == {"seed": ("0", "3"), "trials": ("12", "14"), "num_trials": ("12", "14")}
    assert set(difference.device) == {"cpu_model"}
    assert difference.versions == {"apache-tvm": (fields["packages"]["apache-tvm"], "9.9")}


def test_models_and_compilations_stand_for_their_tuning(tuned: str, finished_work: FinishedWork) -> None:
    compiled = mlflow.get_run(finished_work.compiled)
    model_uri = compiled.data.tags[names.TAG_MODEL_URI]
    name = f"diff-{tuned}"
    mlflow.register_model(model_uri, name)
    for given in (compiled.info.run_id, model_uri, f"models:/{name}/1", f"runs:/{tuned}"):
        difference = diff(tuned, given)
        assert difference.second.run_id == tuned
        assert difference.second.given == given
        assert set(verdicts(difference).values()) == {"same"}


def test_latencies_that_were_measured_decide(tuned: str, run_here: RunCommand) -> None:
    """A pipeline's parent carries what `evaluate` measured."""
    mains = []
    for latency_ms in (2.0, 2.1):
        tags = {names.TAG_STEP: "main", names.TAG_TUNE_RUN: tuned}
        experiment_id = mlflow.get_run(tuned).info.experiment_id
        mains.append(mlflow.MlflowClient().create_run(experiment_id, tags=tags).info.run_id)
        mlflow.MlflowClient().log_metric(mains[-1], names.LATENCY_MS, latency_ms)
    assert diff(*mains).ratio == pytest.approx(1.05)
    assert run_here("diff", *mains, "--fail-if-slower", "6%") == 0
    assert run_here("diff", *mains, "--fail-if-slower", "0.04") == 8
    assert run_here("diff", *reversed(mains), "--fail-if-slower", "0") == 0


def test_what_is_printed_and_written(
    tuned: str, run_here: RunCommand, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    other = copy_of(tuned)
    change_times(other, 2.0)
    capsys.readouterr()
    assert run_here("diff", tuned, other, "--json", "diff.json") == 0
    printed = capsys.readouterr().out
    num_tasks = len(diff(tuned, other).tasks)
    assert f"B against A: 0 tasks faster, {num_tasks} slower, 0 the same within the noise" in printed
    assert re.search(r"estimated, tasks of both: .* [mµ]?s, .* [mµ]?s \(\+100\.0%\)", printed)
    assert re.search(r"^fused_\S+ +\d+ +\d+\.\d% +\d+\.\d +\d+\.\d +2\.000 +± \d+\.\d% +slower$", printed, re.MULTILINE)
    written = json.loads((tmp_path / "diff.json").read_text())
    assert written["second"]["run_id"] == other
    assert len(written["tasks"]) == num_tasks
    assert run_here("diff", tuned, other, "--fail-if-slower", "50%") == 8
    message = rf"Error: {other} is 100\.0% slower than {tuned}, allowed are 50\.0%; look at \S+ first"
    assert re.search(message, capsys.readouterr().err)


def test_a_page_says_the_same(tuned: str, run_here: RunCommand, tmp_path: Path) -> None:
    """Without anything from a network, and whatever a run is called."""
    other = copy_of(tuned)
    mlflow.MlflowClient().set_tag(other, "mlflow.runName", "<script>alert(1)</script>")
    change_times(other, 2.0)
    assert run_here("diff", tuned, other, "--html", "diff.html") == 0
    page = (tmp_path / "diff.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert not re.search(r"(src|href)=", page)
    num_tasks = len(diff(tuned, other).tasks)
    assert page.count("<tr class=red>") == page.count("<td class=number>2.000</td>") == num_tasks
    assert f"{num_tasks} slower" in page


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (["TUNED"], 2, "runs=.*: it must be two runs"),
        (["TUNED", "0" * 32], 2, "cannot read 0+: .*not found"),
        (["TUNED", "OTHER"], 2, "it comes from no tuning run; give one of tune, compile, evaluate or main"),
        (
            ["TUNED", "TUNED", "--html", "no/such/folder"],
            2,
            "html=no/such/folder: it cannot be written .*; give another",
        ),
        (["TUNED", "KILLED"], 5, "the tuning run .* did not end; let it go on with resume_run="),
        (
            ["TUNED", "TUNED", "--fail-if-slower", "fast"],
            2,
            "fail_if_slower='fast': it must be a share such as 3% or 0",
        ),
    ],
)
def test_bad_input(
    tuned: str,
    run_here: RunCommand,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    exit_code: int,
    message: str,
) -> None:
    client = mlflow.MlflowClient()
    experiment_id = mlflow.get_run(tuned).info.experiment_id
    ids = {
        "TUNED": tuned,
        "OTHER": client.create_run(experiment_id).info.run_id,
        "KILLED": client.create_run(experiment_id, tags={names.TAG_STEP: "tune"}).info.run_id,
    }
    assert run_here("diff", *(ids.get(argument, argument) for argument in arguments)) == exit_code
    assert re.search(f"^Error: .*{message}", capsys.readouterr().err, re.MULTILINE)
