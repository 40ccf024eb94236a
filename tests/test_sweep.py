"""`ansor-mlflow sweep`: many networks under one run, whatever ends it; what was made is not made again."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlflow
import onnx
import pytest
import yaml
from helpers.commands import ANSOR_MLFLOW, BRIEF, FAST, ROOT, Finished, environment, run
from mlflow.entities import Run

from ansor_mlflow import names
from ansor_mlflow.commands.sweep import Entry, EntryPlan, EntryResult, read_sweep, run_sweep
from ansor_mlflow.errors import UserInputError
from ansor_mlflow.networks.graph import GraphBuilder
from ansor_mlflow.parameters import PipelineOptions, SweepOptions

DEFAULTS: dict[str, Any] = {**FAST, **BRIEF, "cost_model": "none", "baseline": "none", "runtimes": "tvm", "trials": 4}
SMALL, LARGE = "dense:16,64,64", "dense:8,32,32"


def write(path: Path, *entries: Mapping[str, Any], **others: Any) -> str:
    """A file with entries, without the defaults that make a tuning brief where others are given."""
    path.write_text(yaml.safe_dump({"defaults": DEFAULTS, **others, "entries": list(entries)}))
    return str(path)


def sweep(directory: Path, experiment_id: str, path: str, *more: str) -> Finished:
    env = environment(os.environ["MLFLOW_TRACKING_URI"], {"MLFLOW_EXPERIMENT_ID": experiment_id})
    return run([ANSOR_MLFLOW, "sweep", path, *more], directory, env)


def runs_of(experiment_id: str, step: str) -> list[Run]:
    found = mlflow.search_runs(
        [experiment_id], filter_string=f"tags.`{names.TAG_STEP}` = '{step}'", output_format="list"
    )
    return sorted(found, key=lambda each: each.info.start_time)


def test_lists_are_a_grid_and_patterns_are_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        builder = GraphBuilder(seed=0)
        logits = builder.dense("logits", builder.input("data", (1, 8)), units=4, in_units=8)
        onnx.save(builder.build(name, {logits: (1, 4)}), tmp_path / f"{name}.onnx")
    path = write(
        tmp_path / "s.yaml",
        {"network": [str(tmp_path / "*.onnx"), "mlp"], "dtype": ["float32", "bfloat16"], "weight": 3},
        {"network": "mlp", "batch_size": 2},
        name="all",
    )
    declaration = read_sweep(path)
    assert declaration.name == "all"
    assert [entry.name for entry in declaration.entries] == [
        *(f"{name} dtype={dtype}" for name in ("a", "b", "mlp") for dtype in ("float32", "bfloat16")),
        "mlp batch_size=2",
    ]
    assert [entry.weight for entry in declaration.entries] == [3.0] * 6 + [1.0]
    options = declaration.entries[3].options
    assert (options.network, options.dtype, options.trials) == (str(tmp_path / "b.onnx"), "bfloat16", 4)
    assert options.warm_start == ("auto",)


def test_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for directory in ("x", "y"):
        builder = GraphBuilder(seed=0)
        logits = builder.dense("logits", builder.input("data", (1, 8)), units=4, in_units=8)
        (tmp_path / directory).mkdir()
        onnx.save(builder.build("model", {logits: (1, 4)}), tmp_path / directory / "model.onnx")
    declaration = read_sweep(write(tmp_path / "s.yaml", {"network": str(tmp_path / "*" / "model.onnx")}))
    assert [entry.name for entry in declaration.entries] == [
        f"model ({tmp_path}/{directory}/model.onnx)" for directory in ("x", "y")
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"the file cannot be read \(No such file or directory\); give a YAML file"),
        ("entries: [", "the file is not valid YAML"),
        ("[]", "it must be a mapping of name, defaults, entries, the last a list"),
        ("entries: []\nnetworks: []", "it must be a mapping of name, defaults, entries"),
        ("entries: []", "it has no entries; give one network at least"),
        ("entries: [mlp]", "entry 1: it must be a mapping of parameters of main to values"),
        ("entries: [{trials: 4}]", "entry 1: it has no network"),
        ("entries: [{network: mlp}, {network: mlp}]", "2 entries are mlp; leave all but one out"),
        ("entries: [{network: mlp, trails: 4}]", "entry 1: .*unknown key 'trails'; perhaps you meant trials"),
        ("entries: [{network: mlp, dtype: float8}]", "entry 1: dtype='float8': it must be float32"),
        ("entries: [{network: resnet-19}]", "entry 1: network='resnet-19' is neither a built-in network nor a file"),
        ("entries: [{network: '*.nothing'}]", "entry 1: network=.*nothing matches nothing"),
        ("entries: [{network: 'models:/*@nobody-has-it'}]", "entry 1: network=models:.* matches nothing"),
        ("name: it's\nentries: [{network: mlp}]", "name=it's: it must have no quotes and no backslash"),
        ("entries: [{network: mlp, weight: -1}]", "entry 1: weight=-1: it must be a number, 0 or more"),
        ("entries: [{network: mlp, resume_run: abc}]", "entry 1: resume_run is not for a sweep; leave it out"),
        ("defaults: {parent_run: abc}\nentries: []", "defaults: parent_run is not for a sweep"),
        ("entries: [{network: mlp, data: missing.npz}]", "entry 1: data=missing.npz: there is no such file"),
    ],
)
def test_what_cannot_be_is_one_line(
    text: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_experiment: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("s.yaml").write_text(text)
    with pytest.raises(UserInputError, match=rf"^sweep=s.yaml: {message}"):
        run_sweep(SweepOptions(sweep="s.yaml"))
    assert not mlflow.search_runs([new_experiment], output_format="list")


def test_trials_go_where_they_are_expected_to_save_most() -> None:
    """A tenth of the latency at first, and then what the last part saved."""

    def standing(weight: float, latency_ms: float, saved_ms: float | None = None) -> EntryResult:
        entry = Entry(name="", options=PipelineOptions(), weight=weight)
        return EntryResult(
            entry=entry,
            plan=EntryPlan(num_trials=100),
            tune_run="known",
            metrics={names.LATENCY_MS: latency_ms, names.TRIALS_MEASURED: 20},
            saved_ms=saved_ms,
        )

    assert standing(1, 50).expected_gain == pytest.approx(0.05)
    assert standing(10, 50).expected_gain == pytest.approx(0.5)
    assert standing(2, 50, saved_ms=0.03).expected_gain == pytest.approx(0.06)
    assert standing(1, 50).num_left == 80


@pytest.mark.system
@pytest.mark.nightly  # a pipeline takes half a minute
@pytest.mark.timeout(500)
def test_a_sweep_makes_each_model_once_and_says_what_failed(tmp_path: Path, new_experiment: str) -> None:
    """An entry that fails leaves the others; the same command tries it again, and makes what was added."""
    broken = tmp_path / "broken.onnx"
    model = onnx.helper.make_model(
        onnx.helper.make_graph(
            [onnx.helper.make_node("Relu", ["x"], ["y"])],
            "broken",
            [onnx.helper.make_tensor_value_info("x", 1, ["any", "size"])],
            [onnx.helper.make_tensor_value_info("y", 1, ["any", "size"])],
        )
    )
    onnx.save(model, broken)
    path = write(tmp_path / "s.yaml", {"network": SMALL}, {"network": str(broken)}, name="two")
    planned = sweep(tmp_path / "work", new_experiment, path, "--plan")
    assert planned.exit_code == 0, planned.stderr
    assert "2 entries, 4 trials" in planned.stdout
    assert not mlflow.search_runs([new_experiment], output_format="list")

    done = sweep(tmp_path / "work", new_experiment, path)
    assert done.exit_code == 4
    assert done.errors == [
        "Error: sweep=two: 1 of 2 entries have no model, broken among them; the run says why, and the same command "
        "tries them again"
    ]
    (parent,) = runs_of(new_experiment, "sweep")
    first, last = runs_of(new_experiment, "main")
    assert parent.info.status == "FAILED"
    assert [each.data.metrics[names.TRIALS_MEASURED] for each in (first, last)] == [0, 4]
    assert {each.data.tags["mlflow.parentRunId"] for each in (first, last)} == {parent.info.run_id}
    assert {each.info.run_name for each in (first, last)} == {SMALL}
    assert len(runs_of(new_experiment, "tune")) == 1
    assert (parent.data.metrics[names.SWEEP_DONE], parent.data.metrics[names.SWEEP_FAILED]) == (1, 1)
    assert parent.data.metrics[names.SWEEP_SPEEDUP_MEDIAN] == last.data.metrics[names.SPEEDUP_VS_BEST]
    page = Path(
        mlflow.artifacts.download_artifacts(f"runs:/{parent.info.run_id}/{names.SWEEP_REPORT_FILE}")
    ).read_text()
    for text in (SMALL, last.info.run_id, "give input_shapes"):
        assert text in page
        assert text in parent.data.tags["mlflow.note.content"]

    path = write(tmp_path / "s.yaml", {"network": SMALL}, {"network": LARGE, "trials": 0}, name="two")
    done = sweep(tmp_path / "work", new_experiment, path)
    assert done.exit_code == 0, done.stderr
    (parent,) = runs_of(new_experiment, "sweep")
    assert parent.info.status == "FINISHED"
    assert [each.info.run_name for each in runs_of(new_experiment, "main")] == [SMALL, SMALL, f"{LARGE} trials=0"]
    assert (parent.data.metrics[names.SWEEP_DONE], parent.data.metrics[names.SWEEP_FAILED]) == (2, 0)


@pytest.mark.system
@pytest.mark.nightly  # a pipeline takes half a minute
@pytest.mark.timeout(500)
def test_a_sweep_whose_process_is_killed_goes_on(tmp_path: Path, new_experiment: str) -> None:
    """No other process runs it meanwhile; what was made stays, and the budget of trials is that of all calls."""
    path = write(tmp_path / "s.yaml", {"network": SMALL}, {"network": LARGE, "weight": 50}, name="killed")
    env = environment(os.environ["MLFLOW_TRACKING_URI"], {"MLFLOW_EXPERIMENT_ID": new_experiment})
    command = [ANSOR_MLFLOW, "sweep", path, "--max-trials", "3"]
    with (tmp_path / "log").open("w") as log:
        first = subprocess.Popen(command, cwd=tmp_path, env=env, stderr=log, stdout=log)
    try:
        deadline = time.monotonic() + 200
        while not any(each.info.status == "FINISHED" for each in runs_of(new_experiment, "main")):
            assert time.monotonic() < deadline
            assert first.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.5)
        second = sweep(tmp_path / "elsewhere", new_experiment, path)
        assert second.exit_code == 2
        assert f"process {first.pid} on" in second.errors[0]
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    done = run(command, tmp_path, env)
    assert done.exit_code == 0, done.stderr
    (parent,) = runs_of(new_experiment, "sweep")
    finished = [each for each in runs_of(new_experiment, "main") if each.info.status == "FINISHED"]
    assert parent.info.status == "FINISHED"
    without_trials = [each.info.run_name for each in finished if not each.data.metrics[names.TRIALS_MEASURED]]
    assert sorted(without_trials) == [SMALL, LARGE]
    assert sum(each.data.metrics[names.TRIALS_MEASURED] for each in runs_of(new_experiment, "tune")) == 3


@pytest.mark.system
@pytest.mark.nightly  # a pipeline takes half a minute
@pytest.mark.timeout(300)
def test_the_example_ends_right(tmp_path: Path, new_experiment: str) -> None:
    done = sweep(tmp_path, new_experiment, str(ROOT / "examples" / "sweep.yaml"))
    assert done.exit_code == 0, done.stderr
    assert "2 of 2 entries have a model" in done.stdout
