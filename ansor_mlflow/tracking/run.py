"""The MLflow run of a step: opened, named, filled with params, and closed with the truth about how it ended."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shlex
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import mlflow
import pydantic_core
import yaml
from mlflow.entities import DatasetInput, InputTag, LifecycleStage, Metric, Param, Run, RunTag
from mlflow.tracking.context.system_environment_context import SystemEnvironmentContext
from mlflow.utils import name_utils
from mlflow.utils.mlflow_tags import (
    MLFLOW_DATASET_CONTEXT,
    MLFLOW_PARENT_RUN_ID,
    MLFLOW_PROJECT_ENTRY_POINT,
    MLFLOW_RUN_NAME,
    MLFLOW_RUN_NOTE,
)

from ansor_mlflow import names
from ansor_mlflow.errors import (
    AnsorMlflowError,
    MachineError,
    RecordsError,
    UserInputError,
    add_note,
    one_line,
    only_warn,
)
from ansor_mlflow.files import path_below, sha256_of_file, translated_disk_errors, write_text
from ansor_mlflow.foreign import read_json, read_yaml, typed, without_credentials
from ansor_mlflow.parameters import MAX_PARAM_LENGTH, Options, RunOptions, as_text, why_gone
from ansor_mlflow.tensors import Arrays
from ansor_mlflow.tracking.environment import translated_errors
from ansor_mlflow.tracking.killed import (
    WORK_ROOT,
    end_killed_steps,
    ended,
    has_messages,
    has_records,
    held,
    remove_directory,
)
from ansor_mlflow.tracking.outbox import Message, UndeliveredError, as_logged, forget_end, leave_message
from ansor_mlflow.tracking.report.note import resuming_lines
from ansor_mlflow.tracking.report.pages import run_address, server_command
from ansor_mlflow.tracking.report.views import ensure_views

T = TypeVar("T")
_log = logging.getLogger("ansor_mlflow")
_DIGEST_CHARS = 8  # as of the digests that MLflow makes
_PROJECT_RUN_VARIABLE = "MLFLOW_RUN_ID"
_WORDS = name_utils._GENERATOR_PREDICATES, name_utils._GENERATOR_NOUNS
_GENERATED = re.compile(r"({})-({})-\d+".format(*map("|".join, _WORDS)), re.IGNORECASE)
"""A name that MLflow gives to a run without one."""
_open_runs: dict[str, StepRun] = {}  # those of this process, by their IDs


def work_directory(run_id: str) -> Path:
    """Where the step of a run keeps files until MLflow has them; a server may give an ID that is none."""
    try:
        return path_below(WORK_ROOT, run_id)
    except ValueError as err:
        raise MachineError(f"the tracking server calls a run {err}; ask who runs that server") from err


@dataclass
class StepRun:
    """An open run."""

    run_id: str
    directory: Path  # scratch directory of the run; removed at the end, unless the step fails with records in it
    is_named: bool = False  # whether its user named it; no step does then
    tuning: str = ""  # ID of the tuning run that can go on when the step is done again; empty where none has records

    @property
    def has_records(self) -> bool:
        """Whether a trial was recorded in the scratch directory."""
        return has_records(self.directory)

    def log_metrics(self, metrics: Mapping[str, float], model_id: str = "") -> None:
        """Logs metrics of the run, and of the LoggedModel that they were found of; `mlflow.log_metrics` would give them
        to every model that the run has made, too.
        """
        now_ms = int(time.time() * 1000)
        with translated_errors("log metrics"):
            logged = [
                Metric(name, value, now_ms, 0, model_id=model_id or None, run_id=self.run_id)
                for name, value in as_logged(metrics).items()
            ]
            mlflow.MlflowClient().log_batch(self.run_id, metrics=logged)

    def log_options(self, options: Options) -> None:
        """Logs those options as params that differ from their defaults, and those by which runs are compared; all of
        them are in a YAML file, which a step takes as its `config`.

        One that was logged with another value (by `mlflow run`, before a configuration file or a tuning run decided
        it) is logged under a second name, `<name>_used`.
        """
        shown_by_the_run = set(RunOptions.model_fields)
        values = _without_credentials(options.model_dump(mode="json", exclude=shown_by_the_run, exclude_none=True))
        self.log_text(yaml.safe_dump(values, sort_keys=False, allow_unicode=True), names.PARAMETERS_FILE)
        texts = {name: without_credentials(as_text(value)) for name, value in options if name not in shown_by_the_run}
        with translated_errors("log params"):
            logged, params = mlflow.get_run(self.run_id).data.params, []
            wanted = options.changed().keys() | names.SEARCH_PARAMS
            for name, text in texts.items():
                if name not in logged and name in wanted:
                    params.append(Param(name, text))
                elif name in logged and logged[name] not in (text, shlex.quote(text)):
                    params.append(Param(f"{name}_used", text))  # `mlflow run` logs what it puts on a command line
            mlflow.MlflowClient().log_batch(self.run_id, params=params)

    def forget_failure(self) -> None:
        """Removes the tags of an earlier end."""
        with translated_errors("delete tags"):
            client = mlflow.MlflowClient()
            for tag in names.END_TAGS & client.get_run(self.run_id).data.tags.keys():
                client.delete_tag(self.run_id, tag)

    def log_tags(self, tags: Mapping[str, str]) -> None:
        """Sets tags; that with the name only where the run's user did not name it."""
        tags = {name: text for name, text in tags.items() if not (self.is_named and name == MLFLOW_RUN_NAME)}
        with translated_errors("set tags"):
            safe = [RunTag(name, without_credentials(value)) for name, value in tags.items()]
            mlflow.MlflowClient().log_batch(self.run_id, tags=safe)

    def log_data(self, path: str, example: Arrays) -> None:
        """Says on which file's inputs a model is checked: its name, its digest, and what a call takes of it; nothing
        where inputs are seeded (an empty path).
        """
        if not path:
            return
        from mlflow.data.numpy_dataset import from_numpy

        with translated_errors("log the data set"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The specified dataset source can be")  # there are two names for one kind
            digest = sha256_of_file(Path(path))[:_DIGEST_CHARS]
            dataset = from_numpy(dict(example), source=path, name=Path(path).name, digest=digest)
            tags = [InputTag(MLFLOW_DATASET_CONTEXT, "evaluation")]
            given = DatasetInput(dataset._to_mlflow_entity(), tags)
            mlflow.MlflowClient().log_inputs(self.run_id, datasets=[given])

    def log_unreliable(self, reason: str) -> None:
        """Warns that what was measured cannot be trusted, and tags the run; an empty reason does nothing."""
        if reason:
            _log.warning("the times cannot be trusted: %s", reason)
            self.log_tags({names.TAG_UNRELIABLE: reason})

    def log_note(self, text: str) -> None:
        """Describes the run, as Markdown, unless a user has edited the description."""
        with translated_errors("describe the run"):
            Message(note=without_credentials(text)).deliver(self.run_id, self.directory)

    def log_text(self, text: str, name: str) -> None:
        """Uploads a text as a file."""
        write_text(self.directory / name, text)
        self.log_artifacts(self.directory / name)

    def log_json(self, value: object, name: str) -> None:
        """Uploads a value as a JSON file, with null for a number that is not finite."""
        self.log_text(pydantic_core.to_json(value, indent=1, inf_nan_mode="null").decode(), name)

    def log_artifacts(self, path: Path, artifact_path: str | None = None) -> None:
        """Uploads a file, or the contents of a directory."""
        with translated_errors(f"upload {path.name}"):
            if path.is_dir():
                mlflow.log_artifacts(str(path), artifact_path, run_id=self.run_id)
            else:
                mlflow.log_artifact(str(path), artifact_path, run_id=self.run_id)


@contextlib.contextmanager
def step_run(step: str, options: Options, run_name: str, *, resume: str = "") -> Iterator[StepRun]:
    """Opens the run of a step: the one that `mlflow run` made for this process, a new one, nested in an active run, or
    one that ended and goes on (`resume`), whose params stay. A name that its user gave it stays, too.

    On success the run ends FINISHED. On an error it ends FAILED with the message as tag `ansor.error`, on Ctrl-C
    KILLED; the error goes on to the caller, with a note that says which run it was and which command goes on. The
    scratch directory stays if records are in it.
    """
    run_name = without_credentials(run_name)
    made_for_this = os.environ.get(_PROJECT_RUN_VARIABLE, "")  # MLflow forgets it when the run is opened
    if resume:
        with ended(resume, work_directory(resume)):
            pass
    with translated_errors("start a run"):
        active = mlflow.active_run()
        identity = _identity_of(options, step, resume, made_for_this, active)
        info = mlflow.start_run(
            resume or None,
            experiment_id=identity.experiment_id,
            run_name=identity.name or run_name,
            nested=active is not None,
            tags=identity.tags,
        ).info
    run, is_child = StepRun(info.run_id, work_directory(info.run_id), bool(identity.name)), identity.is_child
    outer = _open_runs.get(active.info.run_id) if active else None

    def describe(err: BaseException) -> str:
        """Which run an error ended, and the command with which its tuning goes on, unless a run above says it."""
        is_whole = step == "tune" and isinstance(err, UndeliveredError)
        if not run.tuning or is_whole or (made_for_this and is_child):
            return f"run    {run.run_id}"
        project, command = resuming_lines(step, options, run.tuning, info.experiment_id)
        return f"run    {run.run_id}\ngo on  {project if made_for_this else command}"

    with _named_in_errors(run, outer, describe), contextlib.ExitStack() as held_directory:
        try:
            with translated_disk_errors():
                if not is_child and (command := server_command()):
                    _log.info("start  %s", command)
                _log.info("%s run %s  %s", step, run.run_id, run_address(info.experiment_id, run.run_id))
                held_directory.enter_context(held(run.run_id, run.directory))
                if not is_child:
                    end_killed_steps()  # of which one that goes on here is none: it is held
                ensure_views(info.experiment_id)
                if resume:
                    forget_end(run.directory)
                    run.forget_failure()
                    if made_for_this not in ("", resume):
                        _tell_where_it_goes_on(made_for_this, step, resume)
                else:
                    run.log_tags({names.TAG_STEP: step, MLFLOW_RUN_NAME: run_name})
                    run.log_options(options)
                yield run
        except BaseException as err:
            if step == "tune" and run.has_records:
                run.tuning = run.run_id
            if made_for_this not in ("", run.run_id):
                fail_project_run(err)
            _end_failed(run, err)
            if not run.has_records and not has_messages(run.directory):
                remove_directory(run.directory)
            raise
        with translated_errors("end the run"):
            mlflow.end_run()
        remove_directory(run.directory)


@contextlib.contextmanager
def _named_in_errors(run: StepRun, outer: StepRun | None, describe: Callable[[BaseException], str]) -> Iterator[None]:
    """Adds to an error inside which run it ended; of nested runs, the outer one, which is told of the tuning."""
    _open_runs[run.run_id] = run
    try:
        yield
    except BaseException as err:
        if outer:
            outer.tuning = run.tuning or outer.tuning
        else:
            add_note(err, describe(err))
        raise
    finally:
        del _open_runs[run.run_id]


def _tell_where_it_goes_on(made_for_this: str, step: str, resume: str) -> None:
    """Says in the run that `mlflow run` made which older one is used in its place."""
    with translated_errors("start a run"):
        is_named = _is_of_user(mlflow.get_run(made_for_this).info.run_name)
    tags = {names.TAG_STEP: step, names.TAG_TUNE_RUN: resume, MLFLOW_RUN_NAME: f"{step}: goes on in {resume}"}
    StepRun(made_for_this, WORK_ROOT, is_named).log_tags(tags)


def _end_failed(run: StepRun, err: BaseException) -> None:
    """Marks a run FAILED or KILLED. The store may be what failed: then `sync` does it, where there is an outbox."""
    status = "KILLED" if isinstance(err, KeyboardInterrupt) else "FAILED"
    try:
        try:
            Message(tags=_error_tags(err)).deliver(run.run_id, run.directory)
        finally:
            mlflow.end_run(status)  # whatever MLflow knows of it, it is not the active run any more
    except Exception as second:  # noqa: BLE001 - the first error is the one to report
        is_left = has_messages(run.directory)
        if is_left and isinstance(err, UndeliveredError):
            return  # the step did not fail: its messages, of which the error speaks, end the run
        later = "; ansor-mlflow sync does it when the server is back" if is_left else ""
        _log.warning("the run %s is not marked %s: %s%s", run.run_id, status, one_line(second), later)
        if is_left:
            leave_message(run.directory, Message(tags=_error_tags(err), status=status))


def _error_tags(err: BaseException) -> dict[str, str]:
    if isinstance(err, AnsorMlflowError):
        message, exit_code = str(err), err.exit_code
    elif isinstance(err, KeyboardInterrupt):
        message, exit_code = "interrupted by the user", 130
    else:
        message, exit_code = f"{type(err).__name__}: {one_line(err)}", 1
    return {names.TAG_ERROR: message, names.TAG_EXIT_CODE: str(exit_code)}


def fail_project_run(err: BaseException) -> None:
    """Tags the run that `mlflow run` made for this process with an error that ended the step before it was opened, or
    that ended another run in its place.
    """
    run_id = os.environ.get(_PROJECT_RUN_VARIABLE)
    if run_id:
        with only_warn(f"the run {run_id} could not be tagged"):
            tags = _error_tags(err)
            if entry_point := mlflow.get_run(run_id).data.tags.get(MLFLOW_PROJECT_ENTRY_POINT):
                tags[names.TAG_STEP] = entry_point
            Message(tags=tags).deliver(run_id, WORK_ROOT)


def logged_params(run: Run) -> dict[str, str]:
    """The params of a run as text, with the values that were used in the end; MLflow cuts long ones."""
    params = run.data.params
    used = {name: _unquoted(params.get(f"{name}_used", value)) for name, value in params.items()}
    return {name: value for name, value in used.items() if not name.endswith("_used")}


def params_used(run: Run, cls: type[Options]) -> dict[str, str]:
    """The parameters of a step's run that belong to an option class, as text, with the values that were used in the
    end. Values that are gone are left out: the default takes over.
    """
    run_id = run.info.run_id
    with translated_errors(f"read the parameters of run {run_id}"):
        files = {file.path for file in mlflow.MlflowClient().list_artifacts(run_id)}
        if names.PARAMETERS_FILE in files:
            params = _read_parameters(run_id)
        else:  # an older run
            params = logged_params(run)
            if cut := [name for name, value in params.items() if len(value) >= MAX_PARAM_LENGTH]:
                params |= _uncut(run_id, cut)
    # Whom somebody trusted says nothing of whom another user does, who only takes the run.
    taken = cls.model_fields.keys() - {"trust"}
    return {name: value for name, value in params.items() if name in taken and not why_gone(name, value)}


def _without_credentials(value: Any) -> Any:
    """A plain value, the texts within which show no credentials."""
    if isinstance(value, dict):
        return {name: _without_credentials(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_credentials(item) for item in value]
    return without_credentials(value) if isinstance(value, str) else value


def _read_parameters(run_id: str) -> dict[str, str]:
    try:
        text = mlflow.artifacts.load_text(f"runs:/{run_id}/{names.PARAMETERS_FILE}")
        values = typed(dict[str, Any], read_yaml(text.encode()))
        return {name: as_text(tuple(value) if isinstance(value, list) else value) for name, value in values.items()}
    except ValueError as err:
        raise RecordsError(
            f"{names.PARAMETERS_FILE} of run {run_id} is damaged ({one_line(err)}); give another run"
        ) from err


def _uncut(run_id: str, cut: Sequence[str]) -> dict[str, str]:
    whole = read_artifact(run_id, names.PARAMS_FILE, dict[str, str])
    if missing := [name for name in cut if name not in whole]:
        raise RecordsError(f"{names.PARAMS_FILE} of run {run_id} has no {missing[0]}; give another run")
    return {name: whole[name] for name in cut}


def read_artifact(run_id: str, name: str, kind: type[T]) -> T:
    """The value of a JSON file among the artifacts of a run; see `typed`. A damaged one is a `RecordsError`."""
    try:
        return typed(kind, read_json(mlflow.artifacts.load_text(f"runs:/{run_id}/{name}")))
    except ValueError as err:
        raise RecordsError(f"{name} of run {run_id} is damaged ({one_line(err)}); give another run") from err


def _unquoted(value: str) -> str:
    """A param as `mlflow run` got it: it logs what it puts on a command line."""
    try:
        return shlex.split(value)[0] if value[:1] == "'" else value
    except ValueError:  # a param of somebody else
        return value


@dataclass(frozen=True)
class Identity:
    """What a step's run is called, and where it stands."""

    name: str  # name that its user gave it; empty where the step names it
    tags: dict[str, str]
    experiment_id: str | None  # None for the experiment that is active; below a run, it is that of this run
    is_child: bool  # whether it stands below a run of this process, or below one for which `mlflow run` made it


def _is_of_user(name: str | None) -> bool:
    """Whether somebody gave a run its name, or MLflow did."""
    return bool(name) and not _GENERATED.fullmatch(str(name))


def _identity_of(options: Options, step: str, resume: str, made_for_this: str, active: Run | None) -> Identity:
    """What the user of a step says of its run.

    Args:
        options: The options of the step.
        step: Name of the step, with which the names that steps give begin.
        resume: ID of the run that goes on; empty where there is none.
        made_for_this: ID of the run that `mlflow run` made for this process; empty where it did not.
        active: The run that is active in this process, below which a new one stands.

    Raises:
        UserInputError: There is no such parent run or experiment, or the run stands elsewhere already.
    """
    given = options if isinstance(options, RunOptions) else RunOptions()
    existing = mlflow.get_run(resume or made_for_this) if resume or made_for_this else None
    is_child = active is not None or (existing is not None and MLFLOW_PARENT_RUN_ID in existing.data.tags)
    context = SystemEnvironmentContext()
    tags: dict[str, str] = dict(context.tags()) if context.in_context() else {}
    if is_child:  # they are what is said of the run above it
        tags = {name: text for name, text in tags.items() if name not in (MLFLOW_RUN_NAME, MLFLOW_RUN_NOTE)}
    name = given.run_name or tags.pop(MLFLOW_RUN_NAME, "")
    if existing is not None and not name:
        known = str(existing.info.run_name or "")
        name = known if _is_of_user(known) and not (resume and known.startswith(f"{step} ")) else ""
    tags |= given.tags
    experiment_id = active.info.experiment_id if active is not None else None
    if given.experiment:
        experiment_id = _experiment_of(given.experiment, existing)
    if given.parent_run:
        if active is not None and active.info.run_id != given.parent_run:
            raise UserInputError(
                f"parent_run={given.parent_run}: the run {active.info.run_id} is active, and a new one stands below "
                "it; leave parent_run out"
            )
        with translated_errors(f"find parent_run={given.parent_run}"):
            parent = mlflow.get_run(given.parent_run)
        tags[MLFLOW_PARENT_RUN_ID] = given.parent_run
        experiment_id = experiment_id or str(parent.info.experiment_id)
    shown = {key: without_credentials(text) for key, text in tags.items()}
    return Identity(without_credentials(name), shown, experiment_id, is_child)


def _experiment_of(given: str, existing: Run | None) -> str:
    """The ID of an experiment, which is made where there is none of that name."""
    with translated_errors(f"find experiment={given}"):
        client = mlflow.MlflowClient()
        found = client.get_experiment_by_name(given)
        if found is None and given.isdecimal():
            found = client.get_experiment(given)
        experiment_id = str(found.experiment_id if found else client.create_experiment(given))
    if found and found.lifecycle_stage != LifecycleStage.ACTIVE:
        raise UserInputError(
            f"experiment={given}: it was deleted; mlflow experiments restore --experiment-id {experiment_id}, or give "
            "another"
        )
    if existing is not None and existing.info.experiment_id != experiment_id:
        raise UserInputError(
            f"experiment={given}: the run {existing.info.run_id} is in experiment {existing.info.experiment_id} "
            "already; leave it out, or give --experiment-name to `mlflow run`"
        )
    return experiment_id
