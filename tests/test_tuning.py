"""The tuner keeps its budgets, counts and records every trial, and tells its observers the truth."""

from __future__ import annotations

import contextlib
import importlib.util
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ansor_mlflow import names
from ansor_mlflow.errors import MachineError, TuningError, UserInputError
from ansor_mlflow.lowering import LoweredNetwork, lower
from ansor_mlflow.networks.graph import GraphBuilder
from ansor_mlflow.options import TuneOptions
from ansor_mlflow.records import RECORD_FILE
from ansor_mlflow.targets import available_cpus
from ansor_mlflow.testing import FakeBuilder, FakeRunner
from ansor_mlflow.trials import (
    StopReason,
    TaskInfo,
    TaskState,
    Trial,
    TrialStatus,
    TuningPlan,
    TuningResult,
    TuningRound,
    estimated_latency_s,
)
from ansor_mlflow.tuning import TuningJob, require_valid_trials, tune_locally
from ansor_mlflow.tuning.builder import Builder
from ansor_mlflow.tuning.engine import Tuner, resolve_num_trials
from ansor_mlflow.tuning.runner import Runner
from ansor_mlflow.tuning.workers import Outcome

if TYPE_CHECKING:
    from tvm.target import Target

NO_MODEL = {"strategy": "random", "cost_model": "none"}
"""The quickest search."""


@pytest.fixture(scope="module")
def dense(host_target: Target) -> LoweredNetwork:
    """Two dense layers: two tasks whose spaces are large and quick to search."""
    builder = GraphBuilder(seed=0)
    data = builder.input("data", (4, 32))
    data = builder.relu("relu", builder.dense("hidden", data, units=16, in_units=32))
    builder.dense("logits", data, units=8, in_units=16)
    return lower(builder.build("dense", {"logits": (4, 8)}), host_target)


@pytest.fixture(scope="module")
def single(host_target: Target) -> LoweredNetwork:
    """One dense layer."""
    builder = GraphBuilder(seed=0)
    builder.relu("relu", builder.dense("dense", builder.input("data", (4, 32)), units=16, in_units=32))
    return lower(builder.build("single", {"relu": (4, 16)}), host_target)


def plan_for(lowered: LoweredNetwork, num_trials: int) -> TuningPlan:
    tasks = tuple(task.info for task in lowered.tasks)
    return TuningPlan(network="dense", target="host", tasks=tasks, num_trials=num_trials)


def tune(
    lowered: LoweredNetwork,
    target: Target,
    records: Path,
    *,
    builder: Builder | None = None,
    runner: Runner | None = None,
    observers: Sequence[Any] = (),
    **options: Any,
) -> TuningResult:
    """Tunes with fakes, on one search thread, without a cost model unless `options` names one."""
    from tvm.s_tir.meta_schedule.database import JSONDatabase

    checked = TuneOptions(**{**NO_MODEL, "num_trials_per_round": 4, **options})
    num_trials = resolve_num_trials(checked, len(lowered.tasks))
    with contextlib.closing(builder or FakeBuilder()) as builder, contextlib.closing(runner or FakeRunner()) as runner:
        tuner = Tuner(
            lowered.tasks,
            target=target,
            options=checked,
            num_trials=num_trials,
            search_threads=1,
            database=JSONDatabase(work_dir=str(records)),
            builder=builder,
            runner=runner,
            observers=observers,
        )
        return tuner.tune(plan_for(lowered, num_trials))


def read_records(directory: Path) -> list[Any]:
    return [json.loads(line) for line in (directory / RECORD_FILE).read_text().splitlines()]


class Notebook:
    """A `TuningObserver` that notes what it is told, and what is on disk at that moment."""

    def __init__(self, records: Path) -> None:
        self.events: list[str] = []
        self.plan: TuningPlan | None = None
        self.rounds: list[tuple[Trial, ...]] = []
        self.tasks: list[str] = []
        self.counts: list[dict[str, int]] = []
        self.latencies: list[float | None] = []
        self._records = records

    def tuning_started(self, plan: TuningPlan) -> None:
        self.events.append("started")
        self.plan = plan

    def round_finished(self, round_: TuningRound) -> None:
        self.events.append("round")
        self.rounds.append(round_.trials)
        self.tasks.append(round_.task.info.name)
        self.counts.append(
            {
                "told": sum(map(len, self.rounds)),
                "total": round_.total_trials,
                "of tasks": sum(task.total_trials for task in round_.tasks),
                "on disk": len(read_records(self._records)),
            }
        )
        self.latencies.append(round_.estimated_latency_s)

    def tuning_finished(self, result: TuningResult) -> None:
        self.events.append("finished")


