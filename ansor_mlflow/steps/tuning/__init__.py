"""The step `tune`, and what it begins with."""

from ansor_mlflow.steps.tuning.tune import TuneResult, TuningWork, prepare_tuning, resolved_options, tune
