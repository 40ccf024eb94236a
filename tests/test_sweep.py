"""`ansor-mlflow sweep`: many networks under one run, whatever ends it; what was made is not made again."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import mlflow
import numpy as np
import onnx
import pytest
from helpers.commands import ANSOR_MLFLOW, ROOT, Finished, environment, run
from helpers.sweeps import runs_of, write_sweep

from ansor_mlflow import names
from ansor_mlflow.commands.sweep import SweepResult, run_sweep
from ansor_mlflow.commands.sweep.changes import Measured, compare, ratio_of_runs
from ansor_mlflow.commands.sweep.declaration import Entry, read_sweep
from ansor_mlflow.commands.sweep.plans import EntryPlan
from ansor_mlflow.commands.sweep.results import EntryResult
from ansor_mlflow.commands.sweep.schedule import Allowance, next_pipeline, rank
from ansor_mlflow.errors import UserInputError
from ansor_mlflow.networks.graph import GraphBuilder
from ansor_mlflow.parameters import PipelineOptions, SweepOptions

SMALL, LARGE = "dense:16,64,64", "dense:8,32,32"


def sweep(directory: Path, experiment_id: str, path: str, *more: str) -> Finished:
    env = environment(os.environ["MLFLOW_TRACKING_URI"], {"MLFLOW_EXPERIMENT_ID": experiment_id})
    return run([ANSOR_MLFLOW, "sweep", path, *more], directory, env)


def test_lists_are_a_grid_and_patterns_are_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        builder = GraphBuilder(seed=0)
        logits = builder.dense("logits", builder.input("data", (1, 8)), units=4, in_units=8)
        onnx.save(builder.build(name, {logits: (1, 4)}), tmp_path / f"{name}.onnx")
    path = write_sweep(
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
    declaration = read_sweep(write_sweep(tmp_path / "s.yaml", {"network": str(tmp_path / "*" / "model.onnx")}))
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
@pytest.mark.timeout(500)
def test_a_sweep_makes_each_model_once_and_says_what_failed(tmp_path: Path, new_experiment: str) -> None:
    """An entry that fails leaves the others; the same command tries it again, and makes what was added. Trials of less
    than a minute are measured at once.
    """
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
    path = write_sweep(tmp_path / "s.yaml", {"network": SMALL}, {"network": str(broken)}, name="two")
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
    (made,) = runs_of(new_experiment, "main")
    assert parent.info.status == "FAILED"
    assert made.data.metrics[names.TRIALS_MEASURED] == 4
    assert made.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert made.info.run_name == SMALL
    assert len(runs_of(new_experiment, "tune")) == 1
    assert (parent.data.metrics[names.SWEEP_DONE], parent.data.metrics[names.SWEEP_FAILED]) == (1, 1)
    assert parent.data.metrics[names.SWEEP_SPEEDUP_MEDIAN] == made.data.metrics[names.SPEEDUP_VS_BEST]
    page = Path(
        mlflow.artifacts.download_artifacts(f"runs:/{parent.info.run_id}/{names.SWEEP_REPORT_FILE}")
    ).read_text()
    assert mlflow.artifacts.load_dict(f"runs:/{parent.info.run_id}/{names.SWEEP_FILE}") == {SMALL: made.info.run_id}
    for text in (SMALL, made.info.run_id, "give input_shapes"):
        assert text in page
        assert text in parent.data.tags["mlflow.note.content"]  # the run's ID is in a link

    path = write_sweep(tmp_path / "s.yaml", {"network": SMALL}, {"network": LARGE, "trials": 0}, name="two")
    done = sweep(tmp_path / "work", new_experiment, path)
    assert done.exit_code == 0, done.stderr
    (parent,) = runs_of(new_experiment, "sweep")
    assert parent.info.status == "FINISHED"
    assert [each.info.run_name for each in runs_of(new_experiment, "main")] == [SMALL, f"{LARGE} trials=0"]
    assert (parent.data.metrics[names.SWEEP_DONE], parent.data.metrics[names.SWEEP_FAILED]) == (2, 0)


@pytest.mark.system
@pytest.mark.timeout(500)
def test_a_sweep_whose_process_is_killed_goes_on(tmp_path: Path, new_experiment: str) -> None:
    """No other process runs it meanwhile; what was made stays, and the budget of trials is that of all calls. It is the
    sweep of the examples, with more trials.
    """
    example = (ROOT / "examples" / "sweep.yaml").read_text()
    path = str(tmp_path / "sweep.yaml")
    Path(path).write_text(example.replace("trials: 4", "trials: 8"))  # more than all calls may have
    env = environment(os.environ["MLFLOW_TRACKING_URI"], {"MLFLOW_EXPERIMENT_ID": new_experiment})
    command = [ANSOR_MLFLOW, "sweep", path, "--max-trials", "4"]
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
    assert {each.info.run_name for each in finished} == {"mlp", "dense:16,64,64 trials=0"}
    assert sum(each.data.metrics.get(names.TRIALS_MEASURED, 0) for each in runs_of(new_experiment, "tune")) == 4
    assert not [each for each in runs_of(new_experiment, "main") if each.info.status == "RUNNING"]


@pytest.mark.system
@pytest.mark.nightly
@pytest.mark.timeout(500)
def test_a_sweep_is_compared_with_an_earlier_one(tmp_path: Path, new_experiment: str) -> None:
    """All is measured anew; a model that is slower beyond the noise is a failure for JUnit, and the exit code."""
    path = write_sweep(tmp_path / "s.yaml", {"network": SMALL}, name="watched", defaults={"turns": 3})
    assert sweep(tmp_path / "work", new_experiment, path).exit_code == 0
    (before,) = runs_of(new_experiment, "sweep")
    (evaluated,) = runs_of(new_experiment, "evaluate")
    turns = mlflow.artifacts.load_dict(f"runs:/{evaluated.info.run_id}/{names.TURNS_FILE}")
    assert turns.keys() == {"tuned", "onnxruntime"}
    assert {len(medians) for medians in turns.values()} == {3}

    flags = ("--against", before.info.run_id, "--junit", "junit.xml", "--markdown", "sweep.md")
    done = sweep(tmp_path / "work", new_experiment, path, *flags, "--fail-if-slower", "400%")
    assert done.exit_code == 0, done.stderr
    assert len(runs_of(new_experiment, "sweep")) == len(runs_of(new_experiment, "main")) == 2
    assert re.search(r"[+-]\d+\.\d% \([+-]", done.stdout)

    twice = {**turns, "tuned": [median / 50 for median in turns["tuned"]]}  # as if the model had been so fast
    mlflow.MlflowClient().log_dict(evaluated.info.run_id, twice, names.TURNS_FILE)
    done = sweep(tmp_path / "work", new_experiment, path, *flags, "--fail-if-slower", "3%")
    assert done.exit_code == 8
    assert f"1 of 1 models are slower than before by more than 3.0%, {SMALL} among them" in done.errors[0]
    assert runs_of(new_experiment, "sweep")[-1].info.status == "FAILED"
    (case,) = ElementTree.parse(tmp_path / "work" / "junit.xml").getroot().iter("testcase")
    assert case.get("name") == SMALL
    assert case.find("failure") is not None
    assert f"| [{SMALL}](#/experiments/" in (tmp_path / "work" / "sweep.md").read_text()


def test_what_was_not_measured_alike_is_not_compared() -> None:
    """The rival of both is that of the same version; without one latencies are compared as they are."""
    turns = {"tuned": [1.0, 1.1, 0.9], "onnxruntime": [2.0, 2.2, 1.8]}
    before = Measured(turns_ms=turns, versions={"onnxruntime": "1.22"}, best_rival="onnxruntime")
    slower = {"tuned": [2.0, 2.2, 1.8], "onnxruntime": [4.0, 4.4, 3.6]}  # as the whole machine is
    same = compare(replace(before, turns_ms=slower), before)
    assert same.ratio is not None
    assert (same.rival, same.ratio.estimate) == ("onnxruntime", pytest.approx(1.0))
    assert not same.is_slower(0.0)
    other = compare(replace(before, turns_ms=slower, versions={"onnxruntime": "1.23"}), before)
    assert other.ratio is not None
    assert (other.rival, other.ratio.estimate) == ("", pytest.approx(2.0))
    assert other.is_slower(0.03)
    once = compare(replace(before, turns_ms={"tuned": [1.0]}), before)
    assert (once.ratio, str(once)) == (None, "fewer than two turns")


def test_the_ratio_of_two_runs_is_that_of_welchs_test() -> None:
    """The interval holds no difference in 95 % of the cases in which there is none."""
    generator = np.random.default_rng(0)
    held = 0
    for _ in range(500):
        now, before = np.exp(0.02 * generator.standard_normal(5)), np.exp(0.1 * generator.standard_normal(3))
        ratio = ratio_of_runs(list(now), list(before))
        held += ratio.lower <= 1 <= ratio.upper
    assert 0.92 <= held / 500 <= 0.99


def standing(**others: Any) -> EntryResult:
    """An entry of 400 trials, which has nothing yet."""
    plan = EntryPlan(num_trials=400, expected_minutes=100 / 60, workloads=frozenset({"a", "b"}), num_layers=2)
    return EntryResult(entry=Entry(name="", options=PipelineOptions(), weight=1.0), plan=plan, **others)


def made(num_trials: int, **others: Any) -> EntryResult:
    metrics = {names.TRIALS_MEASURED: num_trials, names.LATENCY_MS: 10.0}
    metrics |= {names.TRIALS_PER_MINUTE: 10.0}
    measured = {"tune_run": "tuning", "model_tuning": "tuning", "num_measured": num_trials} if num_trials else {}
    return standing(run_id="made", metrics=metrics, **{**measured, **others})


def test_every_entry_gets_a_model_and_then_its_trials() -> None:
    all_of_it = Allowance(trials=math.inf, minutes=math.inf)
    goes_on = {"resume_run": "tuning", "max_minutes": "10080"}  # it would keep an earlier limit
    assert next_pipeline(standing(), all_of_it) == {"trials": "0"}
    assert next_pipeline(made(0), all_of_it) == {"trials": "400"}
    assert next_pipeline(made(400), all_of_it) is None
    assert next_pipeline(made(90, stop_reason="plateau"), all_of_it) is None
    killed = standing(tune_run="tuning", num_measured=37)
    assert next_pipeline(killed, all_of_it) == {"trials": "400", **goes_on}
    few = Allowance(trials=1000, minutes=math.inf)
    assert next_pipeline(made(100), few) == {"trials": "200", **goes_on}
    assert next_pipeline(made(100), replace(few, trials=7)) == {"trials": "107", **goes_on}
    assert next_pipeline(made(100), replace(few, trials=0)) is None
    assert next_pipeline(standing(), replace(few, trials=0)) == {"trials": "0"}
    assert next_pipeline(made(0), replace(few, trials=1)) is None  # each of two tasks needs one
    in_time = Allowance(trials=math.inf, minutes=2.5)
    assert next_pipeline(made(100, tuned_minutes=10.0), in_time) == {
        "trials": "200",
        "resume_run": "tuning",
        "max_minutes": "12.5",  # the tuner counts those that it has had
    }


def test_a_part_that_was_ended_before_there_was_a_model_of_it_gets_one() -> None:
    all_of_it = Allowance(trials=math.inf, minutes=math.inf)
    goes_on = {"resume_run": "tuning", "max_minutes": "10080"}
    behind = made(100, num_measured=180)
    assert next_pipeline(behind, replace(all_of_it, trials=0)) == {"trials": "180", **goes_on}
    known = made(0, tune_run="tuning", stop_reason="known", num_known=2)
    assert next_pipeline(known, all_of_it) == {"trials": "2", **goes_on}
    assert next_pipeline(replace(known, model_tuning="tuning"), all_of_it) is None


def test_trials_that_were_asked_for_and_were_not_needed_are_not_asked_for_again() -> None:
    """Half of the tasks are known: the tuner spends half of the budget, and says that it is spent."""
    all_of_it = Allowance(trials=math.inf, minutes=math.inf)
    assert next_pipeline(made(200, num_asked=400, stop_reason="trials"), all_of_it) is None
    assert next_pipeline(made(50, num_asked=100, stop_reason="trials"), replace(all_of_it, trials=900)) == {
        "trials": "200",
        "resume_run": "tuning",
        "max_minutes": "10080",
    }


def test_an_entry_that_has_had_its_own_minutes_gets_no_more() -> None:
    all_of_it = Allowance(trials=math.inf, minutes=math.inf)
    entry = Entry(name="", options=PipelineOptions(max_minutes=5), weight=1.0)
    ended = replace(made(100, stop_reason="minutes", tuned_minutes=4.9), entry=entry)
    assert next_pipeline(ended, all_of_it) is None
    goes_on = {"trials": "400", "resume_run": "tuning", "max_minutes": "5"}
    assert next_pipeline(replace(ended, tuned_minutes=3.0), all_of_it) == goes_on  # the sweep's minutes were over
    assert next_pipeline(replace(ended, stop_reason="interrupted"), all_of_it) == goes_on


def test_the_longest_is_first_unless_a_budget_may_end() -> None:
    all_of_it, few = Allowance(trials=math.inf, minutes=math.inf), Allowance(trials=100, minutes=math.inf)
    slow, fast = made(100, saved_ms=0.5), made(100, saved_ms=0.1)
    longer = replace(fast, plan=replace(fast.plan, expected_minutes=9))
    assert max([slow, longer], key=lambda each: rank(each, few, is_shared=False)) is slow
    assert max([slow, longer], key=lambda each: rank(each, all_of_it, is_shared=False)) is longer
    assert rank(standing(), few, is_shared=False) > rank(slow, few, is_shared=False)
    assert rank(fast, few, is_shared=False) > rank(slow, few, is_shared=True)


def test_trials_that_earlier_records_spared_are_counted() -> None:
    known = made(100, num_known=2, stop_reason="known")
    assert known.num_spared == 300
    assert made(100, num_known=2, stop_reason="trials").num_spared == 0


def test_a_long_table_is_cut_where_mlflow_would_refuse_it() -> None:
    entries = [replace(made(1), entry=replace(made(1).entry, name=f"network-{number}")) for number in range(200)]
    entries[150] = replace(standing(error="it|failed"), entry=replace(made(1).entry, name="broken"))
    note = SweepResult(name="many", run_id="", experiment_id="", entries=tuple(entries)).note()
    assert len(note) < 8000
    assert note.splitlines()[4].startswith("| broken |")
    assert "it\\|failed" in note
    assert re.search(r"\d+ more are in sweep.html", note)
