"""Artifacts of runs that hold something else than what a step wrote are damaged, in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlflow
import pytest

from ansor_mlflow import load_trials, names
from ansor_mlflow.commands.diff import diff_runs
from ansor_mlflow.errors import RecordsError
from ansor_mlflow.measuring import KernelTimes
from ansor_mlflow.parameters import DiffOptions, TuneOptions
from ansor_mlflow.tracking import params_used, read_artifact

ANYTHING: list[Any] = [[], {}, 5, None, "text", [5], [[]], [{}], {"a": 1}]
TASK = {"task": "dense", "workload_hash": "0x1", "weight": 2}
TRIALS = {"columns": ["step", "task", "status", "latency_us", "error"], "data": [[1, "dense", "ok", 2.5, ""]]}


def run_with(experiment: str, files: dict[str, Any], **params: str) -> str:
    """ID of a tuning run with these artifacts."""
    client = mlflow.MlflowClient()
    run_id = str(client.create_run(experiment, tags={names.TAG_STEP: "tune"}).info.run_id)
    for name, value in files.items():
        client.log_text(run_id, json.dumps(value), name)
    for name, text in params.items():
        client.log_param(run_id, name, text)
    return run_id


@pytest.mark.parametrize("tasks", [*ANYTHING[1:], *([{**TASK, name: []}] for name in TASK), [{**TASK, "weight": 0}]])
def test_tasks_of_anything(new_experiment: str, tasks: Any) -> None:
    run_id = run_with(new_experiment, {names.TASKS_FILE: tasks, names.TRIALS_TABLE: TRIALS})
    with pytest.raises(RecordsError, match=f"{names.TASKS_FILE} of run {run_id} is damaged .*; give another run"):
        load_trials(run_id)
    with pytest.raises(RecordsError, match=f"{names.TASKS_FILE} of run {run_id} is damaged .*; give another run"):
        diff_runs(DiffOptions(runs=(run_id, run_id)))


@pytest.mark.parametrize(
    "trials",
    [
        *(value for value in ANYTHING if not isinstance(value, dict)),
        {"columns": [1], "data": [[1]]},
        {"columns": ["step"], "data": [[1]]},
        {**TRIALS, "data": [[1]]},
        {**TRIALS, "data": [[1, [], "ok", 2.5, ""]]},
        {"columns": [*TRIALS["columns"], "lanes"], "data": [[1, "dense", "ok", 2.5, "", [8]]]},
        {**TRIALS, "data": [[1, "dense", "ok", "fast", ""]]},
    ],
)
def test_trials_of_anything(new_experiment: str, trials: Any) -> None:
    run_id = run_with(new_experiment, {names.TASKS_FILE: [TASK], names.TRIALS_TABLE: trials})
    with pytest.raises(RecordsError, match=f"{names.TRIALS_TABLE} of run {run_id} is damaged .*; give another run"):
        load_trials(run_id)


def test_trials_are_joined_with_their_tasks(new_experiment: str) -> None:
    run_id = run_with(new_experiment, {names.TASKS_FILE: [TASK], names.TRIALS_TABLE: TRIALS})
    (row,) = load_trials(run_id).dropna(axis="columns").to_dict("records")
    assert row == {**dict(zip(TRIALS["columns"], TRIALS["data"][0], strict=True)), "weight": 2, "workload_hash": "0x1"}


def test_decisions_are_columns(new_experiment: str) -> None:
    columns = [*TRIALS["columns"], "round", "algorithm", "sketch", "lanes", "pad_at", "parallel"]
    data = [[1, "dense", "ok", 2.5, "", 1, "direct", "rows", 8, None, True], [2, "dense", "ok", 3, "", 2, *[None] * 5]]
    run_id = run_with(
        new_experiment, {names.TASKS_FILE: [TASK], names.TRIALS_TABLE: {"columns": columns, "data": data}}
    )
    trials = load_trials(run_id)
    assert list(trials["round"]) == [1, 2]
    assert trials.groupby(["sketch", "lanes"]).latency_us.min().to_dict() == {("rows", 8): 2.5}
    assert trials.lanes.dtype == "Int64"
    assert trials.parallel.dtype == "boolean"


@pytest.mark.parametrize("environment", [*ANYTHING, {"python": "3.11", "packages": []}])
def test_an_environment_of_anything(new_experiment: str, environment: Any) -> None:
    run_id = run_with(new_experiment, {names.TASKS_FILE: [TASK], names.ENVIRONMENT_FILE: environment})
    with pytest.raises(RecordsError, match=f"{names.ENVIRONMENT_FILE} of run {run_id} is damaged"):
        diff_runs(DiffOptions(runs=(run_id, run_id)))


@pytest.mark.parametrize("kernels", [*ANYTHING, {"latency_us": 5.0, "kernels": [{"name": "dense"}]}])
def test_kernels_of_anything(new_experiment: str, kernels: Any) -> None:
    run_id = run_with(new_experiment, {names.KERNELS_FILE: kernels})
    with pytest.raises(RecordsError, match=f"{names.KERNELS_FILE} of run {run_id} is damaged"):
        read_artifact(run_id, names.KERNELS_FILE, KernelTimes)


@pytest.mark.parametrize("params", [*ANYTHING, {"network": ["x"]}, {"network": 5}])
def test_params_of_anything(new_experiment: str, params: Any) -> None:
    run_id = run_with(new_experiment, {names.PARAMS_FILE: params}, network="x" * 6000)
    with pytest.raises(RecordsError, match=f"{names.PARAMS_FILE} of run {run_id} (is damaged|has no network)"):
        params_used(mlflow.get_run(run_id), TuneOptions)


@pytest.mark.parametrize("parameters", [b"[1, 2]", b"- network", b"{", b"5"])
def test_parameters_of_anything(new_experiment: str, tmp_path: Path, parameters: bytes) -> None:
    run_id = run_with(new_experiment, {})
    (tmp_path / names.PARAMETERS_FILE).write_bytes(parameters)
    mlflow.MlflowClient().log_artifact(run_id, str(tmp_path / names.PARAMETERS_FILE))
    with pytest.raises(RecordsError, match=f"{names.PARAMETERS_FILE} of run {run_id} is damaged"):
        params_used(mlflow.get_run(run_id), TuneOptions)
