"""The entry point `main`: tune, compile and evaluate as nested runs, then register and promote."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import mlflow
from mlflow.entities import Run
from mlflow.exceptions import ExecutionException

from ansor_mlflow import names
from ansor_mlflow.errors import UserInputError, error_for_exit_code
from ansor_mlflow.options import (
    CompileOptions,
    EvaluateOptions,
    Options,
    PipelineOptions,
    PromoteOptions,
    TuneOptions,
    load_options,
)
from ansor_mlflow.steps.promotion import Promotion, promote
from ansor_mlflow.tracking import StepRun, command_lines, pipeline_note, register, step_run, translated_errors

_log = logging.getLogger("ansor_mlflow")

_FROM_TUNE = (
    names.BEST_LATENCY_MS,
    names.CONFIRMED_LATENCY_MS,
    names.OPTIMISM,
    names.TRIALS_MEASURED,
    names.TRIALS_PER_MINUTE,
)
_FROM_COMPILE = (names.COVERAGE_TASKS, names.COVERAGE_FLOPS)


@dataclass(frozen=True)
class PipelineResult:
    """What the pipeline made."""

    run_id: str
    experiment_id: str
    model_uri: str
    metrics: dict[str, float]
    """The summary metrics, as on the parent run."""
    registered_version: str | None
    promotion: Promotion | None
    """Whether the version became the champion; None where that was not asked for."""


def run_pipeline(options: PipelineOptions, project: Path) -> PipelineResult:
    """Runs the entry points one after the other, each in a process and a run of its own.

    Args:
        options: Parameters of all steps.
        project: Directory of the `MLproject` file.

    Raises:
        AnsorMlflowError: A step failed; the error is of its kind and has its message.
        UserInputError: `project` has no `MLproject` file, or `promote` is given without `register_as`.
    """
    if options.promote and not options.register_as:
        raise UserInputError("promote=true: only a registered model has a champion; give register_as, too")
    if not (project / "MLproject").is_file():
        raise UserInputError(f"{project} has no MLproject file; run this in the project's folder, or use mlflow run")
    commands = command_lines("main", options)
    with step_run("main", options, options.network) as run:
        run.log_note(pipeline_note(options.network, commands))
        tuned = _run_step("tune", _only(options, TuneOptions), project, run)
        if options.resume_run:
            with translated_errors("read the run that went on"):
                tuned = mlflow.get_run(options.resume_run)
        tags = {key: tuned.data.tags[key] for key in (names.TAG_NETWORK, names.TAG_TARGET, names.TAG_NUM_THREADS)}
        run.log_tags({**tags, "mlflow.runName": tuned.data.tags["mlflow.runName"].removeprefix("tune ")})
        compiled = _run_step("compile", {**_only(options, CompileOptions), "tune_run": tuned.info.run_id}, project, run)
        model_uri = compiled.data.tags[names.TAG_MODEL_URI]
        run.log_tags({names.TAG_MODEL_URI: model_uri, names.TAG_TUNE_RUN: tuned.info.run_id})
        checks = {**_only(options, EvaluateOptions), "model_uri": model_uri}
        evaluated = _run_step("evaluate", checks, project, run)

        metrics = {
            **_pick(tuned, _FROM_TUNE),
            **_pick(compiled, _FROM_COMPILE),
            **_pick(evaluated, names.SUMMARY_METRICS),
        }
        run.log_metrics(metrics)
        told = {**tuned.data.tags, names.TAG_MODEL_URI: model_uri}
        run.log_note(pipeline_note(tags[names.TAG_NETWORK], commands, told, metrics))
        version = None
        if options.register_as:
            evidence = {name: f"{metrics[name]:.6g}" for name in names.SUMMARY_METRICS if name in metrics}
            version = register(model_uri, options.register_as, {**evidence, **tags})
        promotion = _promote(options, version) if options.promote and version else None
        return PipelineResult(run.run_id, tuned.info.experiment_id, model_uri, metrics, version, promotion)


def _promote(options: PipelineOptions, version: str) -> Promotion:
    """Promotes the new version in a nested run; where it loses, the pipeline has done its work all the same."""
    _log.info("=== promote ===")
    given = {**_only(options, PromoteOptions), "model": options.register_as, "candidate": version}
    return promote(load_options(PromoteOptions, given))


def _only(options: Options, cls: type[Options]) -> dict[str, str]:
    """The options that another class has, too, where they differ from the defaults."""
    return {name: text for name, text in options.changed().items() if name in cls.model_fields}


def _run_step(entry_point: str, parameters: Mapping[str, str], project: Path, parent: StepRun) -> Run:
    """Runs an entry point as a child run in this environment, and returns the finished run."""
    _log.info("=== %s ===", entry_point)
    try:
        with translated_errors(f"run the entry point {entry_point}"):
            submitted = mlflow.projects.run(
                str(project),
                entry_point=entry_point,
                parameters=dict(parameters),
                experiment_id=mlflow.get_run(parent.run_id).info.experiment_id,
                env_manager="local",
            )
            return mlflow.get_run(submitted.run_id)
    except ExecutionException as err:
        failed = _last_child(parent)
        message = failed.data.tags.get(names.TAG_ERROR, str(err)) if failed else str(err)
        exit_code = int(failed.data.tags.get(names.TAG_EXIT_CODE, "1")) if failed else 1
        raise error_for_exit_code(exit_code, f"{entry_point}: {message}") from err


def _last_child(parent: StepRun) -> Run | None:
    with translated_errors("find the step that failed"):
        runs = mlflow.search_runs(
            [mlflow.get_run(parent.run_id).info.experiment_id],
            filter_string=f"tags.mlflow.parentRunId = '{parent.run_id}'",
            order_by=["attributes.start_time DESC"],
            max_results=1,
            output_format="list",
        )
    return runs[0] if runs else None


def _pick(run: Run, metric_names: tuple[str, ...]) -> dict[str, float]:
    return {name: run.data.metrics[name] for name in metric_names if name in run.data.metrics}
