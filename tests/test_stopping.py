"""Budgets are kept exactly, trials go where the network gains most, and a task that no longer improves is left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from helpers.fake_tuning import Notebook, TaskRunner, read_records, tune
from helpers.fakes import FakeBuilder, FakeRunner
from hypothesis import given
from hypothesis import strategies as st

from ansor_mlflow.device.device import Device
from ansor_mlflow.errors import TuningError, UserInputError
from ansor_mlflow.lowering.network import LoweredNetwork
from ansor_mlflow.parameters import MeasureOptions, SearchOptions
from ansor_mlflow.processes import Outcome
from ansor_mlflow.trials import Durations, StopReason, TaskInfo, TaskState, Trial, TrialStatus, TuningResult
from ansor_mlflow.tuning.job import TuningJob, tune_job
from ansor_mlflow.tuning.stopping import (
    MAX_BARREN_ROUNDS,
    NOISE,
    GradientScheduler,
    StoppingRules,
    require_valid_trials,
    resolve_num_trials,
)

if TYPE_CHECKING:
    from tvm.target import Target


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


def ended(stop_reason: str, *best_s: float | None) -> TuningResult:
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


@pytest.mark.system
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


HIDDEN, LOGITS = (4, 32), (4, 16)
"""The tasks of `dense`, by the shape of their first argument."""


def rules(**options: Any) -> StoppingRules:
    return StoppingRules(SearchOptions(**options), num_trials=1000, num_tasks=1)


def reasons(stopping: StoppingRules, best_s: Sequence[float | None]) -> list[str]:
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
        (2, [1.0, 1.0, 0.5, 0.5, 0.5], 5),
        (2, [1.0, 1 - NOISE / 2, 1 - NOISE / 2], 3),
        (2, [1.0, 1 - NOISE / 2, 1 - 1.1 * NOISE, 1 - 1.1 * NOISE, 1 - 1.1 * NOISE], 5),
        (2, [None] * MAX_BARREN_ROUNDS, MAX_BARREN_ROUNDS),
        (3, [None, None, 1.0, 1.0, 1.0, 1.0], 6),
    ],
    ids=["at once", "a gain", "a small gain", "small gains add up", "never measured", "measured late"],
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


def make_tasks(*weights: int, names: tuple[str, ...] = ()) -> list[TaskState]:
    return [
        TaskState(
            info=TaskInfo(
                index=index,
                name=names[index] if names else "fused_conv2d_add_relu",
                weight=weight,
                flops=1e9,
                workload_hash=str(index),
            )
        )
        for index, weight in enumerate(weights)
    ]


def give_round(scheduler: GradientScheduler, task: TaskState, best_s: float | None) -> None:
    task.best_s = best_s
    scheduler.round_finished(task)


def picks(scheduler: GradientScheduler, tasks: list[TaskState], num_picks: int = 200) -> Counter[int | None]:
    return Counter(scheduler.next_task(tasks) for _ in range(num_picks))


def test_first_pass_covers_every_task_and_the_one_with_the_most_operations_first() -> None:
    tasks = make_tasks(2, 100, 1, 50)
    scheduler = GradientScheduler(len(tasks), seed=0)
    order = []
    for _ in tasks:
        index = scheduler.next_task(tasks)
        assert index is not None
        order.append(index)
        give_round(scheduler, tasks[index], 1e-3)
    assert order == [1, 3, 0, 2]


def test_the_heavier_of_two_like_tasks_is_preferred() -> None:
    tasks = make_tasks(1, 5, 1)
    scheduler = GradientScheduler(3, seed=0)
    for task in tasks:
        give_round(scheduler, task, 1e-3)
    assert picks(scheduler, tasks)[1] > 180


def test_the_slower_of_two_like_tasks_is_preferred() -> None:
    """Its peer shows what the operator can reach."""
    tasks = make_tasks(1, 1)
    scheduler = GradientScheduler(2, seed=0)
    for task, best_s in zip(tasks, (1e-3, 9e-3), strict=True):
        give_round(scheduler, task, best_s)
    assert picks(scheduler, tasks)[1] > 180


def test_a_task_that_still_improves_is_preferred_to_one_that_stands_still() -> None:
    tasks = make_tasks(1, 1, names=("fused_conv2d_add", "fused_matmul_add"))
    scheduler = GradientScheduler(2, seed=0)
    for best_s in (9e-3, 8e-3, 7e-3, 6e-3, 5e-3):
        give_round(scheduler, tasks[0], 5e-3)
        give_round(scheduler, tasks[1], best_s)
    assert picks(scheduler, tasks)[1] > 180


def test_every_task_is_visited_again_now_and_then() -> None:
    tasks = make_tasks(1000, 1)
    scheduler = GradientScheduler(2, seed=0)
    for task in tasks:
        give_round(scheduler, task, 1e-3)
    assert 0 < picks(scheduler, tasks, 1000)[1] < 100


@pytest.mark.parametrize("measured", [True, False])
def test_a_finished_task_is_skipped(measured: bool) -> None:
    tasks = make_tasks(100, 1)
    scheduler = GradientScheduler(2, seed=0)
    if measured:
        for task in tasks:
            give_round(scheduler, task, 1e-3)
    tasks[0].stop_reason = StopReason.TRIALS
    assert set(picks(scheduler, tasks)) == {1}


def test_a_task_that_is_being_measured_is_not_picked() -> None:
    tasks = make_tasks(100, 1)
    scheduler = GradientScheduler(2, seed=0)
    assert scheduler.next_task(tasks, busy={0}) == 1
    for task in tasks:
        give_round(scheduler, task, 1e-3)
    assert {scheduler.next_task(tasks, busy={0}) for _ in range(100)} == {1}
    tasks[1].stop_reason = StopReason.PLATEAU
    assert scheduler.next_task(tasks, busy={0}) is None


def test_nothing_is_left_when_every_task_is_finished() -> None:
    tasks = make_tasks(1, 1)
    scheduler = GradientScheduler(2, seed=0)
    for task in tasks:
        task.stop_reason = StopReason.SPACE_EXHAUSTED
    assert scheduler.next_task(tasks) is None
    assert GradientScheduler(0, seed=0).next_task([]) is None


def test_a_task_without_valid_trials_does_not_keep_the_others_waiting() -> None:
    tasks = make_tasks(1, 1, 1)
    scheduler = GradientScheduler(3, seed=0)
    rounds: Counter[int] = Counter()
    for _ in range(100):
        index = scheduler.next_task(tasks)
        assert index is not None
        rounds[index] += 1
        give_round(scheduler, tasks[index], None if index == 1 else 1e-3)
    assert 4 <= rounds[1] < 15
    assert min(rounds[0], rounds[2]) > 30