# -- budgets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trials", [2, 3, 4, 9, 21])
def test_exactly_the_budget_is_measured(
    dense: LoweredNetwork, host_target: Target, tmp_path: Path, trials: int
) -> None:
    builder = FakeBuilder()
    result = tune(dense, host_target, tmp_path, builder=builder, trials=trials)
    assert result.total_trials == len(builder.mods) == len(read_records(tmp_path)) == trials
    assert result.stop_reason == StopReason.TRIALS
    assert {task.stop_reason for task in result.tasks} == {StopReason.TRIALS}
    assert all(task.total_trials for task in result.tasks)
    require_valid_trials(result)


def test_a_budget_below_the_number_of_tasks_says_how_much_is_needed(
    dense: LoweredNetwork, host_target: Target, tmp_path: Path
) -> None:
    job = TuningJob(network="dense", lowered=dense, target=host_target, num_threads=1, records=tmp_path)
    message = "trials=1, but the network has 2 tasks and each needs a trial; give at least 2, or auto"
    with pytest.raises(UserInputError, match=message):
        tune_locally(job, TuneOptions(trials=1))


@pytest.mark.parametrize(("preset", "num_trials"), [("quick", 16), ("standard", 64), ("thorough", 256)])
def test_auto_is_the_presets_number_for_every_task(preset: str, num_trials: int) -> None:
    assert resolve_num_trials(TuneOptions(trials="auto", preset=preset), 10) == 10 * num_trials


def test_the_budget_of_a_task(dense: LoweredNetwork, host_target: Target, tmp_path: Path) -> None:
    result = tune(dense, host_target, tmp_path, trials=100, trials_per_task=6)
    assert [task.total_trials for task in result.tasks] == [6, 6]
    assert [task.stop_reason for task in result.tasks] == [StopReason.TRIALS, StopReason.TRIALS]
    assert result.stop_reason == StopReason.TRIALS


def test_a_limit_for_each_task_limits_the_whole() -> None:
    assert resolve_num_trials(TuneOptions(trials=100, trials_per_task=6), 2) == 12
    assert resolve_num_trials(TuneOptions(trials=10, trials_per_task=6), 2) == 10
    assert resolve_num_trials(TuneOptions(trials_per_task=6), 2) == 12


def test_the_budget_of_time(dense: LoweredNetwork, host_target: Target, tmp_path: Path) -> None:
    notebook = Notebook(tmp_path)
    result = tune(dense, host_target, tmp_path, observers=[notebook], trials=100, max_minutes=1e-9)
    assert result.stop_reason == StopReason.MINUTES
    assert result.total_trials == 0
    assert notebook.events == ["started", "finished"]
    with pytest.raises(TuningError, match=r"2 of 2 tasks have no valid trial, .* \(no candidate was measured\)"):
        require_valid_trials(result)


# -- trials ----------------------------------------------------------------------------------------------------------


def test_every_failure_is_counted_recorded_and_told(dense: LoweredNetwork, host_target: Target, tmp_path: Path) -> None:
    builder = FakeBuilder(
        {
            2: Outcome(failure="failed", error="no such\ninstruction"),
            3: Outcome(failure="timed_out", error="killed after 1 s"),
        }
    )
    runner = FakeRunner([2e-3, 1e-3], failures={2: Outcome(failure="failed", error="the worker process died (SIGILL)")})
    notebook = Notebook(tmp_path)
    result = tune(dense, host_target, tmp_path, builder=builder, runner=runner, observers=[notebook], trials=12)

    counts = {status: sum(task.num_trials[status] for task in result.tasks) for status in TrialStatus}
    assert counts == {**dict.fromkeys(TrialStatus, 1), TrialStatus.OK: 9}
    assert "build_failed: no such\ninstruction" in [task.first_error for task in result.tasks]
    told = [(trial.step, trial.status, trial.error) for trials in notebook.rounds for trial in trials]
    assert told[:4] == [
        (1, TrialStatus.OK, ""),
        (2, TrialStatus.BUILD_FAILED, "no such\ninstruction"),
        (3, TrialStatus.TIMED_OUT, "killed after 1 s"),
        (4, TrialStatus.RUN_FAILED, "the worker process died (SIGILL)"),
    ]
    assert [record[1][1] for record in read_records(tmp_path)[:4]] == [[2e-3], [1e10], [1e10], [1e10]]


def test_a_run_that_times_out_counts_as_timed_out(dense: LoweredNetwork, host_target: Target, tmp_path: Path) -> None:
    runner = FakeRunner(failures={1: Outcome(failure="timed_out", error="killed after 30 s")})
    result = tune(dense, host_target, tmp_path, runner=runner, trials=2)
    assert result.tasks[0].num_trials[TrialStatus.TIMED_OUT] == 1
    with pytest.raises(TuningError, match=r"1 of 2 tasks have no valid trial, .*timed_out: killed after 30 s"):
        require_valid_trials(result)


