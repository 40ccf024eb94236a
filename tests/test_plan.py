"""A plan says what a tuning would measure and what is known, without measuring anything."""

from __future__ import annotations

import json
import re
import shutil
from itertools import pairwise
from pathlib import Path

import mlflow
import numpy as np
import pytest
from helpers.commands import RunCommand
from helpers.onnx_files import save, value
from helpers.runs_here import tune_here
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper

from ansor_mlflow.commands.plan import plan_tuning, share_trials
from ansor_mlflow.errors import UserInputError
from ansor_mlflow.lowering.network import LoweredNetwork
from ansor_mlflow.parameters import PlanOptions
from ansor_mlflow.records.lines import FAILED_RUN_S
from ansor_mlflow.records.store import RECORD_FILE
from ansor_mlflow.tuning.stopping import SECONDS_PER_TRIAL


@pytest.fixture
def records(tuned_records: Path, tmp_path: Path) -> Path:
    return Path(
        shutil.copytree(tuned_records, tmp_path / "records", ignore=shutil.ignore_patterns("best", "*.lock", ".*"))
    )


@pytest.mark.parametrize(
    ("shares", "num_trials", "least", "most", "expected"),
    [
        ([0.5, 0.25, 0.125, 0.125], 80, 5, 80, [40, 20, 10, 10]),
        ([0.9, 0.1, 0.0], 60, 10, 60, [40, 10, 10]),  # who has no operations gets the first pass and no more
        ([0.9, 0.1, 0.0], 60, 10, 30, [30, 20, 10]),  # what a full task leaves goes to the others
        ([0.0, 0.0, 0.0], 10, 1, 10, [4, 3, 3]),
    ],
)
def test_trials_are_shared(shares: list[float], num_trials: int, least: int, most: int, expected: list[int]) -> None:
    assert share_trials(shares, num_trials, least=least, most=most) == expected


@given(
    flops=st.lists(st.floats(0, 1e12), min_size=1, max_size=30),
    least=st.integers(1, 10),
    spread=st.integers(0, 40),
    fill=st.floats(0, 1),
)
def test_the_budget_is_spent_within_its_limits(flops: list[float], least: int, spread: int, fill: float) -> None:
    most = least + spread
    num_trials = round(len(flops) * (least + fill * spread))
    shares = [value / sum(flops) if sum(flops) else 0.0 for value in flops]
    trials = share_trials(shares, num_trials, least=least, most=most)
    assert sum(trials) == num_trials
    assert all(least <= count <= most for count in trials)
    by_share = sorted(zip(shares, trials, strict=True))
    assert all(fewer <= more + 1 for (_, fewer), (_, more) in pairwise(by_share))


def test_every_task_of_the_network_is_planned(small_onnx: Path, small_lowered: LoweredNetwork) -> None:
    plan = plan_tuning(PlanOptions(network=str(small_onnx), trials=200))
    assert [task.info for task in plan.tasks] == [task.info for task in small_lowered.tasks]
    assert plan.network == "small"
    assert plan.target.startswith("llvm ")
    assert plan.num_trials == 200
    np.testing.assert_allclose(sum(task.flops_share for task in plan.tasks), 1)
    first_pass = 200 // 4 // len(plan.tasks)
    assert min(task.num_trials for task in plan.tasks) == first_pass
    largest = max(plan.tasks, key=lambda task: task.info.weight * task.info.flops)
    assert largest.num_trials == max(task.num_trials for task in plan.tasks) > first_pass
    for task in plan.tasks:
        np.testing.assert_allclose(task.expected_minutes, task.num_trials * SECONDS_PER_TRIAL / 60)
        assert task.best_s is None
    assert plan.notes == ()


