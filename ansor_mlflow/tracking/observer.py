"""Logs a tuning to its MLflow run: metrics after every round, tables and figures at the end."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlflow
from mlflow.entities import Metric, Param, RunTag

from ansor_mlflow import names
from ansor_mlflow.tracking.failures import clear_failures
from ansor_mlflow.tracking.figures import ConvergencePoint, save_convergence
from ansor_mlflow.trials import (
    Durations,
    TaskState,
    Trial,
    TrialStatus,
    TuningPlan,
    TuningResult,
    TuningRound,
)


class MlflowObserver:
    """A `TuningObserver` that writes to one MLflow run, in one request per round.

    Args:
        run_id: The run.
        directory: Where tables and figures are written before they are uploaded.
    """

    def __init__(self, run_id: str, directory: Path) -> None:
        self._run_id = run_id
        self._directory = directory
        self._client = mlflow.MlflowClient()
        self._title = ""
        self._trials: list[Trial] = []
        self._points: list[ConvergencePoint] = []

    def tuning_started(self, plan: TuningPlan) -> None:
        """Names the run after what is tuned, and logs the resolved budget."""
        self._title = f"{plan.network} · {plan.target} · {plan.num_trials} trials"
        with clear_failures("log the tuning plan"):
            self._client.log_batch(
                self._run_id,
                params=[Param("num_tasks", str(len(plan.tasks))), Param("num_trials", str(plan.num_trials))],
                tags=[RunTag("mlflow.runName", f"tune {self._title}")],
            )

    def round_finished(self, round_: TuningRound) -> None:
        """Logs the curves."""
        self._trials += round_.trials
        values = _round_metrics(round_)
        if round_.estimated_latency_s is not None:
            latency_ms = round_.estimated_latency_s * 1e3
            values[names.BEST_LATENCY_MS] = latency_ms
            self._points.append(ConvergencePoint(round_.total_trials, round_.elapsed_s, latency_ms))
        with clear_failures("log the metrics of a round"):
            self._client.log_batch(self._run_id, metrics=_metrics(values, round_.total_trials))

    def tuning_finished(self, result: TuningResult) -> None:
        """Logs the stop reason, the tables of trials and tasks, and the figure."""
        tasks = self._directory / names.TASKS_FILE
        tasks.write_text(json.dumps([_task_row(task) for task in result.tasks], indent=1))
        figure = self._directory / names.CONVERGENCE_FIGURE
        save_convergence(self._points, self._title, figure)
        with clear_failures("log the results of the tuning"):
            self._client.log_batch(
                self._run_id,
                metrics=_metrics(_final_metrics(result), result.total_trials),
                tags=[RunTag(names.TAG_STOP_REASON, result.stop_reason)],
            )
            self._client.log_table(self._run_id, _trials_table(self._trials), names.TRIALS_TABLE)
            self._client.log_artifact(self._run_id, str(tasks))
            self._client.log_artifact(self._run_id, str(figure))


def _metrics(values: Mapping[str, float], step: int) -> list[Metric]:
    now_ms = int(time.time() * 1000)
    return [Metric(key, value, now_ms, step) for key, value in values.items()]


def _round_metrics(round_: TuningRound) -> dict[str, float]:
    values: dict[str, float] = {names.TRIALS_MEASURED: round_.total_trials}
    for status in TrialStatus:
        values[names.trials_with(status)] = sum(task.num_trials[status] for task in round_.tasks)
    task = round_.task
    if task.best_s is not None:
        values[names.task_latency_us(task.info.name)] = task.best_s * 1e6
    if task.gflops:
        values[names.task_gflops(task.info.name)] = task.gflops
    values[names.TRIALS_PER_MINUTE] = round_.trials_per_minute
    return values | _durations(round_.durations)


def _final_metrics(result: TuningResult) -> dict[str, float]:
    """What the second measurements of the winners say."""
    values = {names.TIME_CONFIRM_S: result.durations.confirm_s, names.TIME_LOG_S: result.durations.log_s}
    estimated_s, confirmed_s = result.estimated_latency_s, result.confirmed_latency_s
    if estimated_s and confirmed_s:
        values[names.CONFIRMED_LATENCY_MS] = confirmed_s * 1e3
        values[names.OPTIMISM] = confirmed_s / estimated_s
    return values


def _durations(durations: Durations) -> dict[str, float]:
    return {
        names.TIME_SEARCH_S: durations.search_s,
        names.TIME_BUILD_S: durations.build_s,
        names.TIME_RUN_S: durations.run_s,
        names.TIME_LOG_S: durations.log_s,
    }


def _task_row(task: TaskState) -> dict[str, Any]:
    return {
        "task": task.info.name,
        "weight": task.info.weight,
        "flops": task.info.flops,
        "latency_us": task.best_s * 1e6 if task.best_s is not None else None,
        "confirmed_latency_us": task.confirmed_s * 1e6 if task.confirmed_s is not None else None,
        "optimism": task.optimism,
        "gflops": task.gflops,
        "trials": {status.value: count for status, count in task.num_trials.items()},
        "stop_reason": task.stop_reason,
        "workload_hash": task.info.workload_hash,
    }


def _trials_table(trials: Sequence[Trial]) -> dict[str, list[Any]]:
    return {
        "step": [trial.step for trial in trials],
        "task": [trial.task for trial in trials],
        "status": [trial.status.value for trial in trials],
        "latency_us": [trial.latency_s * 1e6 if trial.latency_s is not None else None for trial in trials],
        "error": [trial.error for trial in trials],
    }
