"""The trials of a tuning run as a table, of one that was killed, too."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlflow
from pydantic import PositiveInt

from ansor_mlflow import names
from ansor_mlflow.errors import RecordsError, UserInputError, one_line
from ansor_mlflow.files import scratch_directory
from ansor_mlflow.foreign import typed
from ansor_mlflow.records import read_journal
from ansor_mlflow.steps.fetching import fetch_run, tuning_of
from ansor_mlflow.tracking import read_artifact, translated_errors

if TYPE_CHECKING:
    import pandas as pd

_COLUMNS = ("step", "task", "status", "latency_us", "error", "weight", "workload_hash")


@dataclass(frozen=True)
class TaskRow:
    """What is read of a task in `tasks.json`."""

    task: str
    workload_hash: str
    weight: PositiveInt
    layer: str = ""
    confirmed_error: float | None = None


@dataclass(frozen=True)
class _Logged:
    """A table as `mlflow.log_table` writes it."""

    columns: tuple[str, ...] = ()
    data: tuple[tuple[Any, ...], ...] = ()


@dataclass(frozen=True)
class _TrialRow:
    """A row of `trials.json`."""

    step: int
    task: str
    status: str
    latency_us: float | None
    error: str


def load_trials(run_id: str) -> pd.DataFrame:
    """Reads the trials of a tuning run, in their order.

    The columns are `step` (position in the run, from 1), `task`, `status` (a `TrialStatus`'s value), `latency_us` (mean
    per call; NaN unless the status is "ok"), `error`, `weight` (calls of the task in the network) and
    `workload_hash`. A run that was killed before it had its tables knows its trials from its records; they do not say
    `task` and `weight`, which are missing values then.

    Args:
        run_id: ID of a tuning run, or of a run of main or compile that used one.

    Raises:
        UserInputError: There is no such run, or it has no trials.
        RecordsError: Its records are not those that their manifest describes.
        MachineError: A server is away.

    Example:
        >>> trials = am.load_trials(tuning.run_id)
        >>> trials.groupby("status")["latency_us"].count().to_dict()
        {'ok': 4}
    """
    import pandas as pd

    with translated_errors(f"read the trials of run {run_id}"):
        run = mlflow.get_run(tuning_of(mlflow.get_run(run_id)) or run_id)
        tuning_id = run.info.run_id
        files = {file.path for file in mlflow.MlflowClient().list_artifacts(tuning_id)}
        tasks = read_artifact(tuning_id, names.TASKS_FILE, list[TaskRow]) if names.TASKS_FILE in files else []
        table = read_artifact(tuning_id, names.TRIALS_TABLE, _Logged) if names.TRIALS_TABLE in files else _Logged()
    if not files & {names.TRIALS_TABLE, names.RECORDS_DIR}:
        raise UserInputError(f"run_id={run_id}: the run has no trials; give the ID of a tuning run")
    try:
        trials = typed(list[_TrialRow], [dict(zip(table.columns, row, strict=True)) for row in table.data])
    except ValueError as err:
        raise RecordsError(
            f"{names.TRIALS_TABLE} of run {tuning_id} is damaged ({one_line(err)}); give another run"
        ) from err
    by_name = {task.task: {"weight": task.weight, "workload_hash": task.workload_hash} for task in tasks}
    rows = [{**asdict(trial), **by_name.get(trial.task, {})} for trial in trials]
    if names.RECORDS_DIR in files and len(rows) < run.data.metrics.get(names.TRIALS_MEASURED, math.inf):
        rows = max(rows, _of_records(tuning_id, tasks), key=len)
    return pd.DataFrame(rows, columns=list(_COLUMNS)).astype({"latency_us": "float64", "weight": "Int64"})


def _of_records(run_id: str, tasks: list[TaskRow]) -> list[dict[str, Any]]:
    """What the records say: those of a run that was killed, or killed again after it went on."""
    with scratch_directory() as scratch:
        trials = read_journal(fetch_run(run_id, Path(scratch)))
    by_hash = {task.workload_hash: task for task in tasks}
    return [
        {
            "step": trial.step,
            "task": getattr(by_hash.get(trial.workload_hash), "task", None),
            "status": trial.status.value,
            "latency_us": trial.latency_s * 1e6 if trial.latency_s is not None else None,
            "error": trial.error,
            "weight": getattr(by_hash.get(trial.workload_hash), "weight", None),
            "workload_hash": trial.workload_hash,
        }
        for trial in trials
    ]