def test_a_tuning_without_a_valid_trial_is_an_error_that_shows_the_first_failure(
    dense: LoweredNetwork, host_target: Target, tmp_path: Path
) -> None:
    failure: Outcome[Any] = Outcome(failure="failed", error="LLVM said\n\tno")
    result = tune(dense, host_target, tmp_path, builder=FakeBuilder(dict.fromkeys(range(1, 9), failure)), trials=8)
    assert result.estimated_latency_s is None
    message = rf"2 of 2 tasks have no valid trial, such as {dense.tasks[0].info.name} after \d trials \(build_failed: "
    with pytest.raises(TuningError, match=message) as caught:
        require_valid_trials(result)
    assert "\n" not in str(caught.value)


def test_libraries_are_removed_once_they_were_measured(
    dense: LoweredNetwork, host_target: Target, tmp_path: Path
) -> None:
    class Watcher(Notebook):
        def round_finished(self, round_: TuningRound) -> None:
            super().round_finished(round_)
            assert not any(job.path.exists() for job in runner.jobs)

    runner, watcher = FakeRunner(), Watcher(tmp_path)
    tune(dense, host_target, tmp_path, runner=runner, observers=[watcher], trials=9)
    assert len(runner.jobs) == 9
    assert "round" in watcher.events


def test_runs_get_the_arguments_of_the_kernel(dense: LoweredNetwork, host_target: Target, tmp_path: Path) -> None:
    runner = FakeRunner()
    tune(dense, host_target, tmp_path, runner=runner, trials=2)
    arguments = {job.args_info for job in runner.jobs}
    shapes = {tuple(shape for _, _, shape in infos) for infos in arguments}
    assert {(kind, dtype) for infos in arguments for kind, dtype, _ in infos} == {("TENSOR", "float32")}
    assert any(((4, 32) in shape and (4, 16) in shape) for shape in shapes)  # the hidden layer's input and output


def task_info(weight: int = 1) -> TaskInfo:
    return TaskInfo(index=0, name="t", weight=weight, flops=1e6, workload_hash="t")


def test_the_mean_of_the_repeats_is_the_latency() -> None:
    state = TaskState(info=task_info())
    for step, run_s in enumerate([(5e-3, 5e-3), (1e-3, 3e-3), (2.5e-3,)], start=1):
        state.add(Trial(step=step, task="t", status=TrialStatus.OK, run_s=run_s))
    assert state.best_s == 2e-3
    np.testing.assert_allclose(state.gflops, 0.5)


def test_the_estimate_sums_tasks_by_their_weight() -> None:
    tasks = [TaskState(info=task_info(weight), best_s=1e-3) for weight in (1, 3)]
    assert estimated_latency_s(tuple(tasks)) == 4e-3
    tasks[1].best_s = None
    assert estimated_latency_s(tuple(tasks)) is None
    tasks[1].stop_reason = StopReason.NOTHING_TO_TUNE
    assert estimated_latency_s(tuple(tasks)) == 1e-3


# -- observers -------------------------------------------------------------------------------------------------------


def test_observers_are_told_in_order_with_numbers_that_agree(
    dense: LoweredNetwork, host_target: Target, tmp_path: Path
) -> None:
    first, second = Notebook(tmp_path), Notebook(tmp_path)
    runner = FakeRunner([4e-3, 3e-3, 5e-3, 2e-3, 6e-3])
    tune(dense, host_target, tmp_path, runner=runner, observers=[first, second], trials=22)
    assert first.events == second.events == ["started", *["round"] * len(first.rounds), "finished"]
    assert first.plan == plan_for(dense, 22)
    assert all(len(set(counts.values())) == 1 for counts in first.counts)
    assert first.counts[-1]["total"] == 22
    steps = [trial.step for trials in first.rounds for trial in trials]
    assert steps == list(range(1, 23))
    for task, trials in zip(first.tasks, first.rounds, strict=True):
        assert {trial.task for trial in trials} == {task}
        assert 1 <= len(trials) <= 4


def test_the_estimated_latency_never_rises(dense: LoweredNetwork, host_target: Target, tmp_path: Path) -> None:
    notebook = Notebook(tmp_path)
    runner = FakeRunner([7e-3, 9e-3, 5e-3, 6e-3, 4e-3, 8e-3, 3e-3])
    result = tune(dense, host_target, tmp_path, runner=runner, observers=[notebook], trials=24)
    assert notebook.latencies[0] is None  # the second task has no trial yet
    known = [latency for latency in notebook.latencies if latency is not None]
    assert known == sorted(known, reverse=True)
    assert known[-1] == result.estimated_latency_s == sum(task.best_s or 0 for task in result.tasks)


