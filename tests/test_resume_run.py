"""A tuning goes on, or begins with the records of earlier ones: none is measured again, none of another device used."""

from __future__ import annotations

import json
import logging
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import mlflow
import pytest
from helpers.commands import RunCommand, flags
from helpers.fake_tuning import NO_MODEL, read_records, tune
from helpers.fakes import FakeRunner
from helpers.finished import FinishedWork
from helpers.runs_here import QUICK, artifacts_of, newest_run, tune_here

from ansor_mlflow import names
from ansor_mlflow.device.device import Device
from ansor_mlflow.device.threads import available_cpus
from ansor_mlflow.lowering.network import LoweredNetwork
from ansor_mlflow.parameters import MeasureOptions, SearchOptions, TuneOptions
from ansor_mlflow.records.log import read_seeds
from ansor_mlflow.records.pieces import write_manifest
from ansor_mlflow.records.store import JOURNAL_FILE, RECORD_FILE, WORKLOAD_FILE
from ansor_mlflow.trials import StopReason
from ansor_mlflow.tuning.job import TuningJob, tune_job

if TYPE_CHECKING:
    from tvm.target import Target

pytestmark = pytest.mark.system  # whole pipelines


@pytest.fixture
def tuned(finished_work: FinishedWork) -> str:
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
    assert after.data.tags["mlflow.runName"].startswith("tune small · 20 trials · strategy random · cost model none · ")
    history = mlflow.MlflowClient().get_metric_history(tuned, names.TRIALS_MEASURED)
    steps = [metric.step for metric in history]
    assert steps == sorted(set(steps))
    assert steps[-1] == 20
    records = artifacts_of(tuned) / names.RECORDS_DIR
    assert len((records / RECORD_FILE).read_text().splitlines()) == 20
    assert len(json.loads((artifacts_of(tuned) / names.TRIALS_TABLE).read_text())["data"]) == 20
    assert len(mlflow.load_table(names.TRIALS_TABLE, run_ids=[tuned])) == 20
    assert not (tmp_path / ".ansor").exists()


@pytest.mark.nightly
def test_a_run_without_records_begins_again(tuned: str, run_here: RunCommand) -> None:
    """As one that was killed before it had any."""
    for path in (artifacts_of(tuned) / names.RECORDS_DIR).glob("*.json*"):
        path.unlink()
    assert run_here("tune", "--resume-run", tuned) == 0
    assert len((artifacts_of(tuned) / names.RECORDS_DIR / JOURNAL_FILE).read_text().splitlines()) >= 12


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--network", "resnet-34"], "network=resnet-34, but the run {run} has network=.*small.onnx; leave network"),
        (["--layout", "NCHW"], "layout=NCHW, but the run {run} has layout=auto; leave layout out, or start a new"),
    ],
)
def test_what_the_records_hang_on_cannot_change(
    tuned: str, run_here: RunCommand, capsys: pytest.CaptureFixture[str], given: list[str], message: str
) -> None:
    assert run_here("tune", "--resume-run", tuned, *given) == 2
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
    if field == "lowering_version":  # with the same tasks it would go on
        journal = path.with_name(JOURNAL_FILE)
        journal.write_text(re.sub(r"0x[0-9a-f]{16}", "0x" + "0" * 16, journal.read_text()))
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


@pytest.mark.nightly
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


def copy_database(source: Path, destination: Path) -> None:
    destination.mkdir(parents=True, exist_ok=True)
    for name in (WORKLOAD_FILE, RECORD_FILE):
        shutil.copyfile(source / name, destination / name)


def schedules(records: Path) -> list[str]:
    hashes = [json.loads(line)[0] for line in (records / WORKLOAD_FILE).read_text().splitlines()]
    return [json.dumps([hashes[index], trace]) for index, (trace, *_) in read_records(records)]


def test_a_program_that_has_a_record_is_not_measured_again(
    dense: LoweredNetwork, host_target: Target, tmp_path: Path
) -> None:
    tune(dense, host_target, tmp_path / "first", trials=16)
    copy_database(tmp_path / "first", tmp_path / "second")
    runner = FakeRunner()
    result = tune(dense, host_target, tmp_path / "second", trials=16, runner=runner)
    assert result.total_trials == len({job.path for job in runner.jobs}) == 16
    assert len(set(schedules(tmp_path / "second"))) == len(schedules(tmp_path / "second")) == 32


def job_for(lowered: LoweredNetwork, target: Target, records: Path, known: frozenset[str] = frozenset()) -> TuningJob:
    return TuningJob(
        network="small", lowered=lowered, device=Device.of(target, available_cpus()), records=records, known=known
    )


def hashes_of(lowered: LoweredNetwork) -> list[str]:
    return [task.info.workload_hash for task in lowered.tasks]


