"""What the commands print at the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.table import Table

from ansor_mlflow.cli.console import console, microseconds, say
from ansor_mlflow.cli.printing.promote import print_promotion
from ansor_mlflow.tracking import latency_rows, run_page, server_command, summary_rows, ui_address

if TYPE_CHECKING:
    from ansor_mlflow.steps.compiling import CompileResult, RecompileResult
    from ansor_mlflow.steps.evaluation import EvaluateResult
    from ansor_mlflow.steps.pipeline import PipelineResult
    from ansor_mlflow.steps.tuning import TuneResult


def print_tuned(result: TuneResult) -> None:
    """Prints what the tuning promises, and its run."""
    say(", ".join(f"{label} {value}" for label, value in summary_rows(result.metrics)))
    say(f"run    {result.run_id}")


def print_compiled(result: CompileResult) -> None:
    """Prints what is covered, the run, and where the model is."""
    say(_coverage(result))
    _print_model(result)


def print_evaluated(result: EvaluateResult) -> None:
    """Prints the latencies on one line, and the run."""
    say(", ".join(f"{label} {value}" for label, value in latency_rows(result.metrics)))
    say(f"run    {result.run_id}")


def print_summary(metrics: Mapping[str, float]) -> None:
    """Prints latencies, speedups and errors as a table."""
    made = Table(show_header=False)
    for row in summary_rows(metrics):
        made.add_row(*row)
    console().print(made)


def print_recompiled(result: RecompileResult) -> None:
    """Prints the workloads whose records do not apply any more, and where the new model is."""
    for lost in (survivor for survivor in result.survivors if survivor.fate != "applied"):
        reason = "the schedule does not apply" if lost.task else "the network has this workload no more"
        say(f"{lost.task or lost.workload_hash}  {microseconds(lost.run_s)} µs  {reason}")
    say(f"the records of {result.num_applied} of {len(result.survivors)} workloads apply, {_coverage(result)}")
    _print_model(result)
    for version in result.registered_versions:
        say(f"registered as {version}")


def print_pipeline(result: PipelineResult) -> None:
    """Prints the summary, where the results are and how to look at them."""
    print_summary(result.metrics)
    _print_model(result)
    if result.registered_version is not None:
        say(f"registered as version {result.registered_version}")
    if result.promotion is not None:
        print_promotion(result.promotion)
    if start := server_command():
        say(f"start  {start}")
    say(f"open   {ui_address(run_page(result.experiment_id, result.run_id))}")


def _coverage(result: CompileResult | RecompileResult) -> str:
    covered = result.coverage
    return f"coverage {covered.task_share:.0%} of tasks, {covered.flops_share:.1%} of operations"


def _print_model(result: CompileResult | RecompileResult | PipelineResult) -> None:
    say(f"run    {result.run_id}")
    say(f"model  {result.model_uri}")