def test_time_is_accounted_for(dense: LoweredNetwork, host_target: Target, tmp_path: Path) -> None:
    result = tune(dense, host_target, tmp_path, trials=8)
    spent = result.durations
    parts = [spent.search_s, spent.build_s, spent.run_s, spent.log_s]
    assert all(part >= 0 for part in parts)
    assert 0 < sum(parts) <= result.elapsed_s


# -- search ----------------------------------------------------------------------------------------------------------

SEARCHES = [("evolutionary", "xgb"), ("evolutionary", "random"), ("evolutionary", "none"), ("random", "none")]


@pytest.mark.parametrize(("strategy", "cost_model"), SEARCHES)
def test_a_seed_gives_the_same_candidates_again(
    single: LoweredNetwork, host_target: Target, tmp_path: Path, strategy: str, cost_model: str
) -> None:
    def traces(name: str, seed: int) -> list[Any]:
        (tmp_path / name).mkdir()
        runner = FakeRunner([3e-3, 1e-3, 2e-3])
        options = {"trials": 4, "num_trials_per_round": 2, "strategy": strategy, "cost_model": cost_model}
        tune(single, host_target, tmp_path / name, runner=runner, seed=seed, **options)
        return [record[1][0] for record in read_records(tmp_path / name)]

    first, again, other = traces("first", 1), traces("again", 1), traces("other", 2)
    assert first == again
    assert first != other


def test_evolution_measures_no_program_twice(single: LoweredNetwork, host_target: Target, tmp_path: Path) -> None:
    tune(single, host_target, tmp_path, trials=12, strategy="evolutionary")
    programs = Counter(json.dumps(record[1][0]) for record in read_records(tmp_path))
    assert set(programs.values()) == {1}


def test_the_cost_model_learns(single: LoweredNetwork, host_target: Target, tmp_path: Path) -> None:
    """The saved booster is in XGBoost's own format."""
    import xgboost
    from tvm.s_tir.meta_schedule.database import JSONDatabase

    tuner = Tuner(
        single.tasks,
        target=host_target,
        options=TuneOptions(num_trials_per_round=4),
        num_trials=8,
        search_threads=1,
        database=JSONDatabase(work_dir=str(tmp_path)),
        builder=FakeBuilder(),
        runner=FakeRunner([1e-3, 2e-3]),
    )
    tuner.save_cost_model(tmp_path / "before.ubj")
    tuner.tune(plan_for(single, 8))
    tuner.save_cost_model(tmp_path / "after.ubj")
    assert not (tmp_path / "before.ubj").exists()
    assert xgboost.Booster(model_file=str(tmp_path / "after.ubj")).num_boosted_rounds() > 0


def test_a_kernel_with_few_programs_is_exhausted(host_target: Target, tmp_path: Path) -> None:
    builder = GraphBuilder(seed=0)
    builder.relu("relu", builder.input("data", (2, 2)))
    lowered = lower(builder.build("tiny", {"relu": (2, 2)}), host_target)
    result = tune(lowered, host_target, tmp_path, trials=1000, strategy="evolutionary")
    assert result.stop_reason == StopReason.SPACE_EXHAUSTED
    assert [task.stop_reason for task in result.tasks] == [StopReason.SPACE_EXHAUSTED]
    assert 0 < result.total_trials < 100


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="PyTorch is installed")
def test_the_mlp_without_pytorch(dense: LoweredNetwork, host_target: Target, tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="cost_model=mlp needs PyTorch: pip install torch, or use cost_model=xgb"):
        tune(dense, host_target, tmp_path, trials=2, cost_model="mlp")


# -- for real --------------------------------------------------------------------------------------------------------


def test_a_network_is_tuned_on_this_host(dense: LoweredNetwork, host_target: Target, tmp_path: Path) -> None:
    """The default search, with real builds and real measurements."""
    notebook = Notebook(tmp_path)
    job = TuningJob(network="dense", lowered=dense, target=host_target, num_threads=available_cpus(), records=tmp_path)
    result = tune_locally(job, TuneOptions(trials=4, num_trials_per_round=2, min_repeat_ms=1), [notebook])
    require_valid_trials(result)
    assert result.total_trials == 4
    assert notebook.counts[-1] == dict.fromkeys(("told", "total", "of tasks", "on disk"), 4)
    assert 0 < result.estimated_latency_s < 1
    assert (tmp_path / names.COST_MODEL_FILE).is_file()
