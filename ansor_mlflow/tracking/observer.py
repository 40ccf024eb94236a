"""Logs a tuning to its MLflow run: metrics after every round, tables and figures at the end."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ansor_mlflow import names
from ansor_mlflow.errors import only_warn
from ansor_mlflow.files import write_text
from ansor_mlflow.sketches import decision_columns
from ansor_mlflow.tracking.outbox import Message, Outbox, five_digits
from ansor_mlflow.tracking.report.figures import (
    draw_convergence,
    draw_failures,
    draw_gain,
    draw_task_share,
    save_figure,
)
from ansor_mlflow.tracking.report.history import TuningHistory
from ansor_mlflow.tracking.report.note import tuning_note
from ansor_mlflow.trials import (
    ServerState,
    TaskInfo,
    TaskState,
    Trial,
    TrialStatus,
    TuningPlan,
    TuningResult,
    TuningRound,
    utilisation,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TRIALS_ARE_A_TABLE = {"mlflow.loggedArtifacts": json.dumps([{"path": names.TRIALS_TABLE, "type": "table"}])}
_MAX_WAIT_S = 5.0  # how long a slow server is waited for
_MAX_HELD_S = 60.0
"""How long the metrics of the first rounds wait for the first estimate, which comes before them on the run's page."""
_REFRESH_S = float(os.environ.get(names.UPLOADS_VARIABLE, "60"))
"""Least time between two uploads of the convergence while the tuning goes on."""
_FIGURES: dict[str, Callable[[TuningHistory], Figure]] = {
    names.CONVERGENCE_FIGURE: draw_convergence,
    names.TASK_SHARE_FIGURE: draw_task_share,
    names.GAIN_FIGURE: draw_gain,
    names.FAILURES_FIGURE: draw_failures,
}
"""Figures that need nothing but the history."""


class MlflowObserver:
    """A `TuningObserver` that tells one MLflow run, in one request per round; the commands do the tuning again."""

    def __init__(self, outbox: Outbox, directory: Path, commands: Sequence[str] = ()) -> None:
        self._outbox = outbox
        self._directory = directory
        self._commands = commands
        self._refreshed_s = self._began_s = time.monotonic()
        self._held: list[Message] = []
        self.history = TuningHistory()

    def tuning_started(self, plan: TuningPlan) -> None:
        """Names the run after what is tuned, describes it, and logs the resolved budget."""
        self.history.begin(plan)
        params = {"num_tasks": str(len(plan.tasks)), "num_trials": str(plan.num_trials)}
        self._outbox.put(
            Message(
                params=params,  # those that a run has do not change any more
                tags={"mlflow.runName": f"tune {self.history.title}", names.TAG_NUM_TRIALS: str(plan.num_trials)},
                note=tuning_note(self.history, self._commands),
            )
        )
        if plan.num_trials:
            self._draw(names.CONVERGENCE_FIGURE)  # Matplotlib takes a second to load: better now than between rounds

    def round_finished(self, round_: TuningRound) -> None:
        """Logs the curves, and from time to time the figure of them."""
        self.history.add(round_)
        values = _round_metrics(round_)
        if round_.estimated_latency_s is not None:
            values[names.BEST_LATENCY_MS] = round_.estimated_latency_s * 1e3
        self._held.append(Message(metrics=values, step=round_.total_trials, artifacts=self._refreshed()))
        if names.BEST_LATENCY_MS in values or time.monotonic() - self._began_s > _MAX_HELD_S:
            self.close()
        self._outbox.flush(_MAX_WAIT_S)  # the next measurement is to have the host for itself

    def tuning_finished(self, result: TuningResult) -> None:
        """Logs the stop reason, the tables of trials and tasks, figures where there is anything to see, and the
        description.
        """
        self.close()
        self.history.finish(result)
        tables = {
            names.TASKS_FILE: [_task_row(task) for task in result.tasks],
            names.TRIALS_TABLE: trials_table(self.history.trials, [task.info for task in result.tasks]),
        }
        for name, table in tables.items():
            write_text(self._directory / name, json.dumps(table, separators=(",", ":"), ensure_ascii=False))
        wanted = [name for name in _FIGURES if name != names.FAILURES_FIGURE or self.history.failures()]
        is_known = any(task.best_s is not None for task in result.tasks)
        figures = [name for name in wanted if self._draw(name)] if is_known or result.total_trials else []
        unreliable = {names.TAG_UNRELIABLE: result.unreliable} if result.unreliable else {}
        self._outbox.put(
            Message(
                metrics=_final_metrics(result),
                step=result.total_trials,
                tags={names.TAG_STOP_REASON: result.stop_reason, **_TRIALS_ARE_A_TABLE, **unreliable},
                artifacts=[(name, "") for name in (*tables, *figures)],
                note=tuning_note(self.history, self._commands),
            )
        )

    def close(self) -> None:
        """Hands over the metrics that are held, the first estimate first."""
        held, self._held = self._held, []
        if len(held) > 1 and (best := {k: v for k, v in held[-1].metrics.items() if k == names.BEST_LATENCY_MS}):
            self._outbox.put(Message(metrics=best, step=held[-1].step, time_ms=held[-1].time_ms))
            held[-1] = replace(held[-1], metrics={k: v for k, v in held[-1].metrics.items() if k not in best})
        for message in held:
            self._outbox.put(message)

    def _refreshed(self) -> list[tuple[str, str]]:
        """The convergence as an artifact, where the last one is a minute old and the server is not away."""
        name, now_s = names.CONVERGENCE_FIGURE, time.monotonic()
        if now_s - self._refreshed_s < _REFRESH_S or not self._outbox.flush(0):
            return []
        self._refreshed_s = now_s
        return [(name, "")] if self._draw(name) else []

    def _draw(self, name: str) -> bool:
        """Writes a figure; one that cannot be made is no reason to end a tuning."""
        with only_warn(f"the figure {name} could not be made"):
            save_figure(_FIGURES[name](self.history), self._directory / name)
            return True
        return False


