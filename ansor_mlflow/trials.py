"""What tuning tells the world: trials, rounds, tasks, and the protocol of those who listen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from statistics import fmean
from typing import Protocol

DIRECT = "direct"  # the algorithm for a layer as it is defined


class TrialStatus(str, Enum):
    """How the measurement of one candidate ended."""

    OK = "ok"
    BUILD_FAILED = "build_failed"
    RUN_FAILED = "run_failed"
    TIMED_OUT = "timed_out"
    CRASHED = "crashed"  # its worker process died: a segmentation fault, or no memory


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One candidate program, built and measured."""

    step: int  # position in the run, counted from 1 over all tasks
    task: str = ""  # name of the task; empty where nothing but its workload is known, as in a journal
    status: TrialStatus
    run_s: tuple[float, ...] = ()  # seconds per call, one value per repeat; empty unless the status is OK
    error: str = ""  # error text, shortened; empty when the status is OK
    workload_hash: str = ""  # structural hash of the task's function, in hexadecimal digits
    round_: int = 0  # position of its round in the run, from 1
    elapsed_s: float = 0.0  # time of tuning until the end of its round
    decision: str = ""  # what made the program, as `records.decision_of` reads it; empty where nothing was decided

    @property
    def latency_s(self) -> float | None:
        """Mean seconds per call, the figure by which TVM's databases rank records."""
        return fmean(self.run_s) if self.run_s else None


@dataclass(frozen=True, kw_only=True)
class TaskInfo:
    """A tuning task: one distinct fused function of the network."""

    index: int
    name: str
    weight: int  # number of times the network calls it
    flops: float  # floating point operations of one call
    workload_hash: str
    algorithm: str = DIRECT  # how it is computed: directly, or by another algorithm with fewer operations
    layer: str = ""  # structural hash of the direct algorithm; empty for the direct algorithm itself
    max_rel_error: float | None = None
    """Largest error over the largest output, against float64; None for the direct algorithm."""

    @property
    def layer_hash(self) -> str:
        """What the algorithms to compute the same have in common."""
        return self.layer or self.workload_hash


@dataclass(kw_only=True)
class TaskState:
    """What is known of a task so far."""

    info: TaskInfo
    best_s: float | None = None
    """Fastest first measurement; before there is one, that of the fastest record that the tuning began with."""
    confirmed_s: float | None = None  # second measurement of the winner, at the end of the tuning
    confirmed_error: float | None = None
    """Relative standard error of `confirmed_s`, from how far repeated measurements of a program differ."""
    num_trials: dict[TrialStatus, int] = field(default_factory=lambda: dict.fromkeys(TrialStatus, 0))
    first_error: str = ""  # error text of the first failed trial
    stop_reason: str = ""

    @property
    def total_trials(self) -> int:
        return sum(self.num_trials.values())

    @property
    def gflops(self) -> float | None:
        """Achieved GFLOP/s of the best trial."""
        return self.info.flops / self.best_s / 1e9 if self.best_s else None

    @property
    def optimism(self) -> float | None:
        """The winner's second measurement over the task's fastest first one; above 1 where that was lucky."""
        return self.confirmed_s / self.best_s if self.confirmed_s and self.best_s else None

    def snapshot(self) -> TaskState:
        """A copy that later trials do not change."""
        return replace(self, num_trials=dict(self.num_trials))

    def add(self, trial: Trial) -> None:
        """Counts a trial; keeps the best latency and the first error."""
        self.num_trials[trial.status] += 1
        if trial.error and not self.first_error:
            self.first_error = f"{trial.status.value}: {trial.error}"
        latency_s = trial.latency_s
        if latency_s is not None and (self.best_s is None or latency_s < self.best_s):
            self.best_s = latency_s


@dataclass(kw_only=True)
class Durations:
    """Where the wall-clock time of tuning went, in seconds."""

    search_s: float = 0.0
    build_s: float = 0.0
    run_s: float = 0.0
    confirm_s: float = 0.0  # time of measuring the winners again
    log_s: float = 0.0  # time of waiting for observers


@dataclass(frozen=True, kw_only=True)
class TuningPlan:
    """What is about to be tuned."""

    network: str
    target: str  # short description of the target, such as "llvm znver4 ×2"
    tasks: tuple[TaskInfo, ...]
    num_trials: int
    search: str = ""
    """What differs from the default in how it is searched, such as "strategy random"; empty where nothing does."""
    past: tuple[TuningRound, ...] = ()  # rounds of an earlier process that worked on the same tuning
    earlier_s: Mapping[int, float] = field(default_factory=dict)
    """Seconds per call of the fastest record that a task began with, by its index."""


@dataclass(frozen=True, kw_only=True)
class ServerState:
    """What a server of a fleet did for a tuning."""

    name: str  # its host and port, as the name of a metric can have them
    num_trials: int
    num_failures: int  # times that it gave no answer, or one that cannot be
    num_set_aside: int
    busy_s: float  # time in which it measured, uploads included
    known_s: float  # seconds for which it was available to the tuning: not while it was set aside
    calibration_s: float | None  # seconds of a call of the reference kernel, by which servers are compared


