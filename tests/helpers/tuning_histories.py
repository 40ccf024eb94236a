"""Histories of tunings that nobody ran, with known numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ansor_mlflow.tracking import TuningHistory
from ansor_mlflow.trials import (
    Durations,
    StopReason,
    TaskInfo,
    TaskState,
    Trial,
    TrialStatus,
    TuningPlan,
    TuningResult,
    TuningRound,
)


@dataclass(frozen=True, kw_only=True)
class TaskRound:
    """A round of a task: seconds of its valid trials, then its failed ones."""

    index: int
    run_s: Sequence[float] = ()
    failed: Sequence[tuple[TrialStatus, str]] = field(default_factory=tuple)


def history_of(
    rounds: Sequence[TaskRound],
    weights: Sequence[int],
    *,
    network: str = "resnet",
    known_s: dict[int, float] | None = None,
    stop_reason: str = StopReason.TRIALS,
    flops: float = 1e6,
) -> TuningHistory:
    """A tuning whose rounds end a minute one after the other."""
    states = [
        TaskState(
            info=TaskInfo(index=index, name=f"task{index}", weight=weight, flops=flops, workload_hash=f"0x{index:x}"),
            best_s=(known_s or {}).get(index),
        )
        for index, weight in enumerate(weights)
    ]
    num_trials = sum(len(round_.run_s) + len(round_.failed) for round_ in rounds)
    history = TuningHistory()
    infos = tuple(state.info for state in states)
    history.begin(
        TuningPlan(
            network=network, target="llvm znver4 ×2", tasks=infos, num_trials=num_trials, earlier_s=known_s or {}
        )
    )
    step = 0
    for number, round_ in enumerate(rounds, start=1):
        state, trials = states[round_.index], []
        for status, run_s, error in [
            *((TrialStatus.OK, (seconds,), "") for seconds in round_.run_s),
            *((status, (), error) for status, error in round_.failed),
        ]:
            step += 1
            trials.append(Trial(step=step, task=state.info.name, status=status, run_s=run_s, error=error))
            state.add(trials[-1])
        history.add(
            TuningRound(
                trials=tuple(trials),
                task=state.snapshot(),
                tasks=tuple(other.snapshot() for other in states),
                total_trials=step,
                elapsed_s=60.0 * number,
                durations=Durations(),
            )
        )
    for state in states:
        state.stop_reason = stop_reason
    history.finish(
        TuningResult(
            tasks=tuple(states),
            total_trials=step,
            elapsed_s=60.0 * len(rounds),
            durations=Durations(),
            stop_reason=stop_reason,
        )
    )
    return history


def large_history(num_tasks: int, num_trials: int) -> TuningHistory:
    """A tuning of many tasks with rounds of eight trials, one of which fails."""
    failed = [(TrialStatus.TIMED_OUT, "no answer")]
    rounds = [
        TaskRound(
            index=number % num_tasks,
            run_s=[(2 + number % num_tasks) * 1e-4 * (1 + 5 * (7 * number + i) % 11 / (1 + number)) for i in range(7)],
            failed=failed,
        )
        for number in range(num_trials // 8)
    ]
    return history_of(rounds, [1 + index % 5 for index in range(num_tasks)])
