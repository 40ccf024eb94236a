"""The step `tune`, and what it begins with."""

from ansor_mlflow.steps.tuning.tune import TuneResult, resolved_options, tune