def utilisation(servers: Sequence[ServerState]) -> float | None:
    """Share of their time in which servers measured; None where there are none."""
    known_s = sum(server.known_s for server in servers)
    return sum(server.busy_s for server in servers) / known_s if known_s else None


@dataclass(frozen=True, kw_only=True)
class TuningRound:
    """One batch of trials of one task, just measured."""

    trials: tuple[Trial, ...]
    task: TaskState
    tasks: tuple[TaskState, ...]  # state of every task of the network, this one included
    total_trials: int
    elapsed_s: float
    durations: Durations  # totals since the start of the tuning
    probe_spread: float = 0.0  # how quiet the machine was until now; see `names.PROBE_SPREAD`
    servers: tuple[ServerState, ...] = ()  # those of a fleet until now

    @property
    def estimated_latency_s(self) -> float | None:
        return estimated_latency_s(self.tasks)

    @property
    def trials_per_minute(self) -> float:
        return self.total_trials / self.elapsed_s * 60


@dataclass(frozen=True, kw_only=True)
class TuningResult:
    """How a tuning ended."""

    tasks: tuple[TaskState, ...]
    total_trials: int
    elapsed_s: float
    durations: Durations
    stop_reason: str
    probe_spread: float = 0.0  # how quiet the machine was; see `names.PROBE_SPREAD`
    unreliable: str = ""  # why the times cannot be trusted, as a clause; empty where they can

    @property
    def estimated_latency_s(self) -> float | None:
        return estimated_latency_s(self.tasks)

    @property
    def confirmed_latency_s(self) -> float | None:
        """The estimate with the winners' second measurements; None where nothing was measured again."""
        if all(task.confirmed_s is None for task in self.tasks):
            return None
        return estimated_latency_s([replace(task, best_s=task.confirmed_s or task.best_s) for task in self.tasks])

    @property
    def uncovered(self) -> tuple[TaskState, ...]:
        """The tasks with work to do of which no trial was valid, with no algorithm."""
        tasks = fastest_algorithms(self.tasks)
        return tuple(task for task in tasks if task.best_s is None and task.stop_reason != StopReason.NOTHING_TO_TUNE)


def estimated_latency_s(tasks: Sequence[TaskState]) -> float | None:
    """Σ weight × best task latency: the network's estimated time; None while a task that was not given up has none.

    Of several algorithms for a layer the fastest counts.
    """
    total = 0.0
    for task in fastest_algorithms(tasks):
        if task.best_s is not None:
            total += task.info.weight * task.best_s
        elif task.stop_reason != StopReason.NOTHING_TO_TUNE:
            return None
    return total


def fastest_algorithms(tasks: Sequence[TaskState]) -> list[TaskState]:
    """Of each layer the algorithm that is fastest so far, the first one where none was measured."""
    fastest: dict[str, TaskState] = {}
    for task in tasks:
        known = fastest.setdefault(task.info.layer_hash, task)
        if task.best_s is not None and (known.best_s is None or task.best_s < known.best_s):
            fastest[task.info.layer_hash] = task
    return list(fastest.values())


class StopReason:
    """Why a task or a run ended (tag `ansor.stop_reason`); `STOP_REASONS` says what each means."""

    TRIALS = "trials"
    MINUTES = "minutes"
    PLATEAU = "plateau"  # `patience` rounds brought no improvement above the noise
    SPACE_EXHAUSTED = "space_exhausted"
    NOTHING_TO_TUNE = "nothing_to_tune"  # it moves data, at most, and the search has no program for it
    DOMINATED = "dominated"
    KNOWN = "known"
    INTERRUPTED = "interrupted"  # by SIGINT or SIGTERM


STOP_REASONS = {
    StopReason.TRIALS: "the budget of trials was spent",
    StopReason.MINUTES: "the budget of time was spent",
    StopReason.PLATEAU: "no task improved any more",
    StopReason.SPACE_EXHAUSTED: "every program of the search space was measured",
    StopReason.NOTHING_TO_TUNE: "there is nothing to tune",
    StopReason.DOMINATED: "another algorithm for the layer is faster beyond the noise",
    StopReason.KNOWN: "earlier tunings know enough already",
    StopReason.INTERRUPTED: "it was interrupted",
}


class TuningObserver(Protocol):
    """Someone who is told what happens while tuning.

    Calls come one after the other, from a thread of their own: MLflow's active run is not active there. While a program
    is measured on this host there are none, unless the tuning was interrupted twice. An exception ends the tuning.
    """

    def tuning_started(self, plan: TuningPlan) -> None:
        """Tasks were extracted; nothing was measured yet."""

    def round_finished(self, round_: TuningRound) -> None:
        """A batch was measured, and its records are on disk."""

    def tuning_finished(self, result: TuningResult) -> None:
        """No more rounds follow. Called after an interrupt, too, but not when tuning ends with an error."""
