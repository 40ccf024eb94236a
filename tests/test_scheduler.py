"""The gradient scheduler: everyone once, then where the network gains most."""

from __future__ import annotations

from collections import Counter

import pytest

from ansor_mlflow.trials import StopReason, TaskInfo, TaskState
from ansor_mlflow.tuning.stopping import GradientScheduler


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
    """What the scheduler says when it is asked again and again without a round in between."""
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


def test_first_pass_does_not_end_for_a_task_without_a_valid_trial() -> None:
    tasks = make_tasks(1, 1)
    scheduler = GradientScheduler(2, seed=0)
    give_round(scheduler, tasks[0], None)
    assert scheduler.next_task(tasks) == 1


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


def test_a_seed_gives_the_same_order_again() -> None:
    def order(seed: int) -> list[int]:
        tasks = make_tasks(1, 2, 3)
        scheduler = GradientScheduler(3, seed=seed)
        indices = []
        for round_ in range(120):
            index = scheduler.next_task(tasks)
            assert index is not None
            give_round(scheduler, tasks[index], 1e-3 / (1 + round_))
            indices.append(index)
        return indices

    assert order(1) == order(1)
    assert order(1) != order(2)
