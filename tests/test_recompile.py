"""The model of an old run is built again, with the records that still apply."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
from helpers.commands import RunCommand, flags
from helpers.fake_tuning import read_records
from helpers.runs_here import artifacts_of, newest_run, tune_here

from ansor_mlflow import flavor, names
from ansor_mlflow.records.store import RECORD_FILE, WORKLOAD_FILE
from ansor_mlflow.records.transfer.manifest import write_manifest

pytestmark = pytest.mark.system  # whole pipelines


@pytest.fixture
def tuned(
    small_onnx: Path, new_experiment: str, run_here: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> mlflow.entities.Run:
    """A tuning run of a network from a file, which is gone since."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(small_onnx, "small.onnx")
    run = tune_here(run_here)
    Path("small.onnx").unlink()
    return run


@pytest.fixture
def compiled(tuned: mlflow.entities.Run, run_here: RunCommand) -> mlflow.entities.Run:
    """A run that compiled it."""
    assert run_here("compile", "--tune-run", tuned.info.run_id) == 0
    return newest_run()


def records_of(run: mlflow.entities.Run) -> Path:
    return artifacts_of(run.info.run_id) / names.RECORDS_DIR


def survivors(run: mlflow.entities.Run) -> list[dict[str, Any]]:
    return list(json.loads(mlflow.artifacts.load_text(f"runs:/{run.info.run_id}/{names.SURVIVORS_FILE}")))


def outputs(model_uri: str) -> np.ndarray:
    model = flavor.load_model(model_uri)
    inputs = {spec.name: np.ones(spec.shape, spec.dtype) for spec in model.inputs}
    return np.asarray(next(iter(model.run(inputs).values())))


def test_a_model_is_built_again(compiled: mlflow.entities.Run, run_here: RunCommand) -> None:
    assert run_here("recompile", "--run", compiled.info.run_id) == 0
    run = newest_run()
    assert run.data.tags[names.TAG_STEP] == "recompile"
    assert run.data.tags[names.TAG_RECOMPILED_FROM] == compiled.info.run_id
    assert run.data.tags[names.TAG_TUNE_RUN] == compiled.data.tags[names.TAG_TUNE_RUN]
    assert run.data.tags["mlflow.runName"] == compiled.data.tags["mlflow.runName"].replace("compile", "recompile")
    assert run.data.metrics[names.COVERAGE_TASKS] == 1
    assert run.data.metrics[names.RECORDS_APPLIED] == len(survivors(run)) > 1
    assert run.data.metrics[names.RECORDS_LOST] == 0
    assert {survivor["fate"] for survivor in survivors(run)} == {"applied"}
    model_uri = run.data.tags[names.TAG_MODEL_URI]
    old_uri = compiled.data.tags[names.TAG_MODEL_URI]
    assert model_uri != old_uri
    np.testing.assert_allclose(outputs(model_uri), outputs(old_uri), rtol=1e-4, atol=1e-5)
    (library,) = mlflow.models.get_model_info(model_uri).flavors["tvm"]["libraries"]
    assert library["provenance"]["recompiled_from"] == {"run": compiled.info.run_id, "model_uri": old_uri}


def test_a_tuning_that_was_never_compiled(tuned: mlflow.entities.Run, run_here: RunCommand) -> None:
    assert run_here("recompile", "--run", tuned.info.run_id) == 0
    assert newest_run().data.metrics[names.COVERAGE_TASKS] == 1


def test_a_model_that_was_compiled_with_records_from_elsewhere(
    tuned: mlflow.entities.Run, small_onnx: Path, run_here: RunCommand
) -> None:
    """Nothing is left of them but what is in the model."""
    shutil.copytree(records_of(tuned), "records")
    shutil.copy(small_onnx, "small.onnx")
    assert run_here("compile", "--network", "small.onnx", "--records", "records") == 0
    compiled = newest_run()
    shutil.rmtree("records")
    Path("small.onnx").unlink()
    assert run_here("recompile", "--run", compiled.info.run_id) == 0
    run = newest_run()
    assert run.data.metrics[names.COVERAGE_TASKS] == 1
    assert run.data.tags[names.TAG_NETWORK] == "small"


def test_the_new_model_is_the_next_version_of_the_old_one(
    compiled: mlflow.entities.Run, run_here: RunCommand, capsys: pytest.CaptureFixture[str]
) -> None:
    old_uri = compiled.data.tags[names.TAG_MODEL_URI]
    client = mlflow.MlflowClient()
    registered = [f"{name}-{compiled.info.run_id}" for name in ("one", "other")]
    for name in registered:
        mlflow.register_model(old_uri, name)
    client.set_registered_model_alias(registered[0], "champion", "1")
    assert run_here("recompile", "--run", compiled.info.run_id) == 0
    printed = capsys.readouterr().out
    for name in registered:
        version = client.get_model_version(name, "2")
        assert version.tags[names.TAG_RECOMPILED_FROM] == f"{name}/1"
        assert version.source == newest_run().data.tags[names.TAG_MODEL_URI]
        assert f"registered as {name}/2" in printed
    assert str(client.get_model_version_by_alias(registered[0], "champion").version) == "1"


def test_a_winner_that_does_not_apply_leaves_the_other_records(
    tuned: mlflow.entities.Run, compiled: mlflow.entities.Run, run_here: RunCommand
) -> None:
    records = records_of(tuned)
    best = records / names.BEST_DIR
    first, *lines = read_records(best)
    changed = [[index, [first[1][0], *rest]] for index, (_, *rest) in lines]
    (best / RECORD_FILE).write_text("".join(f"{json.dumps(line)}\n" for line in [first, *changed]))
    write_manifest(records, records / names.MANIFEST_FILE)
    assert run_here("recompile", "--run", compiled.info.run_id) == 0
    assert {survivor["fate"] for survivor in survivors(newest_run())} == {"applied"}
    assert newest_run().data.metrics[names.COVERAGE_TASKS] == 1


