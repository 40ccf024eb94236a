"""What a run in MLflow shows: params, tags, metrics, artifacts, and what went wrong."""

from ansor_mlflow.tracking.environment import describe_environment
from ansor_mlflow.tracking.error_translation import clear_failures, one_line
from ansor_mlflow.tracking.figures import draw_roofline, save_figure
from ansor_mlflow.tracking.mirror import RecordMirror, whole_records
from ansor_mlflow.tracking.observer import MlflowObserver
from ansor_mlflow.tracking.outbox import Message, Outbox, UndeliveredError, deliver_left, has_messages, open_outbox
from ansor_mlflow.tracking.record_pool import PoolDevice, PushedRecords, RecordPool
from ansor_mlflow.tracking.registry import register, registered_versions
from ansor_mlflow.tracking.report.history import CurvePoint, TaskHistory, TuningHistory
from ansor_mlflow.tracking.report.note import command_lines, pipeline_note, tuning_note
from ansor_mlflow.tracking.report.pages import render_page
from ansor_mlflow.tracking.report.tuning_page import ScheduleText, tuning_page
from ansor_mlflow.tracking.run import WORK_ROOT, StepRun, fail_project_run, params_used, remove_directory, step_run
from ansor_mlflow.tracking.sources import is_uri, pinned_uri
from ansor_mlflow.tracking.views import existing_views

__all__ = [
    "WORK_ROOT",
    "CurvePoint",
    "Message",
    "MlflowObserver",
    "Outbox",
    "PoolDevice",
    "PushedRecords",
    "RecordMirror",
    "RecordPool",
    "ScheduleText",
    "StepRun",
    "TaskHistory",
    "TuningHistory",
    "UndeliveredError",
    "clear_failures",
    "command_lines",
    "deliver_left",
    "describe_environment",
    "draw_roofline",
    "existing_views",
    "fail_project_run",
    "has_messages",
    "is_uri",
    "one_line",
    "open_outbox",
    "params_used",
    "pinned_uri",
    "pipeline_note",
    "register",
    "registered_versions",
    "remove_directory",
    "render_page",
    "save_figure",
    "step_run",
    "tuning_note",
    "tuning_page",
    "whole_records",
]
