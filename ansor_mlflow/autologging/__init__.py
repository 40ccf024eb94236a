"""MLflow's autologging for TVM's own tuning functions."""

from ansor_mlflow.autologging.integration import autolog

__all__ = ["autolog"]