def _round_metrics(round_: TuningRound) -> dict[str, float]:
    """Metrics after a round; ways to fail are counted once there are failures, so that no chart shows zeros."""
    values: dict[str, float] = {}
    task = round_.task
    if task.best_s is not None:
        values[names.task_latency_us(task.info.name)] = task.best_s * 1e6
    if task.gflops:
        values[names.task_gflops(task.info.name)] = task.gflops
    values[names.TRIALS_PER_MINUTE] = round_.trials_per_minute
    values |= {
        names.TIME_SEARCH_S: round_.durations.search_s,
        names.TIME_BUILD_S: round_.durations.build_s,
        names.TIME_RUN_S: round_.durations.run_s,
        names.TIME_LOG_S: round_.durations.log_s,
        names.PROBE_SPREAD: round_.probe_spread,
        names.TRIALS_MEASURED: round_.total_trials,
    }
    for status in TrialStatus:
        num_trials = sum(task.num_trials[status] for task in round_.tasks)
        if num_trials or status is TrialStatus.OK:
            values[names.trials_with(status)] = num_trials
    return values | _fleet_metrics(round_.servers)


def _fleet_metrics(servers: Sequence[ServerState]) -> dict[str, float]:
    share = utilisation(servers)
    values = {} if share is None else {names.FLEET_UTILISATION: share}
    for server in servers:
        figures: dict[str, float | None] = {
            "trials": server.num_trials,
            "failures": server.num_failures,
            "set_aside": server.num_set_aside,
            "utilisation": utilisation([server]),
            "calibration_ms": None if server.calibration_s is None else server.calibration_s * 1e3,
        }
        known = {figure: value for figure, value in figures.items() if value is not None}
        values |= {names.server_metric(server.name, figure): value for figure, value in known.items()}
    return values


def latency_metrics(result: TuningResult) -> dict[str, float]:
    """The estimated latency, and what the second measurements of the winners say of it, as far as they are known."""
    estimated_s, confirmed_s = result.estimated_latency_s, result.confirmed_latency_s
    values = {names.BEST_LATENCY_MS: estimated_s * 1e3} if estimated_s else {}
    if estimated_s and confirmed_s:
        values |= {names.CONFIRMED_LATENCY_MS: confirmed_s * 1e3, names.OPTIMISM: confirmed_s / estimated_s}
    return values


def _final_metrics(result: TuningResult) -> dict[str, float]:
    values = {
        names.TIME_CONFIRM_S: result.durations.confirm_s,
        names.TIME_LOG_S: result.durations.log_s,
        names.PROBE_SPREAD: result.probe_spread,
    }
    values |= latency_metrics(result)
    if result.total_trials:
        values.pop(names.BEST_LATENCY_MS, None)  # the last round has said it
    else:
        values[names.TRIALS_MEASURED] = 0
    return values


def _task_row(task: TaskState) -> dict[str, Any]:
    return {
        "task": task.info.name,
        "algorithm": task.info.algorithm,
        "weight": task.info.weight,
        "flops": task.info.flops,
        "latency_us": task.best_s * 1e6 if task.best_s is not None else None,
        "confirmed_latency_us": task.confirmed_s * 1e6 if task.confirmed_s is not None else None,
        "confirmed_error": task.confirmed_error,
        "optimism": task.optimism,
        "gflops": task.gflops,
        "trials": {status.value: count for status, count in task.num_trials.items()},
        "stop_reason": task.stop_reason,
        "workload_hash": task.info.workload_hash,
        "layer": task.info.layer_hash,
        "max_rel_error": task.info.max_rel_error,
    }


def trials_table(trials: Sequence[Trial], tasks: Sequence[TaskInfo]) -> dict[str, list[Any]]:
    """A table as `mlflow.load_table` reads it: that of `log_table`, which would add to what is there."""
    algorithms = {task.name: task.algorithm for task in tasks}
    latencies_us = [None if trial.latency_s is None else five_digits(trial.latency_s * 1e6) for trial in trials]
    columns: dict[str, Sequence[Any]] = {
        "step": [trial.step for trial in trials],
        "task": [trial.task for trial in trials],
        "status": [trial.status.value for trial in trials],
        "latency_us": latencies_us,
        "error": [trial.error for trial in trials],
        "round": [trial.round_ for trial in trials],
        "algorithm": [algorithms.get(trial.task) for trial in trials],
    }
    decided = decision_columns([trial.decision for trial in trials])
    columns |= {name: column for name, column in decided.items() if name not in columns}
    return {"columns": list(columns), "data": list(zip(*columns.values(), strict=True))}
