"""Which task gets the next round of trials.

The gradient of the network's latency with respect to a task's rounds, as in Ansor (Zheng et al., OSDI 2020, section 6).
"""

from __future__ import annotations

import random
import re
from collections.abc import Container, Sequence

from ansor_mlflow.trials import DIRECT, TaskInfo, TaskState
from ansor_mlflow.tuning.stopping import MAX_BARREN_ROUNDS

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

    Of several ways to compute a layer only what one of them gains over the fastest counts.
    """

    def __init__(self, num_tasks: int, seed: int) -> None:
        self._history: list[list[float]] = [[] for _ in range(num_tasks)]
        self._rounds = [0] * num_tasks
        self._random = random.Random(seed)

    def round_finished(self, task: TaskState) -> None:
        """Takes note of a round of `task`."""
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
            return max(waiting, key=lambda index: self._urgency(tasks[index].info, begun))
        if self._random.random() < _EPSILON:
            return self._random.choice(open_tasks)
        return max(open_tasks, key=lambda index: self._gain(tasks, index))

    def _urgency(self, task: TaskInfo, begun: Container[str]) -> tuple[bool, bool, float]:
        """Layers of which nothing is known come first, each in the direct way."""
        return task.layer_hash not in begun, task.way == DIRECT, task.weight * task.flops

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
        fastest_s = min(way.best_s for way in tasks if way.best_s and way.info.layer_hash == task.info.layer_hash)
        gain = _ALPHA * recent + (1 - _ALPHA) * optimistic - (task.best_s - fastest_s)
        return task.info.weight * max(0.0, gain)


def _operator(task: TaskState) -> str:
    """The first operator of a fused task: "conv2d" of "fused_conv2d3_add1_relu"."""
    return re.sub(r"\d+$", "", task.info.name.removeprefix("fused_").split("_")[0])
