"""Where the MLflow UI shows something."""

from __future__ import annotations

import mlflow

from ansor_mlflow.foreign import for_shell, without_credentials

_OWN_SERVER = "http://127.0.0.1:5000"
"""Where `mlflow server` listens by itself."""


def run_page(experiment_id: str, run_id: str) -> str:
    """Address of a run within the UI, behind `#/`."""
    return f"experiments/{experiment_id}/runs/{run_id}"


def ui_address(page: str) -> str:
    """Address of a page; where no server runs, of the one that `server_command` starts.

    Args:
        page: Address within the UI, behind `#/`.
    """
    uri = mlflow.get_tracking_uri()
    server = without_credentials(uri).replace("…@", "").rstrip("/") if _is_served(uri) else _OWN_SERVER
    return f"{server}/#/{page}"


def server_command() -> str:
    """The command that starts a server for the store; empty where one runs."""
    uri = mlflow.get_tracking_uri()
    return "" if _is_served(uri) else f"mlflow server --backend-store-uri {for_shell(uri, 'MLFLOW_TRACKING_URI')}"


def _is_served(tracking_uri: str) -> bool:
    return tracking_uri.startswith(("http://", "https://"))
