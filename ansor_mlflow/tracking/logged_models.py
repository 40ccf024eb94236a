"""A tuned model in MLflow's Models tab: its name, what it is worth, and the runs that made and took it."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path

import mlflow
from mlflow.entities import LoggedModelInput, LoggedModelOutput
from mlflow.exceptions import MlflowException
from mlflow.models.model import MLMODEL_FILE_NAME
from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST, ErrorCode

from ansor_mlflow.errors import one_line
from ansor_mlflow.foreign import read_yaml, typed, without_credentials
from ansor_mlflow.tracking.environment import translated_errors
from ansor_mlflow.tracking.report.note import note_tags

_log = logging.getLogger("ansor_mlflow")
_MAX_NAME_CHARS = 200


def model_name(network: str, devices: str) -> str:
    """Names a model after its network and what it is compiled for: in URIs, so of letters, digits, _ and - alone."""
    return re.sub(r"[^\w-]+", "-", f"{network} {devices}".replace("×", "x"), flags=re.ASCII).strip("-")[
        :_MAX_NAME_CHARS
    ]


def logged_model_of(directory: Path) -> str:
    """ID of the LoggedModel that a downloaded model is; empty where this tracking server has none.

    Raises:
        MachineError: The server does not answer.
    """
    path = directory / MLMODEL_FILE_NAME
    try:
        model_id = typed(str, typed(dict[str, object], read_yaml(path.read_bytes())).get("model_id") or "")
    except (OSError, ValueError):
        return ""  # it was saved, and not logged
    return known_model(model_id)


def known_model(model_id: str) -> str:
    """The ID of a LoggedModel that this tracking server has, or else an empty one; the same for an empty one."""
    if not model_id:
        return ""
    with translated_errors("read the logged model"):
        try:
            return str(mlflow.get_logged_model(model_id).model_id)
        except MlflowException as err:
            if err.error_code != ErrorCode.Name(RESOURCE_DOES_NOT_EXIST):
                raise
            _log.info("nothing is known here of the model %s: %s", model_id, one_line(err))
            return ""


def take_model(run_id: str, model_id: str) -> None:
    """Links a run with the model that it looks at; an empty ID does nothing."""
    if model_id:
        with translated_errors("link the run and its model"):
            mlflow.MlflowClient().log_inputs(run_id, models=[LoggedModelInput(model_id)])


def make_model(run_id: str, model_id: str) -> None:
    """Links a run with the model that one of its steps made."""
    with translated_errors("link the run and its model"):
        mlflow.MlflowClient().log_outputs(run_id, [LoggedModelOutput(model_id, step=0)])


def describe_model(model_id: str, tags: Mapping[str, str], note: str) -> None:
    """Sets tags of a model, and takes away those that are empty now, and describes it, as Markdown, unless a user has;
    an empty ID does nothing.
    """
    if not model_id:
        return
    with translated_errors("set tags of the model"):
        client = mlflow.MlflowClient()
        known = client.get_logged_model(model_id).tags
        tags = {**tags, **note_tags(known, note)}
        client.set_logged_model_tags(model_id, {name: without_credentials(text) for name, text in tags.items() if text})
        for name in [name for name, text in tags.items() if not text and name in known]:
            client.delete_logged_model_tag(model_id, name)