def test_of_tasks_that_are_known_nothing_is_measured(
    small_lowered: LoweredNetwork, host_target: Target, tuned_records: Path, tmp_path: Path
) -> None:
    copy_database(tuned_records, tmp_path)
    before = (tmp_path / RECORD_FILE).read_bytes()
    job = job_for(small_lowered, host_target, tmp_path, frozenset(hashes_of(small_lowered)))
    result = tune_job(job, SearchOptions(**NO_MODEL), MeasureOptions())
    assert (result.total_trials, result.stop_reason) == (0, StopReason.KNOWN)
    assert {task.stop_reason for task in result.tasks} == {StopReason.KNOWN}
    assert result.estimated_latency_s
    assert (tmp_path / RECORD_FILE).read_bytes() == before
    assert len(read_records(tmp_path / names.BEST_DIR)) == len(small_lowered.tasks)


def test_the_budget_of_known_tasks_is_not_spent(
    small_lowered: LoweredNetwork, host_target: Target, tuned_records: Path, tmp_path: Path
) -> None:
    copy_database(tuned_records, tmp_path)
    others = hashes_of(small_lowered)[1:]
    job = job_for(small_lowered, host_target, tmp_path, frozenset(others))
    options = TuneOptions(**NO_MODEL, trials=2 * len(small_lowered.tasks), min_repeat_ms=0)
    result = tune_job(job, options, options)
    assert result.total_trials == 2
    assert [task.total_trials for task in result.tasks] == [2] + [0] * len(others)
    num_earlier, seeds = read_seeds(tmp_path)
    assert num_earlier == len(read_records(tuned_records))
    assert {seed.workload_hash for seed in seeds if seed.is_enough} == set(others)
    resumed = tune_job(job_for(small_lowered, host_target, tmp_path), options, options, resume=True)
    assert [task.total_trials for task in resumed.tasks] == [2] + [0] * len(others)


def test_a_record_whose_schedule_does_not_apply_is_left_out(
    small_lowered: LoweredNetwork,
    host_target: Target,
    tuned_records: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    copy_database(tuned_records, tmp_path)
    records = read_records(tmp_path)
    foreign = next(record for record in records if record[0] != records[0][0])
    with (tmp_path / RECORD_FILE).open("a") as file:
        file.write(json.dumps([records[0][0], [foreign[1][0], [2e-9], *records[0][1][2:]]]) + "\n")
    job = job_for(small_lowered, host_target, tmp_path, frozenset(hashes_of(small_lowered)))
    with caplog.at_level(logging.WARNING, "ansor_mlflow"):
        result = tune_job(job, SearchOptions(**NO_MODEL), MeasureOptions())
    assert "does not apply to the task, and is left out" in caplog.text
    assert result.total_trials == 0
    assert 2e-9 not in [record[1][1][0] for record in read_records(tmp_path / names.BEST_DIR)]


def records_of(run_id: str) -> Path:
    return artifacts_of(run_id) / names.RECORDS_DIR


def taken(run_id: str) -> list[dict[str, object]]:
    text = mlflow.artifacts.load_text(f"runs:/{run_id}/{names.WARM_START_FILE}")
    return list(json.loads(text))


def test_a_tuning_begins_with_another_run(tuned: str, run_here: RunCommand) -> None:
    second = tune_here(run_here, warm_start=f"runs:/{tuned}", seed=1).info.run_id
    metrics = mlflow.get_run(second).data.metrics
    assert metrics[names.WARM_START_APPLIED] >= metrics[names.WARM_START_TASKS] > 0
    assert metrics[names.WARM_START_TRANSFERRED] == 0
    assert metrics[names.TRIALS_MEASURED] == 12
    num_taken = int(metrics[names.WARM_START_APPLIED])
    lines = (records_of(second) / RECORD_FILE).read_text().splitlines()
    assert len(lines) == num_taken + 12
    earlier = schedules(records_of(tuned))
    assert len([text for text in earlier if text in schedules(records_of(second))]) >= num_taken - 6
    (source,) = taken(second)
    assert (source["source"], source["num_applied"], source["note"]) == (f"runs:/{tuned}", num_taken, "")
    history = mlflow.MlflowClient().get_metric_history(second, names.BEST_LATENCY_MS)
    assert history[0].step == 1  # every task has a record

    assert run_here("tune", "--resume-run", second, "--trials", "16") == 0
    assert mlflow.get_run(second).data.metrics[names.TRIALS_MEASURED] == 16
    assert len((records_of(second) / RECORD_FILE).read_text().splitlines()) == num_taken + 16


@pytest.mark.nightly
def test_a_tuning_begins_with_a_model_and_a_directory(
    tuned: str, finished_work: FinishedWork, run_here: RunCommand
) -> None:
    compiled = mlflow.get_run(finished_work.compiled)
    model_uri = compiled.data.tags[names.TAG_MODEL_URI]
    second = tune_here(run_here, warm_start=f"{model_uri}, {records_of(tuned)}").info.run_id
    of_model, of_directory = taken(second)
    num_best = len(read_records(records_of(tuned) / names.BEST_DIR))
    assert of_model["num_applied"] == compiled.data.metrics[names.COVERAGE_TASKS] * num_best
    assert of_directory["num_applied"]


@pytest.mark.nightly
def test_records_of_a_similar_device_only_teach_the_cost_model(
    tuned: str, run_here: RunCommand, caplog: pytest.LogCaptureFixture
) -> None:
    path = records_of(tuned) / names.FINGERPRINT_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), "cpu_model": "a faster one"}))
    write_manifest(path.parent, path.with_name(names.MANIFEST_FILE))
    second = tune_here(run_here, warm_start=tuned, strategy="evolutionary", cost_model="xgb").info.run_id
    metrics = mlflow.get_run(second).data.metrics
    assert metrics[names.WARM_START_APPLIED] == 0
    assert metrics[names.WARM_START_TRANSFERRED] == 12
    assert len((records_of(second) / RECORD_FILE).read_text().splitlines()) == 12
    assert len(read_records(records_of(second) / names.SIMILAR_DIR)) == 12
    reason = r"0 of 12 records are taken; the records are for .* on a faster one, this is .*; the cost model learns fro"
    assert re.search(reason, caplog.text)
    assert "on a faster one" in str(taken(second)[0]["note"])


