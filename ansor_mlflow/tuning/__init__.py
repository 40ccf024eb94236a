"""The tuner: our outer loop around MetaSchedule's search. Knows nothing of MLflow; observers listen to it."""

from ansor_mlflow.tuning.local import TuningJob, tune_locally
from ansor_mlflow.tuning.round_log import RoundLog
from ansor_mlflow.tuning.stopping import require_valid_trials
from ansor_mlflow.tuning.workers import start_fork_server

__all__ = ["RoundLog", "TuningJob", "require_valid_trials", "start_fork_server", "tune_locally"]
