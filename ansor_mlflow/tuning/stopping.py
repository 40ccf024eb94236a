"""When a task and when the whole tuning ends: budgets of trials and minutes, plateaus, and a user's signal."""

from __future__ import annotations

import logging
import math
import random
import re
import signal
import threading
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from ansor_mlflow.errors import TuningError, UserInputError
from ansor_mlflow.parameters import SKETCH_TRIALS_PER_TASK, TRIALS_PER_TASK, BudgetOptions, SearchOptions
from ansor_mlflow.trials import DIRECT, StopReason, TaskState, TuningResult

NOISE = 0.03
"""Relative difference below which two measurements count as equal.

Repeated measurements of one program differ by 3 to 5 % (median, `min_repeat_ms` from 20 to 100).
"""
_DOMINATED = ((2, 2.0), (8, 1.4), (math.inf, 1.1))
"""Time of an algorithm for a layer over the fastest one's beyond which it gets no more trials: after fewer trials than
that, and after more. Few programs of a sketch are that much faster than its first ones; a single trial may have been
disturbed."""
MAX_BARREN_ROUNDS = 4
"""Rounds that a task gets at least to find a first valid trial."""
_FIRST_PASS_SHARE = 0.25
"""Most of the budget, in trials and in minutes, that the first pass may take; the rest goes where the gradient points.
By measurement: see benchmarks/history.txt."""
SECONDS_PER_TRIAL = 0.25
"""Wall-clock time of a trial on two cores, of convolutions of ResNet-18: docs/tuning.md, "How long"."""


def resolve_num_trials(
    options: BudgetOptions, num_tasks: int, *, num_sketched: int = 0, num_known: int = 0, num_algorithms: int = 0
) -> int:
    """The budget in trials, without the share of those `num_known` tasks that get none.

    Tasks that are other algorithms for a layer have sketches, and need no trial.
    """
    if options.trials == "auto":
        of_task = SKETCH_TRIALS_PER_TASK[options.preset]
        sketched_algorithms = min(num_algorithms, num_sketched)
        num_trials = of_task * (num_sketched - sketched_algorithms) + of_task // 2 * sketched_algorithms
        num_trials += TRIALS_PER_TASK[options.preset] * (num_tasks - num_sketched)
    elif 0 < options.trials < num_tasks - num_algorithms:
        raise UserInputError(
            f"trials={options.trials}, but the network has {num_tasks - num_algorithms} tasks and each needs a trial; "
            f"give at least {num_tasks - num_algorithms}, or auto, or 0 to measure nothing"
        )
    else:
        num_trials = options.trials
    most = num_trials if options.trials_per_task is None else options.trials_per_task * num_tasks
    return math.ceil(min(num_trials, most) * (num_tasks - num_known) / max(1, num_tasks))