def test_records_of_other_tasks_are_not_taken(
    tuned: str, run_here: RunCommand, caplog: pytest.LogCaptureFixture
) -> None:
    second = tune_here(run_here, warm_start=tuned, network="dense:4,16,16", trials=2).info.run_id
    assert mlflow.get_run(second).data.metrics[names.WARM_START_APPLIED] == 0
    assert re.search(f"{tuned}: 0 of 12 records are taken; none is for a task of this network", caplog.text)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere", r"warm_start='nowhere' is neither a run's ID .* nor a file or directory of records; give one"),
        ("runs:/" + "0" * 32, "cannot read the records of run 0+: .*not found"),
        ("models:/nothing/1", "cannot read warm_start=models:/nothing/1: .*not found"),
        (",", r"warm_start=',': it must be auto, run IDs, artifact URIs or paths, separated by commas"),
        ("small.onnx", "records=small.onnx: the workload file small.onnx is missing beside small.onnx"),
    ],
)
def test_what_is_no_source(
    finished_work: FinishedWork,
    run_here: RunCommand,
    capsys: pytest.CaptureFixture[str],
    source: str,
    message: str,
) -> None:
    assert run_here("tune", *flags({**QUICK, "network": "small.onnx", "trials": 12, "warm_start": source})) == 2
    assert_error(capsys, message)
    newest = newest_run().info  # no run, if it is known before
    assert newest.status == "FAILED" or newest.run_id == finished_work.compiled


@pytest.mark.nightly
def test_a_run_goes_on_without_what_it_began_with(tuned: str, run_here: RunCommand) -> None:
    shutil.copytree(artifacts_of(tuned) / names.RECORDS_DIR, "given")
    second = tune_here(run_here, warm_start="given").info.run_id
    shutil.rmtree("given")
    assert run_here("tune", "--resume-run", second, "--trials", "16") == 0
    assert mlflow.get_run(second).data.metrics[names.TRIALS_MEASURED] == 16


def test_records_of_another_device_are_not_compiled_unless_that_is_allowed(
    tuned: str, run_here: RunCommand, capsys: pytest.CaptureFixture[str]
) -> None:
    path = records_of(tuned) / names.FINGERPRINT_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), "cpu_model": "a faster one"}))
    write_manifest(path.parent, path.with_name(names.MANIFEST_FILE))
    assert run_here("compile", "--tune-run", tuned) == 5
    reason = r"the records are for llvm \S+ ×\d+ on a faster one, this is llvm \S+ ×\d+ on "
    assert_error(capsys, f"{reason}.*; tune on this device, or give allow_target_mismatch=true to apply them neverth")
    assert run_here("compile", "--tune-run", tuned, "--allow-target-mismatch") == 0
    run = newest_run()
    assert re.match(reason, run.data.tags[names.TAG_TARGET_MISMATCH])
    assert run.data.params["allow_target_mismatch"] == "true"
    assert run.data.metrics[names.COVERAGE_TASKS] == 1
    model = mlflow.models.get_model_info(run.data.tags[names.TAG_MODEL_URI])
    (library,) = model.flavors["tvm"]["libraries"]
    assert re.match(reason, library["provenance"]["target_mismatch"])
