"""What happened in a tuning so far, as figures, the report and the note show it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ansor_mlflow.trials import TaskState, Trial, TrialStatus, TuningPlan, TuningResult, TuningRound, fastest_algorithms


class CurvePoint(NamedTuple):
    """What was best after a round."""

    num_trials: int
    elapsed_s: float
    latency_s: float


@dataclass(kw_only=True)
class TaskHistory:
    """What happened to a task."""

    state: TaskState  # the task's state after the last round
    began_s: float | None = None
    """Seconds per call of the fastest earlier record; without one, of the first valid trial."""
    layer_began_s: float | None = None  # the same of the algorithm for its layer that was measured first
    is_taken: bool = True  # whether no other algorithm for its layer is faster
    measured: list[tuple[int, float]] = field(default_factory=list)
    """Position in the run and seconds per call of every valid trial."""

    @property
    def name(self) -> str:
        return self.state.info.name

    @property
    def num_trials(self) -> int:
        """Failed ones included."""
        return self.state.total_trials

    @property
    def before_s(self) -> float:
        """The layer's time in the network, as it began; 0 where that is unknown, or another algorithm is taken."""
        return self.state.info.weight * (self.layer_began_s or 0.0) * self.is_taken

    @property
    def after_s(self) -> float:
        """The task's time in the network, with the best; 0 where nothing is known, or another algorithm is taken."""
        return self.state.info.weight * (self.state.best_s or 0.0) * self.is_taken

    @property
    def gain_s(self) -> float:
        """By how much the network got faster through this task."""
        return self.before_s - self.after_s


class FailureClass(NamedTuple):
    """The trials that failed in one way."""

    status: TrialStatus
    num_trials: int
    task: str  # task of the first of these trials
    error: str  # error text of the first of these trials that has one


class TuningHistory:
    """Collects what observers are told."""

    def __init__(self) -> None:
        self.plan: TuningPlan | None = None
        self.result: TuningResult | None = None
        self.trials: list[Trial] = []
        self.curve: list[CurvePoint] = []
        """Estimated latency of the network after each round, from when every task has a valid trial."""
        self.tasks: list[TaskHistory] = []

    @property
    def title(self) -> str:
        """Network, budget, what differs from the default in how it is searched, and the device, which is often the
        same for all.
        """
        if self.plan is None:
            return ""
        parts = (self.plan.network, f"{self.plan.num_trials} trials", self.plan.search, self.plan.target)
        return " · ".join(filter(None, parts))

    @property
    def before_s(self) -> float:
        """Estimated latency of the network, with what the tasks began with."""
        return sum(task.before_s for task in self.tasks)

    @property
    def after_s(self) -> float:
        """Estimated latency of the network, with the best of the tasks that have a valid trial."""
        return sum(task.after_s for task in self.tasks)

    def begin(self, plan: TuningPlan) -> None:
        """Takes the plan, with the rounds of earlier processes."""
        self.plan = plan
        self.tasks = [
            TaskHistory(state=TaskState(info=info), began_s=plan.earlier_s.get(info.index)) for info in plan.tasks
        ]
        self._take_states([task.state for task in self.tasks])
        for round_ in plan.past:
            self.add(round_)

    def add(self, round_: TuningRound) -> None:
        self.trials += round_.trials
        task = self.tasks[round_.task.info.index]
        task.measured += [(trial.step, trial.latency_s) for trial in round_.trials if trial.latency_s is not None]
        if task.began_s is None and task.measured:
            task.began_s = task.measured[0][1]
        self._take_states(round_.tasks)
        if round_.estimated_latency_s is not None:
            self.curve.append(CurvePoint(round_.total_trials, round_.elapsed_s, round_.estimated_latency_s))

    def finish(self, result: TuningResult) -> None:
        self.result = result
        self._take_states(result.tasks)

    def slowest(self) -> list[TaskHistory]:
        """The tasks with a valid trial, those that take most of the network's time first."""
        return sorted((task for task in self.tasks if task.after_s), key=lambda task: -task.after_s)

    def failures(self) -> list[FailureClass]:
        """How trials failed, the most frequent way first."""
        counts = Counter(trial.status for trial in self.trials if trial.status is not TrialStatus.OK)
        classes = []
        for status, number in counts.most_common():
            of_class = [trial for trial in self.trials if trial.status is status]
            first = next((trial for trial in of_class if trial.error), of_class[0])
            classes.append(FailureClass(status, number, first.task, first.error))
        return classes

    def _take_states(self, states: Sequence[TaskState]) -> None:
        """Of several algorithms for a layer one is taken, and all began with the first that was measured."""
        taken = {id(state) for state in fastest_algorithms(states)}
        began_s: dict[str, float] = {}
        for task, state in zip(self.tasks, states, strict=True):
            task.state, task.is_taken = state, id(state) in taken
            if task.began_s is not None:
                began_s.setdefault(state.info.layer_hash, task.began_s)
        for task in self.tasks:
            task.layer_began_s = began_s.get(task.state.info.layer_hash)
