"""Commands that only look: `plan`, `explain`, `diff`, and the trials of a run as a table."""

from ansor_mlflow.steps.reports.diff import TaskDifference, TuningDifference, diff_runs
from ansor_mlflow.steps.reports.explain import explain_task
from ansor_mlflow.steps.reports.explanation import Explanation
from ansor_mlflow.steps.reports.plan import Plan, PlannedTask, plan_tuning
from ansor_mlflow.steps.reports.trials import load_trials
