"""The entry points as functions of their options; here the tuner and MLflow meet."""

from ansor_mlflow.steps.compile import CompileResult, compile_network
from ansor_mlflow.steps.diff import Compared, Difference, TaskDifference, diff_runs
from ansor_mlflow.steps.evaluate import evaluate
from ansor_mlflow.steps.explain import Explanation, explain_task
from ansor_mlflow.steps.pipeline import PipelineResult, run_pipeline
from ansor_mlflow.steps.plan import Plan, PlannedTask, plan_tuning
from ansor_mlflow.steps.pool import PoolContents, PulledRecords, list_pool, pull_records, push_records
from ansor_mlflow.steps.promote import promote
from ansor_mlflow.steps.promotion import Outcome, Promotion
from ansor_mlflow.steps.recompile import RecompileResult, recompile
from ansor_mlflow.steps.records import WrittenRecords, distill_records, merge_records, show_records
from ansor_mlflow.steps.rollback import Rollback, roll_back
from ansor_mlflow.steps.runs import FoundRun, FoundRuns, find_runs
from ansor_mlflow.steps.sync import Delivered, sync
from ansor_mlflow.steps.trials import load_trials
from ansor_mlflow.steps.tune import tune
from ansor_mlflow.steps.verify import ReplayedRecord, Verification, verify_records

__all__ = [
    "Compared",
    "CompileResult",
    "Delivered",
    "Difference",
    "Explanation",
    "FoundRun",
    "FoundRuns",
    "Outcome",
    "PipelineResult",
    "Plan",
    "PlannedTask",
    "PoolContents",
    "Promotion",
    "PulledRecords",
    "RecompileResult",
    "ReplayedRecord",
    "Rollback",
    "TaskDifference",
    "Verification",
    "WrittenRecords",
    "compile_network",
    "diff_runs",
    "distill_records",
    "evaluate",
    "explain_task",
    "find_runs",
    "list_pool",
    "load_trials",
    "merge_records",
    "plan_tuning",
    "promote",
    "pull_records",
    "push_records",
    "recompile",
    "roll_back",
    "run_pipeline",
    "show_records",
    "sync",
    "tune",
    "verify_records",
]
