"""The entry points as functions of their options; here the tuner and MLflow meet."""

from ansor_mlflow.steps.compile import CompileResult, compile_network
from ansor_mlflow.steps.evaluate import evaluate
from ansor_mlflow.steps.explain import Explanation, explain_task
from ansor_mlflow.steps.pipeline import PipelineResult, run_pipeline
from ansor_mlflow.steps.plan import Plan, PlannedTask, plan_tuning
from ansor_mlflow.steps.sync import Delivered, sync
from ansor_mlflow.steps.tune import tune

__all__ = [
    "CompileResult",
    "Delivered",
    "Explanation",
    "PipelineResult",
    "Plan",
    "PlannedTask",
    "compile_network",
    "evaluate",
    "explain_task",
    "plan_tuning",
    "run_pipeline",
    "sync",
    "tune",
]
