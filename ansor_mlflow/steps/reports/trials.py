"""The trials of a tuning run as a table, of one that was killed, too."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import mlflow

from ansor_mlflow import names
from ansor_mlflow.errors import UserInputError
from ansor_mlflow.files import scratch_directory
from ansor_mlflow.records import JournalEntry, read_journal
from ansor_mlflow.steps.records import fetch_run, tuning_of
from ansor_mlflow.tracking import read_artifact, translated_errors

if TYPE_CHECKING:
    import pandas as pd

_COLUMNS = ("step", "task", "status", "latency_us", "error", "weight", "workload_hash")

_NO_TRIALS: dict[str, Any] = {"columns": [], "data": []}

_Row = dict[str, Any]


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
    """
    import pandas as pd

    with translated_errors(f"read the trials of run {run_id}"):
        run = mlflow.get_run(tuning_of(mlflow.get_run(run_id)) or run_id)
        tuning_id = run.info.run_id
        files = {file.path for file in mlflow.MlflowClient().list_artifacts(tuning_id)}
        tasks = read_artifact(tuning_id, names.TASKS_FILE) if names.TASKS_FILE in files else []
        table = read_artifact(tuning_id, names.TRIALS_TABLE) if names.TRIALS_TABLE in files else _NO_TRIALS
    if not files & {names.TRIALS_TABLE, names.RECORDS_DIR}:
        raise UserInputError(f"run_id={run_id}: the run has no trials; give the ID of a tuning run")
    rows = _of_table(table, tasks)
    if names.RECORDS_DIR in files and len(rows) < run.data.metrics.get(names.TRIALS_MEASURED, math.inf):
        rows = max(rows, _of_records(tuning_id, tasks), key=len)
    return pd.DataFrame(rows, columns=list(_COLUMNS)).astype({"latency_us": "float64", "weight": "Int64"})


def _of_table(table: dict[str, Any], tasks: list[_Row]) -> list[_Row]:
    by_name = {task["task"]: task for task in tasks}
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    return [{**row, **_joined(by_name.get(row["task"]))} for row in rows]


def _of_records(run_id: str, tasks: list[_Row]) -> list[_Row]:
    """What the records say: those of a run that was killed, or killed again after it went on."""
    with scratch_directory() as scratch:
        records = fetch_run(run_id, Path(scratch))
        entries = read_journal(records)
    by_hash = {task["workload_hash"]: task for task in tasks}
    return [_of_entry(entry, by_hash) for entry in entries]


def _of_entry(entry: JournalEntry, by_hash: dict[str, _Row]) -> _Row:
    task = by_hash.get(entry.workload_hash)
    return {
        "step": entry.step,
        "task": task["task"] if task else None,
        "status": entry.status.value,
        "latency_us": fmean(entry.run_s) * 1e6 if entry.run_s else None,
        "error": entry.error,
        **_joined(task),
        "workload_hash": entry.workload_hash,
    }


def _joined(task: _Row | None) -> _Row:
    return {name: task[name] if task else None for name in ("weight", "workload_hash")}