class StoppingRules:
    """Keeps the budgets of one tuning."""

    def __init__(self, options: SearchOptions, num_trials: int, num_tasks: int) -> None:
        self._options = options
        self._num_trials = num_trials
        self._num_tasks = num_tasks
        self._reference_s: dict[int, float] = {}
        self._rounds_without_gain: dict[int, int] = {}
        self._began_trials = 0
        """Trials of the first round, and of earlier processes; the time of a trial is that of later ones."""
        self._began_s = 0.0
        """When they had ended."""

    def round_limit(self, task: TaskState, num_waiting: int, total_trials: int, elapsed_s: float) -> int:
        """Trials of a task's next round: what the budgets allow, and in the first pass no more than a task's share."""
        limits = [self._options.num_trials_per_round, self._num_trials - total_trials]
        is_first = task.total_trials == 0
        if is_first:  # nobody knows yet which task is worth its trials
            limits.append(math.ceil(self._num_trials * _FIRST_PASS_SHARE / self._num_tasks))
        if self._options.max_minutes is not None:
            if total_trials and not self._began_trials:
                self._began_trials, self._began_s = total_trials, elapsed_s
            num_timed = total_trials - self._began_trials  # in the first round the worker processes start
            trial_s = (elapsed_s - self._began_s) / num_timed if num_timed else SECONDS_PER_TRIAL
            budget_s = self._options.max_minutes * 60
            left_s = budget_s - elapsed_s
            if is_first:
                left_s = (left_s - (1 - _FIRST_PASS_SHARE) * (budget_s - self._began_s)) / num_waiting
            limits.append(max(1, int(left_s / trial_s)))  # at least one, or a task would have no schedule at all
        if self._options.trials_per_task is not None:
            limits.append(self._options.trials_per_task - task.total_trials)
        return max(0, min(limits))

    def stop_reason_of(self, task: TaskState) -> str:
        """Why a task ends after the round that it just had; empty where it goes on."""
        limit = self._options.trials_per_task
        if limit is not None and task.total_trials >= limit:
            return StopReason.TRIALS
        return StopReason.PLATEAU if self._is_on_plateau(task) else ""

    def run_stop_reason(self, elapsed_s: float, total_trials: int, tasks: Iterable[TaskState]) -> str:
        """Why the tuning ends; empty where it goes on."""
        reasons = {task.stop_reason for task in tasks}
        # before the budgets: a tuning that measures nothing has not spent them
        without_trials = {StopReason.KNOWN, StopReason.DOMINATED, StopReason.NOTHING_TO_TUNE}
        if StopReason.KNOWN in reasons and reasons <= without_trials:
            return StopReason.KNOWN
        if not reasons:
            return StopReason.NOTHING_TO_TUNE
        if total_trials >= self._num_trials:
            return StopReason.TRIALS
        if self._options.max_minutes is not None and elapsed_s >= self._options.max_minutes * 60:
            return StopReason.MINUTES
        if "" in reasons:
            return ""
        return next((r for r in (StopReason.PLATEAU, StopReason.TRIALS) if r in reasons), StopReason.SPACE_EXHAUSTED)

    def _is_on_plateau(self, task: TaskState) -> bool:
        """Counts a round; gains that are smaller than the noise add up until they exceed it."""
        index = task.info.index
        reference_s = self._reference_s.get(index)
        if task.best_s is not None and (reference_s is None or task.best_s < reference_s * (1 - NOISE)):
            self._reference_s[index] = task.best_s  # moved only here, so that small gains add up
            self._rounds_without_gain[index] = 0
            return False
        self._rounds_without_gain[index] = self._rounds_without_gain.get(index, 0) + 1
        patience = self._options.patience
        if patience is None:
            return False
        if task.best_s is None:  # without any valid trial the whole tuning would fail
            patience = max(patience, MAX_BARREN_ROUNDS)
        return self._rounds_without_gain[index] >= patience


def dominated_tasks(tasks: Sequence[TaskState], *, in_the_end: bool = False) -> list[TaskState]:
    """The tasks that another algorithm for their layer has beaten; in the end with the margin for many trials."""
    fastest_s = _fastest_s((task.info.layer_hash, task.best_s) for task in tasks)

    def lead(task: TaskState) -> float:
        ratios = (ratio for most, ratio in _DOMINATED if not in_the_end and task.total_trials < most)
        return next(ratios, _DOMINATED[-1][1])

    return [task for task in tasks if (task.best_s or 0.0) > fastest_s.get(task.info.layer_hash, 0.0) * lead(task)]


def seemingly_faster(tasks: Sequence[TaskState]) -> list[TaskState]:
    """Tasks without a second measurement whose first is below what another algorithm for their layer was confirmed at.

    Where this host became slower in between, algorithms that were behind look faster than they are.
    """
    confirmed_s = _fastest_s((task.info.layer_hash, task.confirmed_s) for task in tasks)
    return [
        task
        for task in tasks
        if task.confirmed_s is None and (task.best_s or math.inf) < confirmed_s.get(task.info.layer_hash, 0.0)
    ]


def _fastest_s(times_s: Iterable[tuple[str, float | None]]) -> dict[str, float]:
    """The shortest time of each layer that has one."""
    fastest_s: dict[str, float] = {}
    for layer, seconds in times_s:
        if seconds is not None:
            fastest_s[layer] = min(seconds, fastest_s.get(layer, math.inf))
    return fastest_s


def require_valid_trials(result: TuningResult) -> None:
    """Checks that every task with work to do has a schedule; where the time was over before, that one has."""
    failed = result.uncovered
    if not failed or (result.stop_reason == StopReason.MINUTES and len(failed) < len(result.tasks)):
        return
    task = failed[0]
    reason = " ".join(task.first_error.split())[:300] or "no candidate was measured"
    raise TuningError(
        f"{len(failed)} of {len(result.tasks)} tasks have no valid trial, such as {task.info.name} after "
        f"{task.total_trials} trials ({reason}); give more trials, more time (max_minutes, measure_timeout_s) or "
        "another target"
    )


_ALPHA = 0.2
"""Trust in the gain of recent rounds against the optimistic guess."""
_BETA = 2.0
"""How much slower per FLOP than the best similar task a task is still believed to stay."""
_WINDOW = 3
"""Rounds over which the recent gain is taken."""
_EPSILON = 0.05
"""Share of rounds that go to a random task."""