def test_an_evaluation_of_a_registered_version(compiled: mlflow.entities.Run, run_here: RunCommand) -> None:
    client, run_id = mlflow.MlflowClient(), compiled.info.run_id
    name = f"evaluated-{run_id}"
    mlflow.register_model(compiled.data.tags[names.TAG_MODEL_URI], name)
    client.set_tag(run_id, names.TAG_STEP, "evaluate")
    client.set_tag(run_id, names.TAG_MODEL_URI, f"models:/{name}/1")
    assert run_here("recompile", "--run", run_id) == 0
    assert client.get_model_version(name, "2").source == newest_run().data.tags[names.TAG_MODEL_URI]


def test_an_evaluation_whose_tuning_is_not_known(
    tuned: mlflow.entities.Run, small_onnx: Path, run_here: RunCommand, capsys: pytest.CaptureFixture[str]
) -> None:
    """It does not say how the model was lowered."""
    shutil.copytree(records_of(tuned), "records")
    shutil.copy(small_onnx, "small.onnx")
    assert run_here("compile", "--network", "small.onnx", "--records", "records") == 0
    model_uri = newest_run().data.tags[names.TAG_MODEL_URI]
    assert run_here("evaluate", *flags({"model_uri": model_uri, "turns": 1, "measure_s": 0.1, "rivals": "none"})) == 0
    assert run_here("recompile", "--run", newest_run().info.run_id) == 2
    assert "the run has neither a model of its own nor records; give one of compile" in capsys.readouterr().err


def test_a_comparison_has_no_model_of_its_own(
    compiled: mlflow.entities.Run, run_here: RunCommand, capsys: pytest.CaptureFixture[str]
) -> None:
    mlflow.MlflowClient().set_tag(compiled.info.run_id, names.TAG_STEP, "promote")
    assert run_here("recompile", "--run", compiled.info.run_id) == 2
    assert "the run has neither a model of its own nor records; give one of compile" in capsys.readouterr().err


def test_records_that_do_not_survive_are_named(
    tuned: mlflow.entities.Run, compiled: mlflow.entities.Run, run_here: RunCommand, capsys: pytest.CaptureFixture[str]
) -> None:
    """One workload is none of today's, as after a change of the lowering; another's schedules do not apply."""
    records = records_of(tuned)
    shutil.rmtree(records / names.BEST_DIR)
    provenance = json.loads((records / names.PROVENANCE_FILE).read_text())
    (records / names.PROVENANCE_FILE).write_text(json.dumps({**provenance, "lowering_version": 1}))
    gone, *others = (records / WORKLOAD_FILE).read_text().splitlines()
    (records / WORKLOAD_FILE).write_text("\n".join([json.dumps(["7", json.loads(gone)[1]]), *others]) + "\n")
    lines = read_records(records)
    foreign = next(line for line in lines if line[0] == 0)[1][0]
    changed = [[index, [foreign if index == 1 else trace, *rest]] for index, (trace, *rest) in lines]
    (records / RECORD_FILE).write_text("".join(f"{json.dumps(line)}\n" for line in changed))
    write_manifest(records, records / names.MANIFEST_FILE)

    assert run_here("recompile", "--run", compiled.info.run_id) == 0
    run = newest_run()
    fates = {survivor["workload_hash"]: survivor["fate"] for survivor in survivors(run)}
    assert fates[f"{7:#018x}"] == "no_such_kernel"
    assert fates[f"{int(json.loads(others[0])[0]):#018x}"] == "does_not_apply"
    assert sorted(fates.values()) == sorted(["no_such_kernel", "does_not_apply"] + ["applied"] * (len(fates) - 2))
    assert run.data.metrics[names.RECORDS_LOST] == 2
    assert 0 < run.data.metrics[names.COVERAGE_TASKS] < 1
    printed = capsys.readouterr().out
    assert re.search(rf"^{7:#018x}  \S+ µs  the network has this workload no more$", printed, re.MULTILINE)
    assert re.search(r"^\w+  \S+ µs  the schedule does not apply$", printed, re.MULTILINE)
    old_uri = compiled.data.tags[names.TAG_MODEL_URI]
    np.testing.assert_allclose(outputs(run.data.tags[names.TAG_MODEL_URI]), outputs(old_uri), rtol=1e-4, atol=1e-5)


def test_a_model_of_another_device(
    tuned: mlflow.entities.Run, run_here: RunCommand, capsys: pytest.CaptureFixture[str]
) -> None:
    path = records_of(tuned) / names.FINGERPRINT_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), "cpu_model": "a faster one"}))
    write_manifest(path.parent, path.with_name(names.MANIFEST_FILE))
    assert run_here("recompile", "--run", tuned.info.run_id) == 5
    assert "on a faster one, this is" in capsys.readouterr().err
    assert newest_run().info.status == "FAILED"
    assert run_here("recompile", "--run", tuned.info.run_id, "--allow-target-mismatch") == 0
    assert "on a faster one" in newest_run().data.tags[names.TAG_TARGET_MISMATCH]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "run='': it must be a run ID"),
        (["--run", "0" * 32], "cannot read the run 0+: .*not found"),
        (["--run", "other"], "run=.*: the run has neither a model of its own nor records; give one of"),
    ],
)
def test_bad_input(
    new_experiment: str, run_here: RunCommand, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    if arguments[-1:] == ["other"]:
        arguments = ["--run", mlflow.MlflowClient().create_run(new_experiment).info.run_id]
    assert run_here("recompile", *arguments) == 2
    assert re.search(f"^Error: {message}", capsys.readouterr().err, re.MULTILINE)
