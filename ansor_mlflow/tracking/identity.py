"""What a run is called and where it stands, as its user said: to a step, to `mlflow run`, or in MLFLOW_RUN_CONTEXT."""

from __future__ import annotations

import re
from dataclasses import dataclass

import mlflow
from mlflow.entities import LifecycleStage, Run
from mlflow.tracking.context.system_environment_context import SystemEnvironmentContext
from mlflow.utils import name_utils
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID, MLFLOW_RUN_NAME, MLFLOW_RUN_NOTE

from ansor_mlflow.errors import UserInputError
from ansor_mlflow.foreign import without_credentials
from ansor_mlflow.parameters import Options, RunOptions
from ansor_mlflow.tracking.environment import translated_errors

_WORDS = name_utils._GENERATOR_PREDICATES, name_utils._GENERATOR_NOUNS
_GENERATED = re.compile(r"({})-({})-\d+".format(*map("|".join, _WORDS)), re.IGNORECASE)
"""A name that MLflow gives to a run without one."""


@dataclass(frozen=True)
class Identity:
    """What a step's run is called, and where it stands."""

    name: str  # name that its user gave it; empty where the step names it
    tags: dict[str, str]
    experiment_id: str | None  # None for the experiment that is active; below a run, it is that of this run
    is_child: bool  # whether it stands below a run of this process, or below one for which `mlflow run` made it


def is_of_user(name: str | None) -> bool:
    """Whether somebody gave a run its name, or MLflow did."""
    return bool(name) and not _GENERATED.fullmatch(str(name))


def identity_of(options: Options, step: str, resume: str, made_for_this: str, active: Run | None) -> Identity:
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
        name = known if is_of_user(known) and not (resume and known.startswith(f"{step} ")) else ""
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
