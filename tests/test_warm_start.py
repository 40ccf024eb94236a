"""A tuning begins with the records of earlier ones: none is measured again, and none of another device is applied."""

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
from helpers.finished import FinishedWork
from helpers.runs_here import QUICK, artifacts_of, newest_run, tune_here

from ansor_mlflow import names
from ansor_mlflow.device.device import Device
from ansor_mlflow.device.fingerprints import fingerprint
from ansor_mlflow.device.threads import available_cpus
from ansor_mlflow.lowering.network import LoweredNetwork
from ansor_mlflow.parameters import MeasureOptions, SearchOptions, TuneOptions
from ansor_mlflow.records.log import RecordLog, read_seeds
from ansor_mlflow.records.pieces import write_manifest
from ansor_mlflow.records.store import RECORD_FILE, WORKLOAD_FILE
from ansor_mlflow.testing import FakeRunner
from ansor_mlflow.trials import StopReason
from ansor_mlflow.tuning.job import TuningJob, tune_job
from ansor_mlflow.tuning.program_search import TaskSearch, make_cost_model

if TYPE_CHECKING:
    from tvm.target import Target

pytestmark = pytest.mark.system  # whole pipelines


# -- the tuner ---------------------------------------------------------------------------------------------------------


def copy_database(source: Path, destination: Path) -> None:
    destination.mkdir(parents=True, exist_ok=True)
    for name in (WORKLOAD_FILE, RECORD_FILE):
        shutil.copyfile(source / name, destination / name)


def schedules(records: Path) -> list[str]:
    """The workload and the schedule of every record."""
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
        network="small",
        lowered=lowered,
        device=Device.of(target, available_cpus()),
        records=records,
        known=known,
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


def test_the_cost_model_learns_from_a_similar_device_and_keeps_its_times_apart(
    dense: LoweredNetwork, host_target: Target, tmp_path: Path
) -> None:
    tune(dense, host_target, tmp_path / "first", trials=48)
    (task, *_) = dense.tasks
    cost_model = make_cost_model("xgb", 1, 0)
    search = TaskSearch(
        task,
        target=host_target,
        strategy="evolutionary",
        num_trials_per_round=4,
        num_threads=1,
        seed=1,
        log=RecordLog(tmp_path / "second", host_target.export()),
        cost_model=cost_model,
    )
    records = RecordLog(tmp_path / "first", host_target.export()).earlier(task.info.workload_hash)
    assert records
    search.transfer(records, "a faster CPU")
    assert cost_model.data_size == len(records)
    search.remember(records[:2])
    assert cost_model.data_size == len(records) + 2
    assert sorted(len(group.costs) for group in cost_model.data.values()) == [2, len(records)]
    search.close()


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def tuned(finished_work: FinishedWork) -> str:
    """ID of a finished tuning run of a network from a file, with 12 trials."""
    return finished_work.tuned


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
    assert run_here("compile", "--tune-run", second) == 0
    assert newest_run().data.metrics[names.COVERAGE_TASKS] == 1


def test_a_tuning_begins_with_a_model_and_a_directory(
    tuned: str, finished_work: FinishedWork, run_here: RunCommand
) -> None:
    compiled = mlflow.get_run(finished_work.compiled)
    model_uri = compiled.data.tags[names.TAG_MODEL_URI]
    second = tune_here(run_here, warm_start=f"{model_uri}, {records_of(tuned)}").info.run_id
    of_model, of_directory = taken(second)
    assert of_model["num_applied"] == compiled.data.metrics[names.COVERAGE_TASKS] * len(records_of_best(tuned))
    assert of_directory["num_applied"]


def records_of_best(run_id: str) -> list[object]:
    return read_records(records_of(run_id) / names.BEST_DIR)


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
    ("source", "exit_code", "message"),
    [
        ("nowhere", 2, r"warm_start='nowhere' is neither a run's ID .* nor a file or directory of records; give one"),
        ("runs:/" + "0" * 32, 2, "cannot read the records of run 0+: .*not found"),
        ("models:/nothing/1", 2, "cannot read warm_start=models:/nothing/1: .*not found"),
        (",", 2, r"warm_start=',': it must be auto, run IDs, artifact URIs or paths, separated by commas"),
        ("small.onnx", 2, "records=small.onnx: the workload file small.onnx is missing beside small.onnx"),
    ],
)
def test_what_is_no_source(
    finished_work: FinishedWork,
    run_here: RunCommand,
    capsys: pytest.CaptureFixture[str],
    source: str,
    exit_code: int,
    message: str,
) -> None:
    assert run_here("tune", *flags({**QUICK, "network": "small.onnx", "trials": 12, "warm_start": source})) == exit_code
    assert_error(capsys, message)
    newest = newest_run().info  # no run, if it is known before
    assert newest.status == "FAILED" or newest.run_id == finished_work.compiled


def test_a_run_that_goes_on_has_its_records_already(
    tuned: str, run_here: RunCommand, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here("tune", "--resume-run", tuned, "--warm-start", "elsewhere") == 2
    assert_error(capsys, f"warm_start=elsewhere, but the run {tuned} has warm_start=.*; leave warm_start out, or start")


def test_a_run_goes_on_without_what_it_began_with(tuned: str, run_here: RunCommand) -> None:
    shutil.copytree(artifacts_of(tuned) / names.RECORDS_DIR, "given")
    second = tune_here(run_here, warm_start="given").info.run_id
    shutil.rmtree("given")
    assert run_here("tune", "--resume-run", second, "--trials", "16") == 0
    assert mlflow.get_run(second).data.metrics[names.TRIALS_MEASURED] == 16


def assert_error(capsys: pytest.CaptureFixture[str], message: str) -> None:
    (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("Error: ")]
    assert re.search(message, error), error


# -- the device --------------------------------------------------------------------------------------------------------


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


def test_tvm_takes_the_fastest_record_of_any_target_and_we_do_not(
    tuned: str, run_here: RunCommand, capsys: pytest.CaptureFixture[str], host_target: Target, tmp_path: Path
) -> None:
    """Records as TVM keeps them, without a fingerprint: each says for which target it is."""
    from tvm.s_tir.meta_schedule.database import JSONDatabase

    from ansor_mlflow.device.tvm_import import import_tensor_intrin

    foreign = tmp_path / "foreign"
    foreign.mkdir()
    shutil.copyfile(records_of(tuned) / WORKLOAD_FILE, foreign / WORKLOAD_FILE)
    target = {"kind": "llvm", "mcpu": "sandybridge", "num-cores": 64, "keys": ["cpu"]}
    lines = [
        [index, [trace, run_s, target, args]] for index, (trace, run_s, _, args) in read_records(records_of(tuned))
    ]
    (foreign / RECORD_FILE).write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    import_tensor_intrin("llvm")
    database = JSONDatabase(work_dir=str(foreign), allow_missing=False)
    mods = {record.workload.mod for record in database.get_all_tuning_records()}
    assert all(database.query_tuning_record(mod, host_target, "main") is not None for mod in mods)

    network = ["--network", "small.onnx", "--records", str(foreign)]
    assert run_here("compile", *network) == 5
    device = fingerprint(host_target, available_cpus()).description
    assert_error(capsys, f"the records are for llvm sandybridge ×64, this is {device}.*; tune on this device")
    assert run_here("compile", *network, "--allow-target-mismatch", "true") == 0
    mismatch = newest_run().data.tags[names.TAG_TARGET_MISMATCH]
    assert re.fullmatch(f"some records are not for {device} -O2: \\d+ for llvm sandybridge ×64", mismatch)
