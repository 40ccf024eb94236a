"""The trials of a tuning run as a table, of one that was killed, too."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
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
from ansor_mlflow.tracking import read_artifact, translated_errors, trials_table

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class TaskRow:
    """What is read of a task in `tasks.json`."""

    task: str
    workload_hash: str
    weight: PositiveInt
    layer: str = ""
    algorithm: str | None = None
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
    weight: int | None = None
    workload_hash: str | None = None
    round: int | None = None
    algorithm: str | None = None
    sketch: str | None = None


_COLUMNS = tuple(field.name for field in fields(_TrialRow))
_OF_TASK = ("weight", "workload_hash", "algorithm")
_Decisions = dict[str, bool | int | str | None]


def load_trials(run_id: str) -> pd.DataFrame:
    """Reads the trials of a tuning run, in their order.

    The columns are `step` (position in the run, from 1), `task`, `status` (a `TrialStatus`'s value), `latency_us` (mean
    per call; NaN unless the status is "ok"), `error`, `round`, `algorithm` (of the layer), `sketch` (of the program;
    "metaschedule" for one of MetaSchedule's space), `weight` (calls of the task in the network) and `workload_hash`.
    One for each decision follows, such as `lanes` and `rows` of the tile in registers, or `sampled`: the tiles, values
    and places (`@`) that MetaSchedule drew, in the order of its trace. A program whose sketch has no such decision has
    a missing value there, and so have runs of versions that did not log them.

    A run that was killed before it had its tables knows its trials from its records; they do not say `task`,
    `algorithm` and `weight`, which are missing values then.

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
        rows = _rows(table, tasks)
    except ValueError as err:
        raise RecordsError(
            f"{names.TRIALS_TABLE} of run {tuning_id} is damaged ({one_line(err)}); give another run"
        ) from err
    if names.RECORDS_DIR in files and len(rows) < run.data.metrics.get(names.TRIALS_MEASURED, math.inf):
        rows = max(rows, _rows(_of_records(tuning_id, tasks), tasks), key=len)
    decisions = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in _COLUMNS]
    found = pd.DataFrame(rows, columns=[*_COLUMNS, *decisions])
    kinds = {"latency_us": "float64", "weight": "Int64", "round": "Int64"}
    return found.astype({**kinds, **dict(found[decisions].convert_dtypes().dtypes)})


def _rows(table: _Logged, tasks: list[TaskRow]) -> list[dict[str, Any]]:
    """The trials of a table, with what is known of their tasks; a ValueError where they are none."""
    given = [dict(zip(table.columns, row, strict=True)) for row in table.data]
    trials = typed(list[_TrialRow], [{key: row[key] for key in _COLUMNS if key in row} for row in given])
    decided = typed(list[_Decisions], [{key: row[key] for key in row if key not in _COLUMNS} for row in given])
    by_name = {task.task: {name: getattr(task, name) for name in _OF_TASK} for task in tasks}
    rows = []
    for trial, decisions in zip(trials, decided, strict=True):
        known = {name: value for name, value in by_name.get(trial.task, {}).items() if value is not None}
        rows.append({**asdict(trial), "task": trial.task or None, **known, **decisions})
    return rows


def _of_records(run_id: str, tasks: list[TaskRow]) -> _Logged:
    """What the records say: those of a run that was killed, or killed again after it went on."""
    with scratch_directory() as scratch:
        trials = read_journal(fetch_run(run_id, Path(scratch)))
    by_hash = {task.workload_hash: task.task for task in tasks}
    table = trials_table([replace(trial, task=by_hash.get(trial.workload_hash, "")) for trial in trials], ())
    rows = [(*row, trial.workload_hash) for row, trial in zip(table["data"], trials, strict=True)]
    return _Logged((*table["columns"], "workload_hash"), tuple(rows))
