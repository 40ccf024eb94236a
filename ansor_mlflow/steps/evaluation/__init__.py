"""The step `evaluate`: is a model right, how fast is it, and compared with what; here, or on a server of a fleet."""

from ansor_mlflow.steps.evaluation.evaluate import EvaluateResult, evaluate
from ansor_mlflow.steps.evaluation.rivals import rival_task
