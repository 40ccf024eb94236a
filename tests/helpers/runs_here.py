"""Tunings of a small network in this process and directory, and what they leave on this disk."""

from __future__ import annotations

import os
from pathlib import Path

import mlflow
from helpers.commands import FAST, RunCommand, flags

QUICK = {**FAST, "cost_model": "none", "num_trials_per_round": 2}


def tune_here(run_here: RunCommand, **parameters: object) -> mlflow.entities.Run:
    """Tunes `small.onnx` with 12 trials, unless `parameters` say otherwise; returns the run."""
    assert run_here("tune", *flags({**QUICK, "network": "small.onnx", "trials": 12, **parameters})) == 0
    return newest_run()


def newest_run() -> mlflow.entities.Run:
    """The last run that began in the experiment of this test."""
    experiment_id = os.environ["MLFLOW_EXPERIMENT_ID"]
    (run,) = mlflow.MlflowClient().search_runs([experiment_id], order_by=["start_time DESC"], max_results=1)
    return run


def artifacts_of(run_id: str) -> Path:
    return Path(mlflow.get_run(run_id).info.artifact_uri.removeprefix("file://"))
