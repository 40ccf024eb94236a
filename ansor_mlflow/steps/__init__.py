"""The entry points as functions of their options; here the tuner and MLflow meet."""

from ansor_mlflow.steps.compile import CompileResult, compile_network
from ansor_mlflow.steps.evaluate import evaluate
from ansor_mlflow.steps.pipeline import PipelineResult, run_pipeline
from ansor_mlflow.steps.tune import tune

__all__ = ["CompileResult", "PipelineResult", "compile_network", "evaluate", "run_pipeline", "tune"]
