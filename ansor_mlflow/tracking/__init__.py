"""What a run in MLflow shows: params, tags, metrics, artifacts, and what went wrong."""

from ansor_mlflow.tracking.environment import describe_environment, open_in_turn, translated_errors
from ansor_mlflow.tracking.killed import (
    WORK_ROOT,
    end_killed_run,
    ended,
    has_messages,
    has_records,
    held,
    is_held,
    remove_directory,
)
from ansor_mlflow.tracking.memory import EarlierTuning, best_source, find_tunings, memory_tags
from ansor_mlflow.tracking.observer import MlflowObserver, latency_metrics, trials_table
from ansor_mlflow.tracking.outbox import (
    GRACE_AFTER_ERROR_S,
    GRACE_S,
    Message,
    Outbox,
    RecordMirror,
    UndeliveredError,
    deliver_left,
    open_outbox,
    whole_records,
)
from ansor_mlflow.tracking.registry import (
    aliases_of,
    describe_model,
    find_version,
    finish_moves,
    logged_model_of,
    make_model,
    model_name,
    move_aliases,
    register,
    tag_version,
    tags_of_version,
    take_model,
    undo_moves,
    undoable_moves,
)
from ansor_mlflow.tracking.report.figures import draw_losses, draw_roofline, draw_speedups, save_figure
from ansor_mlflow.tracking.report.history import TuningHistory
from ansor_mlflow.tracking.report.note import command_lines, evaluation_note, pipeline_note, tuning_note
from ansor_mlflow.tracking.report.pages import (
    KernelNote,
    ScheduleText,
    html_page,
    kernel_rows,
    kernels_page,
    run_address,
    server_command,
    summary_rows,
    tuning_page,
)
from ansor_mlflow.tracking.run import (
    StepRun,
    fail_project_run,
    logged_params,
    params_used,
    read_artifact,
    step_run,
    work_directory,
)
from ansor_mlflow.tracking.sources import display_name, find_program, network_of, pinned_uri

open_in_turn()
