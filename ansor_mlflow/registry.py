"""The model registry: versions with the evidence for their speed as tags."""

from __future__ import annotations

from collections.abc import Mapping

import mlflow

from ansor_mlflow.tracking.failures import clear_failures


def registered_versions(model_uri: str) -> list[tuple[str, str]]:
    """The registered models that a logged model is the newest version of, with that version.

    Args:
        model_uri: `models:/m-…`, as logging a model returns it.
    """
    with clear_failures("read the model registry"):
        run_id = mlflow.get_logged_model(model_uri.removeprefix("models:/")).source_run_id
        versions = mlflow.MlflowClient().search_model_versions(f"run_id = '{run_id}'")
    newest: dict[str, int] = {}
    for version in versions:
        if version.source == model_uri:
            newest[version.name] = max(newest.get(version.name, 0), int(version.version))
    return [(name, str(version)) for name, version in newest.items()]


def register(model_uri: str, name: str, tags: Mapping[str, str]) -> str:
    """Registers a model.

    Args:
        model_uri: Logged model.
        name: Registered name; made if it does not exist.
        tags: Tags of the new version.

    Returns:
        The version.
    """
    with clear_failures(f"register the model as {name}"):
        return str(mlflow.register_model(model_uri, name, tags=dict(tags)).version)