class GradientScheduler:
    """Gives every task one round, the one with the most operations first; then picks the steepest expected gain.

    Of several algorithms for a layer only what one of them gains over the fastest counts.
    """

    def __init__(self, num_tasks: int, seed: int) -> None:
        self._history: list[list[float]] = [[] for _ in range(num_tasks)]
        self._rounds = [0] * num_tasks
        self._random = random.Random(seed)

    def round_finished(self, task: TaskState) -> None:
        index = task.info.index
        self._rounds[index] += 1
        if task.best_s is not None:
            self._history[index].append(task.best_s)

    def next_task(self, tasks: Sequence[TaskState], busy: Container[int] = ()) -> int | None:
        """The index of the task to work on; None when every task has a stop reason or is busy."""
        open_tasks = [task.info.index for task in tasks if not task.stop_reason and task.info.index not in busy]
        if not open_tasks:
            return None
        waiting = [index for index in open_tasks if self._rounds[index] == 0]
        if waiting:
            begun = {task.info.layer_hash for task in tasks if self._rounds[task.info.index] or task.info.index in busy}

            def urgency(index: int) -> tuple[bool, bool, float]:
                """Layers of which nothing is known come first, each by the direct algorithm."""
                task = tasks[index].info
                return task.layer_hash not in begun, task.algorithm == DIRECT, task.weight * task.flops

            return max(waiting, key=urgency)
        if self._random.random() < _EPSILON:
            return self._random.choice(open_tasks)
        return max(open_tasks, key=lambda index: self._gain(tasks, index))

    def _gain(self, tasks: Sequence[TaskState], index: int) -> float:
        """Expected decrease of the network's latency, in seconds, by one more round of a task."""
        task, history, rounds = tasks[index], self._history[index], self._rounds[index]
        if task.best_s is None:
            return float("inf") if rounds < MAX_BARREN_ROUNDS else 0.0
        recent = (history[-1 - _WINDOW] - history[-1]) / _WINDOW if len(history) > _WINDOW else 0.0
        optimistic = task.best_s / rounds
        peers = [peer.gflops for peer in tasks if peer.gflops and _operator(peer) == _operator(task)]
        if peers:
            optimistic = max(optimistic, task.best_s - _BETA * task.info.flops / (max(peers) * 1e9))
        fastest_s = min(
            algorithm.best_s
            for algorithm in tasks
            if algorithm.best_s and algorithm.info.layer_hash == task.info.layer_hash
        )
        gain = _ALPHA * recent + (1 - _ALPHA) * optimistic - (task.best_s - fastest_s)
        return task.info.weight * max(0.0, gain)


def _operator(task: TaskState) -> str:
    """The first operator of a fused task: "conv2d" of "fused_conv2d3_add1_relu"."""
    return re.sub(r"\d+$", "", task.info.name.removeprefix("fused_").split("_")[0])


# -- Ctrl-C and SIGTERM, kept until a round is over --------------------------------------------------------------------
# A KeyboardInterrupt that is raised while TVM's C++ calls back into Python can be swallowed there, and one between two
# records would tear a round apart.

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_log = logging.getLogger("ansor_mlflow")


class Interrupts:
    def __init__(self) -> None:
        self.received = False
        self._is_guarded = False
        self._is_due = False

    def raise_if_received(self) -> None:
        if self.received:
            raise KeyboardInterrupt

    @contextmanager
    def in_tvm(self) -> Iterator[None]:
        """Lets a second signal wait, too, until what is done inside is over: seconds at most."""
        self._is_guarded = True
        try:
            yield
        finally:
            self._is_guarded = False
        if self._is_due:
            raise KeyboardInterrupt

    def again(self, _: int, __: FrameType | None) -> None:
        if not self._is_guarded:
            raise KeyboardInterrupt
        self._is_due = True


@contextmanager
def deferred_interrupts() -> Iterator[Interrupts]:
    """Defers the first SIGINT or SIGTERM; a second one interrupts at once, but for `Interrupts.in_tvm`.

    Outside of the main thread, where Python delivers no signals, nothing is deferred.
    """
    interrupts = Interrupts()

    def defer(_: int, __: FrameType | None) -> None:
        interrupts.received = True
        for other in _SIGNALS:
            signal.signal(other, interrupts.again)
        _log.info("stopping after this round; once more to stop at once")

    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    previous = {number: signal.signal(number, defer) for number in _SIGNALS}
    try:
        yield interrupts
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: it was not set from Python
