"""What a run in MLflow shows: params, tags, metrics, artifacts, and what went wrong."""

from ansor_mlflow.tracking.observer import MlflowObserver
from ansor_mlflow.tracking.run import StepRun, fail_project_run, step_run

__all__ = ["MlflowObserver", "StepRun", "fail_project_run", "step_run"]
