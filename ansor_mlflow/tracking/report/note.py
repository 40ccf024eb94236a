"""The description of a run, `mlflow.note.content`: what was tuned, with which result, and how to do it again."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

from mlflow.utils.mlflow_tags import MLFLOW_RUN_NOTE

from ansor_mlflow import names
from ansor_mlflow.foreign import for_shell, without_credentials
from ansor_mlflow.measuring import KernelTimes
from ansor_mlflow.parameters import CheckOptions, Options, RunOptions, TuneOptions
from ansor_mlflow.tracking.report.history import TuningHistory
from ansor_mlflow.tracking.report.pages import count, kernel_rows, result_rows, summary_rows
from ansor_mlflow.trials import STOP_REASONS

_MARKDOWN = re.compile(r"([\\`*_\[\]<>#|~])")
_MAX_CHARS = 7500  # length at which a description is cut: a tag has 8000 characters at most


def note_tags(tags: Mapping[str, str], note: str) -> dict[str, str]:
    """The tags that describe a run with such tags; none where a user has written or edited the description."""
    current = tags.get(MLFLOW_RUN_NOTE)
    if current is not None and _digest(current) != tags.get(names.TAG_NOTE_SHA256):
        return {}
    return {MLFLOW_RUN_NOTE: note, names.TAG_NOTE_SHA256: _digest(note)}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def command_lines(entry_point: str, options: Options) -> tuple[str, str]:
    """The command lines that do a step again, with the parameters that differ from their defaults."""
    again = {name: text for name, text in options.changed().items() if name != "resume_run"}
    return _command_lines(entry_point, again)


def resuming_lines(entry_point: str, options: Options, tuning: str, experiment_id: str) -> tuple[str, str]:
    """The command lines, as those of `command_lines`, that do `tune` or `main` again, but let a tuning run go on.

    Its parameters are in that run, unless it has gone on with others already. `mlflow run` is told the experiment,
    which a shell knows.
    """
    given = options.changed()
    known = set() if "resume_run" in given else TuneOptions.model_fields.keys() - CheckOptions.model_fields.keys()
    needed = {name: text for name, text in given.items() if name not in known}
    return _command_lines(entry_point, {**needed, "resume_run": tuning}, f" --experiment-id {experiment_id}")


def _command_lines(entry_point: str, parameters: Mapping[str, str], experiment: str = "") -> tuple[str, str]:
    quoted = {
        name: for_shell(text, name.upper()) for name, text in parameters.items() if name not in RunOptions.model_fields
    }
    entry = "" if entry_point == "main" else f" -e {entry_point}"
    pairs = "".join(f" -P {name}={text}" for name, text in quoted.items())
    flags = "".join(f" --{name.replace('_', '-')} {text}" for name, text in quoted.items())
    return f"mlflow run . --env-manager local{experiment}{entry}{pairs}", f"ansor-mlflow {entry_point}{flags}"


def tuning_note(history: TuningHistory, commands: Sequence[str], error: str = "") -> str:
    """Describes a tuning that goes on, or has ended, maybe with an error; the commands do it again."""
    plan = history.plan
    assert plan is not None  # there is nothing to describe before
    subject = f"**{_inline(plan.network)}** for {_inline(plan.target)}: {count(len(plan.tasks), 'task')}"
    if error:
        lines = [f"Tuning of {subject}, ended by an error: {_inline(error)}"]
    elif history.result is None:
        lines = [f"Tuning… {subject}, {plan.num_trials} trials."]
    else:
        lines = [f"Tuned {subject}.", "", *_items(result_rows(history))]
    return _with_commands(lines, commands)


def pipeline_note(
    network: str, commands: Sequence[str], tags: Mapping[str, str] = {}, metrics: Mapping[str, float] = {}
) -> str:
    """Describes a run of the pipeline: before, or with its tags and metrics afterwards."""
    if not metrics:
        lines = [f"**{_inline(network)}**: to be tuned, compiled and evaluated, each in a run below this one."]
        return _with_commands(lines, commands)
    lines = [f"**{_inline(network)}** for {_inline(tags.get(names.TAG_TARGET, ''))}: tuned, compiled and evaluated."]
    rows = _figures(metrics, tags)
    if reason := tags.get(names.TAG_STOP_REASON):
        rows.append(("tuning ended", STOP_REASONS.get(reason, reason)))
    if model_uri := tags.get(names.TAG_MODEL_URI):
        rows.append(("model", model_uri))
    return _with_commands([*lines, "", *_items(rows)], commands)


def evaluation_note(
    network: str,
    commands: Sequence[str],
    tags: Mapping[str, str],
    metrics: Mapping[str, float],
    kernels: KernelTimes | None = None,
) -> str:
    """Describes a run that has evaluated a model, with where the time goes if that is known."""
    line = f"**{_inline(network)}** for {_inline(tags.get(names.TAG_TARGET, ''))}: checked and timed."
    where = ["", "Where the time goes:", "", *_items(kernel_rows(kernels))] if kernels else []
    return _with_commands([line, "", *_items(_figures(metrics, tags)), *where], commands)


def _figures(metrics: Mapping[str, float], tags: Mapping[str, str]) -> list[tuple[str, str]]:
    best = tags.get(names.TAG_BEST_RIVAL)
    unreliable = tags.get(names.TAG_UNRELIABLE)
    rows = [("not to be trusted", unreliable)] if unreliable else []
    return [*rows, *summary_rows(metrics), *([("best of them", best)] if best else [])]


def _items(rows: Sequence[tuple[str, str]]) -> list[str]:
    """A list: MLflow's page shows tables without any space between their columns."""
    return [f"- {_inline(label)}: {_inline(value)}" for label, value in rows]


def _with_commands(lines: Sequence[str], commands: Sequence[str]) -> str:
    """The lines, and the commands as a block; shell text may hold anything, but not the end of the block."""
    block = ["", "Again:", "", *(f"    {' '.join(command.splitlines())}" for command in commands)] if commands else []
    text = without_credentials("\n".join([*lines, *block]))
    if len(text) > _MAX_CHARS and commands:  # half a command does something else
        where = f"its parameters are those of the run, and in `{names.PARAMS_FILE}` where MLflow cuts one"
        return _with_commands([*lines, "", f"The command is too long to be shown; {where}."], ())
    return text[:_MAX_CHARS]


def _inline(text: str) -> str:
    """A text within a line of Markdown, as it is."""
    return _MARKDOWN.sub(r"\\\1", " ".join(text.split()))
