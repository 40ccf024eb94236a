"""The description of a run, `mlflow.note.content`: what was tuned, with which result, and how to do it again."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

from mlflow.utils.mlflow_tags import MLFLOW_RUN_NOTE

from ansor_mlflow import names
from ansor_mlflow.foreign import duration, for_shell, without_credentials
from ansor_mlflow.measuring import KernelTimes, rival_titles
from ansor_mlflow.parameters import CheckOptions, Options, RunOptions, TuneOptions
from ansor_mlflow.tracking.report.history import TuningHistory
from ansor_mlflow.tracking.report.pages import count, kernel_rows, result_rows, summary_rows
from ansor_mlflow.trials import STOP_REASONS

_MARKDOWN = re.compile(r"([\\`*_\[\]<>#|~])")
_MAX_CHARS = 7500  # length at which a description is cut: a tag has 8000 characters at most


def note_tags(tags: Mapping[str, str], note: str) -> dict[str, str]:
    """The tags that describe a run with such tags; none where a user has written or edited the description."""
    current = tags.get(MLFLOW_RUN_NOTE)
    ours = {tags.get(name) for name in (names.NOTE_SHA256, names.OLD_NOTE_SHA256)}
    if current is not None and _digest(current) not in ours:
        return {}
    return {MLFLOW_RUN_NOTE: note, names.NOTE_SHA256: _digest(note)}


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
    subject = f"**{_inline(plan.network)}** for {_inline(plan.target)}"
    tasks = count(len(plan.tasks), "task")
    if error:
        return _note(f"Tuning of {subject}: {tasks}, ended by an error: {_inline(error)}", commands)
    if history.result is None:
        return _note(f"Tuning… {subject}: {tasks}, {plan.num_trials} trials.", commands)
    found_s = history.result.estimated_latency_s
    estimate = f", estimated **{duration(found_s)}**" if found_s else ""
    before = f", before {duration(history.before_s)}" if found_s and history.before_s else ""
    return _note(f"Tuned {subject}: {tasks}{estimate}{before}.", commands, _items(result_rows(history)))


def pipeline_note(
    network: str, commands: Sequence[str], tags: Mapping[str, str] = {}, metrics: Mapping[str, float] = {}
) -> str:
    """Describes a run of the pipeline: before, or with its tags and metrics afterwards."""
    if not metrics:
        head = f"**{_inline(network)}**: to be tuned, compiled and evaluated, each in a run below this one."
        return _note(head, commands)
    rows = _figures(tags, metrics)
    if reason := tags.get(names.TAG_STOP_REASON):
        rows.append(("tuning ended", STOP_REASONS.get(reason, reason)))
    if model_uri := tags.get(names.TAG_MODEL_URI):
        rows.append(("model", model_uri))
    return _note(_headline(network, tags, metrics), commands, _items(rows))


def evaluation_note(
    network: str,
    commands: Sequence[str],
    tags: Mapping[str, str],
    metrics: Mapping[str, float],
    kernels: KernelTimes | None = None,
) -> str:
    """Describes a run that has evaluated a model, with where the time goes if that is known."""
    where = ["", "Where the time goes:", "", *_items(kernel_rows(kernels))] if kernels else []
    return _note(_headline(network, tags, metrics), commands, [*_items(_figures(tags, metrics)), *where])


def _headline(network: str, tags: Mapping[str, str], metrics: Mapping[str, float]) -> str:
    """What is known of a model in one sentence: of a description, MLflow's page shows the first lines."""
    line = f"**{_inline(network)}** for {_inline(tags.get(names.TAG_TARGET, ''))}"
    if latency_ms := metrics.get(names.LATENCY_MS):
        line += f": **{duration(latency_ms / 1e3)}**"
    best = tags.get(names.TAG_BEST_RIVAL, "")
    compared = {rival_titles().get(best, best): names.SPEEDUP_VS_BEST, "untuned": names.SPEEDUP_VS_UNTUNED}
    speeds = [f"{metrics[of]:.3g} × as fast as {_inline(title)}" for title, of in compared.items() if of in metrics]
    return ", ".join([line, *speeds]) + (". **Not to be trusted.**" if tags.get(names.TAG_UNRELIABLE) else ".")


def _figures(tags: Mapping[str, str], metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    of_tags = {"not to be trusted": names.TAG_UNRELIABLE, "sizes": names.TAG_SIZES}
    return [*((label, tags[name]) for label, name in of_tags.items() if tags.get(name)), *summary_rows(metrics)]


def _items(rows: Sequence[tuple[str, str]]) -> list[str]:
    """A list: MLflow's page shows tables without any space between their columns."""
    return [f"- {_inline(label)}: {_inline(value)}" for label, value in rows]


def _note(headline: str, commands: Sequence[str], lines: Sequence[str] = ()) -> str:
    """A headline, the commands as a block, and more lines; a command's text may hold anything, but not the end of the
    block.
    """
    block = ["", *(f"    {' '.join(command.splitlines())}" for command in commands)] if commands else []
    more = ["", *lines] if lines else []
    text = without_credentials("\n".join([headline, *block, *more]))
    if len(text) > _MAX_CHARS and commands:  # half a command does something else
        where = f"its parameters are in `{names.PARAMETERS_FILE}`"
        return _note(headline, (), [*lines, "", f"The command is too long to be shown; {where}."])
    return text[:_MAX_CHARS]


def _inline(text: str) -> str:
    """A text within a line of Markdown, as it is."""
    return _MARKDOWN.sub(r"\\\1", " ".join(text.split()))
