"""The tracking server is the memory of a team: `warm_start=auto` finds what finished tunings know of the same tasks."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

import mlflow
import pytest
from helpers.commands import RunCommand, flags
from helpers.runs_here import QUICK, artifacts_of, newest_run, tune_here
from mlflow.entities import Run, RunTag

from ansor_mlflow import names
from ansor_mlflow.device import DeviceFingerprint
from ansor_mlflow.lowering import LoweredNetwork
from ansor_mlflow.records import RECORD_FILE, Provenance, device_key, why_not_applicable
from ansor_mlflow.settings import LoweringSettings
from ansor_mlflow.tracking import EarlierTuning, best_source, find_tunings, memory_tags
from ansor_mlflow.tracking.memory import short_hash

DEVICE = DeviceFingerprint(
    target={"kind": "llvm", "mcpu": "znver4", "num-cores": 2},
    machine="x86_64",
    cpu_model="AMD EPYC 9354",
    features=("avx2", "fma"),
    num_threads=2,
)
PROVENANCE = Provenance(
    network="small",
    from_file=False,
    network_sha256="",
    batch_size=1,
    input_shapes={},
    seed=0,
    target="auto",
    num_threads=2,
    lowering_version=6,
    tvm_version="0.27.0",
    host="",
    measure={},
    **vars(LoweringSettings(layout="auto", dtype="float32", pad_channels="auto")),
)
HASHES = [f"{0x1234567890ABCDEF * number % 2**64:#018x}" for number in range(1, 2001)]


@pytest.fixture
def here(empty_store: Path, small_onnx: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory to tune in, with a network and a tracking server of its own."""
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    shutil.copy(small_onnx, tmp_path / "small.onnx")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    experiment_id = mlflow.MlflowClient().create_experiment(str(tmp_path), (tmp_path / "artifacts").as_uri())
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", experiment_id)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def add_run(hashes: list[str], *, device: DeviceFingerprint = DEVICE, status: str = "FINISHED", **tags: str) -> str:
    client = mlflow.MlflowClient()
    run_id = str(client.create_run(os.environ["MLFLOW_EXPERIMENT_ID"]).info.run_id)
    all_tags = {**memory_tags(device, PROVENANCE, hashes), names.TAG_TRIALS_PER_TASK: "6.0"}
    all_tags |= {f"ansor.{name}": value for name, value in tags.items()}
    client.log_batch(run_id, tags=[RunTag(name, value) for name, value in all_tags.items()])
    if status != "RUNNING":
        client.set_terminated(run_id, status)
    return run_id


def found(hashes: list[str]) -> set[str]:
    return {tuning.run_id for tuning in find_tunings(DEVICE, hashes)}


