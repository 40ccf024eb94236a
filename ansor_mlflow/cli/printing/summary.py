"""What the commands print at the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.table import Table

from ansor_mlflow.cli.console import console, say
from ansor_mlflow.cli.printing.promote import print_promotion
from ansor_mlflow.tracking import latency_rows, run_page, server_command, summary_rows, ui_address

if TYPE_CHECKING:
    from ansor_mlflow.steps.compiling import CompileResult
    from ansor_mlflow.steps.evaluation import EvaluateResult
    from ansor_mlflow.steps.pipeline import PipelineResult
    from ansor_mlflow.steps.tuning import TuneResult


def print_tuned(result: TuneResult) -> None:
    """Prints what the tuning promises, and its run."""
    say(", ".join(f"{label} {value}" for label, value in summary_rows(result.metrics)))
    say(f"run    {result.run_id}")


def print_compiled(result: CompileResult) -> None:
    """Prints what is covered, the run, and where the model is."""
    covered = result.coverage
    say(f"coverage {covered.task_share:.0%} of tasks, {covered.flops_share:.1%} of operations")
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


def _print_model(result: CompileResult | PipelineResult) -> None:
    say(f"run    {result.run_id}")
    say(f"model  {result.model_uri}")
