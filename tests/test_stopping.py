"""Budgets of trials and of time are kept exactly; a task that no longer improves leaves its trials to the others."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from helpers.fake_tuning import Notebook, TaskRunner, read_records, tune
from hypothesis import given
from hypothesis import strategies as st

from ansor_mlflow.device.device import Device
from ansor_mlflow.errors import TuningError, UserInputError
from ansor_mlflow.lowering.network import LoweredNetwork
from ansor_mlflow.parameters import MeasureOptions, SearchOptions
from ansor_mlflow.processes import Outcome
from ansor_mlflow.testing import FakeBuilder, FakeRunner
from ansor_mlflow.trials import Durations, StopReason, TaskInfo, TaskState, Trial, TrialStatus, TuningResult
from ansor_mlflow.tuning.job import TuningJob, tune_job
from ansor_mlflow.tuning.stopping import (
    MAX_BARREN_ROUNDS,
    NOISE,
    StoppingRules,
    require_valid_trials,
    resolve_num_trials,
)
from ansor_mlflow.workers.measure import RunJob

if TYPE_CHECKING:
    from tvm.target import Target


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
    job = TuningJob(network="dense", lowered=dense, device=Device.of(host_target, 1), records=tmp_path)
    message = "trials=1, but the network has 2 tasks and each needs a trial; give at least 2, or auto"
    with pytest.raises(UserInputError, match=message):
        tune_job(job, SearchOptions(trials=1), MeasureOptions())


@pytest.mark.parametrize(
    ("preset", "of_sketch", "of_metaschedule"), [("quick", 2, 16), ("standard", 6, 64), ("thorough", 24, 256)]
)
def test_auto_is_the_presets_number_for_every_task(preset: str, of_sketch: int, of_metaschedule: int) -> None:
    options = SearchOptions(trials="auto", preset=preset)
    assert resolve_num_trials(options, 10) == 10 * of_metaschedule
    assert resolve_num_trials(options, 10, num_sketched=10) == 10 * of_sketch
    assert resolve_num_trials(options, 10, num_sketched=4) == 4 * of_sketch + 6 * of_metaschedule


def test_the_budget_of_a_task(dense: LoweredNetwork, host_target: Target, tmp_path: Path) -> None:
    result = tune(dense, host_target, tmp_path, trials=100, trials_per_task=6)
    assert [task.total_trials for task in result.tasks] == [6, 6]
    assert [task.stop_reason for task in result.tasks] == [StopReason.TRIALS, StopReason.TRIALS]
    assert result.stop_reason == StopReason.TRIALS


def test_a_limit_for_each_task_limits_the_whole() -> None:
    assert resolve_num_trials(SearchOptions(trials=100, trials_per_task=6), 2) == 12
    assert resolve_num_trials(SearchOptions(trials=10, trials_per_task=6), 2) == 10
    assert resolve_num_trials(SearchOptions(trials_per_task=6), 2) == 12


def test_the_budget_of_time(dense: LoweredNetwork, host_target: Target, tmp_path: Path) -> None:
    notebook = Notebook(tmp_path)
    result = tune(dense, host_target, tmp_path, observers=[notebook], trials=100, max_minutes=1e-9)
    assert result.stop_reason == StopReason.MINUTES
    assert result.total_trials == 0
    assert notebook.events == ["started", "finished"]
    with pytest.raises(TuningError, match=r"2 of 2 tasks have no valid trial, .* \(no candidate was measured\)"):
        require_valid_trials(result)


def test_with_a_limit_of_time_the_first_pass_takes_its_share_of_the_time() -> None:
    """Of 2,000 trials a quarter among four tasks is 125; of twelve seconds it is three trials each."""
    stopping = StoppingRules(SearchOptions(trials=2000, max_minutes=0.2), num_trials=2000, num_tasks=4)
    state = TaskState(info=TaskInfo(index=0, name="t", weight=1, flops=1e6, workload_hash="t"))
    assert stopping.round_limit(state, 4, total_trials=0, elapsed_s=0) == 3
    assert stopping.round_limit(state, 3, total_trials=3, elapsed_s=4) == 2  # the workers took their time to start
    assert stopping.round_limit(state, 2, total_trials=5, elapsed_s=4.8) == 1  # 0.4 s a trial
    assert stopping.round_limit(state, 1, total_trials=6, elapsed_s=11.9) == 1


def test_with_a_limit_of_time_a_round_is_no_longer_than_what_is_left() -> None:
    stopping = StoppingRules(SearchOptions(trials=2000, max_minutes=1), num_trials=2000, num_tasks=1)
    state = TaskState(info=TaskInfo(index=0, name="t", weight=1, flops=1e6, workload_hash="t"))
    state.add(Trial(step=1, task="t", status=TrialStatus.OK, run_s=(1.0,)))
    assert stopping.round_limit(state, 0, total_trials=20, elapsed_s=10) == 32
    assert stopping.round_limit(state, 0, total_trials=114, elapsed_s=57) == 6  # half a second a trial


class SlowRunner(FakeRunner):
    """A `FakeRunner` that takes a while for each library."""

    def run(self, jobs: Sequence[RunJob]) -> list[Outcome[tuple[float, ...]]]:
        """See `Runner.run`."""
        time.sleep(0.3 * len(jobs))
        return super().run(jobs)


def test_every_task_gets_a_small_round_before_the_time_is_over(
    dense: LoweredNetwork, host_target: Target, tmp_path: Path
) -> None:
    notebook, limits = Notebook(tmp_path), {"trials": 2000, "num_trials_per_round": 32, "max_minutes": 0.1}
    result = tune(dense, host_target, tmp_path, runner=SlowRunner(), observers=[notebook], **limits)
    assert result.stop_reason == StopReason.MINUTES
    assert [task.info.name for task in result.tasks if task.total_trials] == [t.info.name for t in result.tasks]
    assert set(notebook.tasks[:2]) == {task.info.name for task in result.tasks}
    assert len(notebook.rounds[0]) < 8
    require_valid_trials(result)


def ended(stop_reason: str, *best_s: float | None) -> TuningResult:
    """A tuning of tasks with these best times."""
    tasks = tuple(
        TaskState(info=TaskInfo(index=i, name=f"t{i}", weight=1, flops=1e6, workload_hash=f"{i}"), best_s=seconds)
        for i, seconds in enumerate(best_s)
    )
    return TuningResult(tasks=tasks, total_trials=3, elapsed_s=1, durations=Durations(), stop_reason=stop_reason)


def test_tasks_that_the_time_was_too_short_for_are_no_error() -> None:
    result = ended(StopReason.MINUTES, 1e-3, None)
    require_valid_trials(result)
    assert [task.info.name for task in result.uncovered] == ["t1"]


@pytest.mark.parametrize(("stop_reason", "best_s"), [(StopReason.TRIALS, (1e-3, None)), (StopReason.MINUTES, (None,))])
def test_tasks_without_a_valid_trial_are_an_error_otherwise(stop_reason: str, best_s: tuple[float | None]) -> None:
    with pytest.raises(TuningError, match="have no valid trial"):
        require_valid_trials(ended(stop_reason, *best_s))


failed_numbers = st.dictionaries(
    st.integers(1, 24), st.sampled_from(["failed", "timed_out", "crashed"]), max_size=8
).map(lambda kinds: {number: Outcome[Any](failure=kind, error=kind) for number, kind in kinds.items()})


@given(
    trials=st.integers(2, 24),
    num_trials_per_round=st.integers(1, 9),
    trials_per_task=st.none() | st.integers(1, 13),
    not_built=failed_numbers,
    not_measured=failed_numbers,
    is_remote=st.booleans(),
)
def test_whatever_fails_the_budget_is_spent_exactly(
    dense: LoweredNetwork,
    host_target: Target,
    tmp_path_factory: pytest.TempPathFactory,
    trials: int,
    num_trials_per_round: int,
    trials_per_task: int | None,
    not_built: dict[int, Outcome[Any]],
    not_measured: dict[int, Outcome[Any]],
    is_remote: bool,
) -> None:
    directory = tmp_path_factory.mktemp("records")
    limits = {"trials": trials, "num_trials_per_round": num_trials_per_round, "trials_per_task": trials_per_task}
    num_trials = min(trials, 2 * (trials_per_task or trials))
    builder, runner = FakeBuilder(not_built), FakeRunner(failures=not_measured, is_remote=is_remote)
    notebook = Notebook(directory)
    result = tune(dense, host_target, directory, builder=builder, runner=runner, observers=[notebook], **limits)

    assert result.total_trials == len(builder.mods) == len(read_records(directory)) == num_trials
    assert result.stop_reason == StopReason.TRIALS
    assert sum(task.total_trials for task in result.tasks) == num_trials
    assert all(1 <= task.total_trials <= (trials_per_task or trials) for task in result.tasks)
    assert max(map(len, notebook.rounds)) <= num_trials_per_round
    steps = [trial.step for trials in notebook.rounds for trial in trials]
    assert steps == list(range(1, num_trials + 1))
    num_failed = num_trials - sum(task.num_trials[TrialStatus.OK] for task in result.tasks)
    assert num_failed >= sum(number <= num_trials for number in not_built)


# -- plateaus --------------------------------------------------------------------------------------------------------

HIDDEN, LOGITS = (4, 32), (4, 16)
"""The tasks of `dense`, by the shape of their first argument."""


def rules(**options: Any) -> StoppingRules:
    return StoppingRules(SearchOptions(**options), num_trials=1000, num_tasks=1)


def reasons(stopping: StoppingRules, best_s: Sequence[float | None]) -> list[str]:
    """What the rules say of a task after each round, whose best times these are."""
    state = TaskState(info=TaskInfo(index=0, name="t", weight=1, flops=1e6, workload_hash="t"))
    found = []
    for seconds in best_s:
        state.best_s = seconds
        found.append(stopping.stop_reason_of(state))
    return found


@pytest.mark.parametrize(
    ("patience", "best_s", "num_rounds"),
    [
        (1, [1.0, 1.0], 2),
        (2, [1.0, 1.0, 1.0], 3),
        (2, [1.0, 1.0, 0.5, 0.5, 0.5], 5),
        (2, [1.0, 1 - NOISE / 2, 1 - NOISE / 2], 3),
        (2, [1.0, 1 - NOISE / 2, 1 - 1.1 * NOISE, 1 - 1.1 * NOISE, 1 - 1.1 * NOISE], 5),
        (2, [None] * MAX_BARREN_ROUNDS, MAX_BARREN_ROUNDS),
        (3, [None, None, 1.0, 1.0, 1.0, 1.0], 6),
    ],
    ids=["at once", "two rounds", "a gain", "a small gain", "small gains add up", "never measured", "measured late"],
)
def test_a_plateau_is_reached_after_that_many_rounds(
    patience: int, best_s: Sequence[float | None], num_rounds: int
) -> None:
    assert len(best_s) == num_rounds
    assert reasons(rules(patience=patience), best_s) == [""] * (num_rounds - 1) + [StopReason.PLATEAU]


def test_without_patience_nothing_is_a_plateau() -> None:
    assert set(reasons(rules(), [1.0] * 100)) == {""}


def test_small_gains_that_never_end_are_no_plateau() -> None:
    """Half the noise in every round."""
    assert set(reasons(rules(patience=3), [(1 - NOISE / 2) ** number for number in range(100)])) == {""}


def test_the_limit_of_a_task_comes_before_its_plateau() -> None:
    state = TaskState(info=TaskInfo(index=0, name="t", weight=1, flops=1e6, workload_hash="t"))
    stopping = rules(patience=1, trials_per_task=1)
    state.add(Trial(step=1, task="t", status=TrialStatus.OK, run_s=(1.0,)))
    assert stopping.stop_reason_of(state) == StopReason.TRIALS


def test_trials_of_a_task_on_a_plateau_go_to_one_that_improves(
    dense: LoweredNetwork, host_target: Target, tmp_path: Path
) -> None:
    improving = [1e-3 * 0.95**number for number in range(100)]
    runner, notebook = TaskRunner({HIDDEN: [1e-3], LOGITS: improving}), Notebook(tmp_path)
    result = tune(dense, host_target, tmp_path, runner=runner, observers=[notebook], trials=60, patience=2)
    by_shape = dict(zip((HIDDEN, LOGITS), sorted(result.tasks, key=lambda task: task.total_trials), strict=True))
    assert by_shape[HIDDEN].stop_reason == StopReason.PLATEAU
    assert by_shape[HIDDEN].total_trials == 3 * 4
    assert by_shape[LOGITS].stop_reason == StopReason.TRIALS
    assert by_shape[LOGITS].total_trials == 60 - 3 * 4
    assert by_shape[LOGITS].best_s == improving[60 - 3 * 4 - 1]
    assert result.total_trials == len(read_records(tmp_path)) == 60
    assert result.stop_reason == StopReason.TRIALS
    assert len(set(notebook.tasks[-5:])) == 1


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_tuning_ends_when_every_task_is_on_a_plateau(
    dense: LoweredNetwork, host_target: Target, tmp_path: Path, is_remote: bool
) -> None:
    runner = FakeRunner(is_remote=is_remote)
    result = tune(dense, host_target, tmp_path, runner=runner, trials=1000, patience=2)
    assert result.stop_reason == StopReason.PLATEAU
    assert [task.stop_reason for task in result.tasks] == [StopReason.PLATEAU] * 2
    assert [task.total_trials for task in result.tasks] == [3 * 4] * 2
    require_valid_trials(result)