def test_records_tell_the_best_time_of_each_task(small_onnx: Path, records: Path) -> None:
    plan = plan_tuning(PlanOptions(network=str(small_onnx), records=str(records)))
    best_s: dict[int, float] = {}
    for line in (records / RECORD_FILE).read_text().splitlines():
        index, (_, run_secs, *_) = json.loads(line)
        best_s[index] = min(best_s.get(index, FAILED_RUN_S), float(np.mean(run_secs)))
    assert sorted(task.best_s or 0 for task in plan.tasks) == pytest.approx(sorted(best_s.values()))
    all_tasks = len(plan.tasks)
    assert plan.notes == (f"The records cover {all_tasks} of {all_tasks} layers, 100.0% of the operations.",)


@pytest.mark.usefixtures("own_directory")
@pytest.mark.nightly
def test_ways_to_compute_a_layer_are_one_layer(run_here: RunCommand) -> None:
    network = "conv2d:1,28,28,64,64,3,3,1,1"
    planned = plan_tuning(PlanOptions(network=network)).tasks
    shares: dict[str, float] = {}
    for task in planned:
        shares[task.info.layer_hash] = max(shares.get(task.info.layer_hash, 0), task.flops_share)
    assert len(planned) > len(shares)
    assert sum(shares.values()) == pytest.approx(1)
    run = tune_here(run_here, network=network, trials=len(planned))
    plan = plan_tuning(PlanOptions(network=network, tune_run=run.info.run_id))
    assert plan.notes == (f"The records cover {len(shares)} of {len(shares)} layers, 100.0% of the operations.",)


def test_a_network_without_tasks(tmp_path: Path) -> None:
    nodes = [helper.make_node("Identity", ["x"], ["y"])]
    path = save(tmp_path / "identity.onnx", nodes, [value("x", [1, 3])], [value("y", [1, 3])])
    plan = plan_tuning(PlanOptions(network=path))
    assert (plan.tasks, plan.num_trials, plan.expected_minutes) == ((), 0, 0)
    assert plan.report().title.endswith(": it has no task for TVM to tune")


def test_a_run_and_records(small_onnx: Path, records: Path) -> None:
    options = PlanOptions(network=str(small_onnx), records=str(records), tune_run="0" * 32)
    with pytest.raises(UserInputError, match="tune_run and records: both were given; give the ID"):
        plan_tuning(options)


def test_the_command_prints_a_table_and_opens_no_run(
    run_here: RunCommand,
    small_onnx: Path,
    tuned_records: Path,
    experiment_id: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    num_runs = len(mlflow.search_runs([experiment_id], output_format="list"))
    args = ["plan", "--network", str(small_onnx), "--preset", "quick"]
    assert run_here(*args, "--records", str(tuned_records), "--json", "plan.json") == 0
    lines = capsys.readouterr().out.splitlines()
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert lines[0] == f"{plan['network']} for {plan['target']}"
    assert lines[2].split() == ["task", "weight", "MFLOP", "share", "best", "µs", "trials", "min"]
    for line, task in zip(lines[3:], plan["tasks"], strict=False):
        cells = line.split()
        info = task["info"]
        assert cells[:3] == [str(info["index"]), info["name"], str(info["weight"])]
        assert cells[5] == f"{task['best_s'] * 1e6:.1f}"
        assert cells[6] == str(task["num_trials"])
    num_tasks = len(plan["tasks"])
    assert lines[-2].startswith(f"{num_tasks} tasks, {2 * num_tasks} trials, about ")
    assert lines[-1] == plan["notes"][0]
    assert len(mlflow.search_runs([experiment_id], output_format="list")) == num_runs
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize(
    ("pad_channels", "action"), [("auto", "it is computed with"), ("off", "pad_channels=auto computes it with")]
)
def test_layers_that_cannot_be_tiled_are_named(pad_channels: str, action: str) -> None:
    plan = plan_tuning(
        PlanOptions(network="conv2d:1,4,4,386,8,1,1,1,0", target="llvm -mcpu=skylake-avx512", pad_channels=pad_channels)
    )
    (note,) = plan.notes
    assert re.fullmatch(
        rf"\S+ has 386 output channels, which no wide vector divides; {action} 400, which halved the time of such a "
        r"layer in a measurement \(docs/networks\.md\)\.",
        note,
    )
