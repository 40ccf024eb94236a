"""What a run in MLflow shows: params, tags, metrics, artifacts, and what went wrong."""

from ansor_mlflow.tracking.mirror import RecordMirror, whole_records
from ansor_mlflow.tracking.observer import MlflowObserver
from ansor_mlflow.tracking.outbox import Message, Outbox, open_outbox
from ansor_mlflow.tracking.run import StepRun, fail_project_run, step_run

__all__ = [
    "Message",
    "MlflowObserver",
    "Outbox",
    "RecordMirror",
    "StepRun",
    "fail_project_run",
    "open_outbox",
    "step_run",
    "whole_records",
]
