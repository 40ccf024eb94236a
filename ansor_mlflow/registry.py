"""The model registry: versions with the evidence for their speed as tags."""

from __future__ import annotations

from collections.abc import Mapping

import mlflow

from ansor_mlflow.tracking.failures import clear_failures


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
