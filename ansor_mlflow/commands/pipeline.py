"""The entry point `main`: tune, compile and evaluate as nested runs, then register and promote."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import mlflow
from mlflow.entities import Run
from mlflow.exceptions import ExecutionException

from ansor_mlflow import names, tracking
from ansor_mlflow.commands.doctor import warn_of_the_machine
from ansor_mlflow.errors import INTERRUPTED_EXIT_CODE, AnsorMlflowError, UserInputError, error_for_exit_code
from ansor_mlflow.foreign import Part, Report, Reported, Table, read_yaml
from ansor_mlflow.measuring import RIVALS, choose_examples, require_examples, require_rivals
from ansor_mlflow.model import require_pad
from ansor_mlflow.parameters import (
    CompileOptions,
    EvaluateOptions,
    Options,
    PipelineOptions,
    PromoteOptions,
    RunOptions,
    TuneOptions,
    listed,
    load_options,
)
from ansor_mlflow.steps.compiling import compile_network
from ansor_mlflow.steps.evaluation import evaluate
from ansor_mlflow.steps.promotion import Promotion, promote, rivals_of
from ansor_mlflow.steps.tuning import TuneResult, prepare_tuning, resolved_options, tune
from ansor_mlflow.tensors import all_sizes
from ansor_mlflow.trials import TuningObserver

_log = logging.getLogger("ansor_mlflow")

_ENTRY_POINTS: dict[str, type[Options]] = {"tune": TuneOptions, "compile": CompileOptions, "evaluate": EvaluateOptions}


@dataclass(frozen=True, kw_only=True)
class PipelineResult(Reported):
    """What the pipeline made."""

    run_id: str
    experiment_id: str
    network: str
    target: str
    model_uri: str
    metrics: dict[str, float]
    registered_version: str | None
    promotion: Promotion | None

    def report(self) -> Report:
        parts: list[Part] = [Table(tracking.summary_rows(self.metrics))]
        if self.registered_version:
            parts.append(f"registered as version {self.registered_version}")
        if self.promotion:
            promoted = self.promotion.report()
            parts += [promoted.title, *promoted.parts]
        where = {"run": self.run_id, "model": self.model_uri}
        if start := tracking.server_command():
            where["start"] = start
        where["open"] = tracking.run_address(self.experiment_id, self.run_id)
        return Report(f"{self.network} for {self.target}", parts, where)


def has_our_entry_points(directory: Path) -> bool:
    """Whether a directory has an `MLproject` file with the entry points, and their parameters, that `main` runs."""
    try:
        project = read_yaml((directory / "MLproject").read_bytes())
        return all(
            set(listed(cls)) <= project["entry_points"][name]["parameters"].keys()
            for name, cls in _ENTRY_POINTS.items()
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False  # there is none, or it is of something else


RunStep = Callable[[str, Mapping[str, str]], Run]
"""Runs an entry point with its parameters as a child run, and returns the finished run."""


def run_pipeline(
    options: PipelineOptions, project: Path | None = None, observers: Sequence[TuningObserver] = ()
) -> PipelineResult:
    """Runs the steps one after the other, each in a run of its own.

    `project` is the directory of an `MLproject` file, whose entry points are run, each in a process of its own; without
    one the steps are called here. An error of a step is of its kind, and has its message.
    """
    if options.promote and not options.register_as:
        raise UserInputError("promote=true: only a registered model has a champion; give register_as, too")
    tuning = load_options(TuneOptions, _only(options, TuneOptions))
    resolved = resolved_options(tuning)
    if options.resume_run:  # so that the run and its description tell of the network that goes on
        options = load_options(PipelineOptions, {**options.changed(), **resolved.changed()})
    require_examples(options.data)
    require_rivals("rivals", options.rivals)
    require_rivals("champion", rivals_of(options))
    warn_of_the_machine(options)
    work = None if project else prepare_tuning(resolved)  # before there is a run, as it may find what is wrong
    if work:
        # so that a tuning is not in vain
        choose_examples(options.data, all_sizes(work.network), options.seed)
        require_pad(options.pad, options.network, work.network)
    commands = tracking.command_lines("main", options)
    with tracking.step_run("main", options, options.network) as run:
        tune_here = partial(tune, tuning, observers, work)
        run_step: RunStep = partial(_run_entry_point, run, project) if project else partial(_run_here, tune_here)
        run.log_note(tracking.pipeline_note(options.network, commands))
        run.tuning = options.resume_run
        tuned = run_step("tune", _only(options, TuneOptions))
        if options.resume_run:
            with tracking.translated_errors("read the run that went on"):
                tuned = mlflow.get_run(options.resume_run)
        run.tuning = tuned.info.run_id
        tags = {key: tuned.data.tags[key] for key in (names.TAG_NETWORK, names.TAG_TARGET, names.TAG_NUM_THREADS)}
        run.log_tags({**tags, "mlflow.runName": tuned.data.tags["mlflow.runName"].removeprefix("tune ")})
        compiled = run_step("compile", {**_only(options, CompileOptions), "tune_run": tuned.info.run_id})
        model_uri = compiled.data.tags[names.TAG_MODEL_URI]
        run.log_tags({names.TAG_MODEL_URI: model_uri, names.TAG_TUNE_RUN: tuned.info.run_id})
        tracking.make_model(run.run_id, model_uri.removeprefix("models:/"))
        evaluated = run_step("evaluate", {**_only(options, EvaluateOptions), "model_uri": model_uri})

        repeated = (
            (tuned, (*names.TUNING_METRICS, *names.QUANTIZATION_METRICS)),
            (compiled, (names.COVERAGE_TASKS, names.COVERAGE_FLOPS, names.LIBRARY_GROWTH_MIB)),
            (evaluated, (*names.summary_metrics(RIVALS), names.ONNXRUNTIME_SHARE, names.PROBE_SPREAD)),
        )
        of_steps = [(name, step.data.metrics) for step, of_step in repeated for name in of_step]
        metrics = {name: of_step[name] for name, of_step in of_steps if name in of_step}
        run.log_metrics(metrics)
        reasons = [step.data.tags.get(names.TAG_UNRELIABLE, "") for step in (tuned, evaluated)]
        found = {
            names.TAG_UNRELIABLE: "; ".join(filter(None, reasons)),
            **{name: evaluated.data.tags.get(name, "") for name in (names.TAG_BEST_RIVAL, names.TAG_SIZES)},
        }
        found = {name: text for name, text in found.items() if text}
        run.log_tags(found)
        tags |= found
        told = {**tuned.data.tags, **tags, names.TAG_MODEL_URI: model_uri}
        note = tracking.pipeline_note(tags[names.TAG_NETWORK], commands, told, metrics)
        run.log_note(note)
        # few, so that the page shows them beside the description, which has the rest
        evidence = {name: tags[name] for name in (names.TAG_NETWORK, names.TAG_TARGET)}
        evidence[names.LATENCY_MS] = f"{metrics[names.LATENCY_MS]:.5g}"
        version = tracking.register(model_uri, options.register_as, evidence, note) if options.register_as else None
        promotion = _promote(options, version) if options.promote and version else None
        return PipelineResult(
            run_id=run.run_id,
            experiment_id=tuned.info.experiment_id,
            network=tags[names.TAG_NETWORK],
            target=tags[names.TAG_TARGET],
            model_uri=model_uri,
            metrics=metrics,
            registered_version=version,
            promotion=promotion,
        )


def _promote(options: PipelineOptions, version: str) -> Promotion:
    """Promotes the new version in a nested run; where it loses, the pipeline has done its work all the same."""
    _log.info("=== promote ===")
    given = {**_only(options, PromoteOptions), "model": options.register_as, "candidate": version}
    return promote(load_options(PromoteOptions, given))


def _only(options: Options, cls: type[Options]) -> dict[str, str]:
    """The options that another class has, too, where they differ from the defaults; without those of a run alone."""
    shared = cls.model_fields.keys() - RunOptions.model_fields.keys()
    return {name: text for name, text in options.changed().items() if name in shared}


def _run_here(tune_here: Callable[[], TuneResult], entry_point: str, parameters: Mapping[str, str]) -> Run:
    _log.info("=== %s ===", entry_point)
    try:
        if entry_point == "tune":
            run_id = tune_here().run_id
        elif entry_point == "compile":
            run_id = compile_network(load_options(CompileOptions, parameters)).run_id
        else:
            run_id = evaluate(load_options(EvaluateOptions, parameters)).run_id
    except AnsorMlflowError as err:
        raise type(err)(f"{entry_point}: {err}") from err
    with tracking.translated_errors(f"read the run of {entry_point}"):
        return mlflow.get_run(run_id)


def _run_entry_point(parent: tracking.StepRun, project: Path, entry_point: str, parameters: Mapping[str, str]) -> Run:
    _log.info("=== %s ===", entry_point)
    try:
        with tracking.translated_errors(f"run the entry point {entry_point}"):
            submitted = mlflow.projects.run(
                str(project),
                entry_point=entry_point,
                parameters=dict(parameters),
                experiment_id=mlflow.get_run(parent.run_id).info.experiment_id,
                env_manager="local",
            )
            return mlflow.get_run(submitted.run_id)
    except KeyboardInterrupt:
        with contextlib.suppress(AnsorMlflowError):  # the server may be away
            _note_tuning(parent, entry_point, _last_child(parent))
        raise
    except ExecutionException as err:
        failed = _last_child(parent)
        _note_tuning(parent, entry_point, failed)
        message = failed.data.tags.get(names.TAG_ERROR, str(err)) if failed else str(err)
        exit_code = int(failed.data.tags.get(names.TAG_EXIT_CODE, "1")) if failed else 1
        if exit_code == INTERRUPTED_EXIT_CODE:
            raise KeyboardInterrupt from err
        raise error_for_exit_code(exit_code, f"{entry_point}: {message}") from err


def _note_tuning(parent: tracking.StepRun, entry_point: str, child: Run | None) -> None:
    """Says in the run of the pipeline which tuning can go on, if it is this child, which worked in this directory."""
    if (
        entry_point == "tune"
        and child
        and tracking.StepRun(child.info.run_id, tracking.work_directory(child.info.run_id)).has_records
    ):
        parent.tuning = child.info.run_id


def _last_child(parent: tracking.StepRun) -> Run | None:
    with tracking.translated_errors("find the step that failed"):
        runs = mlflow.search_runs(
            [mlflow.get_run(parent.run_id).info.experiment_id],
            filter_string=f"tags.mlflow.parentRunId = '{parent.run_id}'",
            order_by=["attributes.start_time DESC"],
            max_results=1,
            output_format="list",
        )
    return runs[0] if runs else None