def test_finished_runs_of_the_device_are_found_in_every_experiment(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished = {add_run(HASHES[:3])}
    for status in ("RUNNING", "FAILED", "KILLED"):
        add_run(HASHES[:3], status=status)
    add_run(HASHES[:3], device=DeviceFingerprint(**{**vars(DEVICE), "num_threads": 4}))
    mlflow.MlflowClient().delete_run(add_run(HASHES[:3]))
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", mlflow.MlflowClient().create_experiment("of somebody else"))
    finished.add(add_run(HASHES[:3]))
    assert found(HASHES[:3]) == finished


def test_a_run_is_found_behind_many_newer_ones_and_by_any_number_of_tasks(here: Path) -> None:
    wanted = add_run(HASHES)
    for _ in range(9):
        add_run(HASHES[:1])
    assert wanted not in found(HASHES[:1])  # eight others know it, too
    tunings = find_tunings(DEVICE, [HASHES[0], min(HASHES)])
    (tuning,) = [tuning for tuning in tunings if tuning.run_id == wanted]
    assert all(map(tuning.knows, HASHES))
    assert max(len(value) for value in mlflow.get_run(wanted).data.tags.values()) <= 5000


def test_tags_that_somebody_else_wrote_make_no_error(here: Path) -> None:
    run_id = add_run(
        HASHES[:1], trials_per_task="many", tvm_version="one", lowering_version="9" * 5000, workloads="x ' %"
    )
    (tuning,) = find_tunings(DEVICE, HASHES[:1])
    assert (tuning.run_id, tuning.trials_per_task, tuning.workloads) == (run_id, 0.0, {"x", "'", "%"})
    assert best_source([tuning], HASHES[:1], 6.0) is None


def tuning(
    name: str, tasks: str, *, tvm: int = 27, lowering: int = 6, trials: float = 6.0, at: int = 0
) -> EarlierTuning:
    """An earlier tuning of tasks that are called by one letter each."""
    return EarlierTuning(
        run_id=name,
        workloads=frozenset(map(short_hash, tasks)),
        versions=((0, tvm), (lowering,)),
        trials_per_task=trials,
        started_ms=at,
    )


@pytest.mark.parametrize(
    ("tunings", "expected"),
    [
        ([tuning("older", "ab", at=1), tuning("newer", "ab", at=2)], ["newer:ab"]),
        (
            [tuning("of a newer TVM", "a", tvm=100), tuning("of one task more", "ab")],
            ["of a newer TVM:a", "of one task more:b"],
        ),
        ([tuning("newer lowering", "ab", lowering=10, trials=1.0), tuning("longer", "ab")], ["newer lowering:ab"]),
        ([tuning("long enough", "ab", trials=6.0), tuning("quick", "ab", trials=2.0, at=9)], ["long enough:ab"]),
        (
            [tuning("few", "a", at=3), tuning("most", "abc", at=1), tuning("others", "cd", at=2)],
            ["most:abc", "others:d"],
        ),
        ([tuning("another", "xyz")], []),
    ],
)
def test_as_few_runs_as_cover_the_tasks_with_the_newest_versions_first(
    tunings: list[EarlierTuning], expected: list[str]
) -> None:
    missing, taken = set("abcd"), []
    while source := best_source(tunings, missing, 6.0):
        tunings = [other for other in tunings if other is not source[0]]
        taken.append(f"{source[0].run_id}:{''.join(sorted(source[1]))}")
        missing -= set(source[1])
    assert sorted(taken) == sorted(expected)


@pytest.mark.parametrize(
    "change",
    [
        {"num_threads": 4},
        {"cpu_model": "another"},
        {"machine": "aarch64"},
        {"features": ("avx2",)},
        {"target": {"kind": "llvm", "mcpu": "znver3", "num-cores": 2}},
        {"features": ("fma", "avx2")},
        {"target": {"kind": "llvm", "mcpu": "znver4", "num-cores": 2, "keys": ["cpu"], "opt-level": 3}},
    ],
)
def test_devices_with_one_key_are_those_whose_records_are_applied(change: dict[str, Any]) -> None:
    other = DeviceFingerprint(**{**vars(DEVICE), **change})
    assert (device_key(other) == device_key(DEVICE)) == (why_not_applicable(DEVICE, other) == "")


def sources_of(run: Run) -> dict[str, int]:
    rows = json.loads(mlflow.artifacts.load_text(f"runs:/{run.info.run_id}/{names.WARM_START_FILE}"))
    return {row["source"].removeprefix("runs:/"): row["num_tasks"] for row in rows}


@pytest.mark.system
def test_a_network_that_was_tuned_before_needs_no_trial(
    here: Path, run_here: RunCommand, small_lowered: LoweredNetwork, caplog: pytest.LogCaptureFixture
) -> None:
    num_tasks = len(small_lowered.tasks)
    first = tune_here(run_here, warm_start="auto")
    assert "the tracking server knows no task of this network on this device yet" in caplog.text
    assert first.data.metrics[names.TRIALS_MEASURED] == 12
    assert {names.TAG_DEVICE, names.TAG_TVM_VERSION, names.TAG_LOWERING_VERSION} <= first.data.tags.keys()
    assert len(first.data.tags[names.TAG_WORKLOADS].split()) == num_tasks

    second = tune_here(run_here, warm_start="auto")
    assert second.info.status == "FINISHED"
    assert second.data.tags[names.TAG_STOP_REASON] == "known"
    assert second.data.metrics[names.TRIALS_MEASURED] == 0
    assert second.data.metrics[names.BEST_LATENCY_MS] > 0
    words = rf"{num_tasks} of {num_tasks} tasks begin with earlier records \({num_tasks} of runs:/{first.info.run_id}\)"
    assert re.search(f"{words}; {num_tasks} of them need no trials", caplog.text)
    assert re.match(words, second.data.tags[names.TAG_WARM_START])
    assert sources_of(second) == {first.info.run_id: num_tasks}
    assert run_here("compile", "--tune-run", second.info.run_id) == 0
    assert newest_run().data.metrics[names.COVERAGE_TASKS] == 1

    more = tune_here(run_here, warm_start="auto", trials=24, seed=1)
    assert more.data.metrics[names.TRIALS_MEASURED] == 24
    assert more.data.metrics[names.WARM_START_TASKS] == num_tasks
    assert tune_here(run_here, warm_start="auto", trials=20).data.metrics[names.TRIALS_MEASURED] == 0
    assert not (here / ".ansor").exists()


@pytest.mark.system
@pytest.mark.nightly
def test_a_run_that_cannot_be_read_is_a_warning_and_another_takes_its_place(
    here: Path, run_here: RunCommand, caplog: pytest.LogCaptureFixture
) -> None:
    good, damaged = (tune_here(run_here, seed=seed).info.run_id for seed in range(2))
    best = artifacts_of(damaged) / names.RECORDS_DIR / names.BEST_DIR / RECORD_FILE
    best.write_bytes(best.read_bytes().replace(b"Split", b"Fused", 1) + b"\n")
    third = tune_here(run_here, warm_start="auto")
    assert sources_of(third).keys() == {good}
    assert third.data.metrics[names.TRIALS_MEASURED] == 0
    shutil.rmtree(artifacts_of(good))
    shutil.rmtree(artifacts_of(third.info.run_id))
    assert tune_here(run_here, warm_start="auto", trials=5).data.metrics[names.TRIALS_MEASURED] == 5
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert any(re.match(f"nothing is taken of run {damaged}: .*{RECORD_FILE}.*SHA-256", text) for text in warnings)
    assert any(re.match(f"nothing is taken of run {good}: .*has no records", text) for text in warnings)


@pytest.mark.system
@pytest.mark.nightly
def test_a_tuning_that_goes_on_has_the_tags(here: Path, run_here: RunCommand) -> None:
    run_id = tune_here(run_here).info.run_id
    client = mlflow.MlflowClient()
    for name in (names.TAG_DEVICE, names.TAG_WORKLOADS, names.TAG_TRIALS_PER_TASK):  # as in an earlier version
        client.delete_tag(run_id, name)
    assert run_here("tune", *flags({**QUICK, "network": "dense:4,16,16", "trials": 2, "warm_start": run_id})) == 0
    assert run_here("tune", "--resume-run", run_id, "--trials", "14") == 0
    tags = mlflow.get_run(run_id).data.tags
    assert float(tags[names.TAG_TRIALS_PER_TASK]) * len(tags[names.TAG_WORKLOADS].split()) == pytest.approx(14)
    assert sources_of(tune_here(run_here, warm_start="auto", seed=1)) == {
        run_id: len(tags[names.TAG_WORKLOADS].split())
    }
