"""Where the MLflow UI shows something."""

from __future__ import annotations

from collections.abc import Mapping

import mlflow

from ansor_mlflow.errors import without_credentials

_OWN_SERVER = "http://127.0.0.1:5000"
"""Where `mlflow server` listens by itself."""
_START = "start"


def print_pages(pages: Mapping[str, str]) -> None:
    """Prints the addresses of pages; where no server runs, after the command that starts one.

    Args:
        pages: Labels, and addresses within the UI, behind `#/`.
    """
    tracking_uri = without_credentials(mlflow.get_tracking_uri())
    is_served = tracking_uri.startswith(("http://", "https://"))
    server = tracking_uri.rstrip("/") if is_served else _OWN_SERVER
    lines = {} if is_served else {_START: f"mlflow server --backend-store-uri '{tracking_uri}'"}
    lines |= {label: f"{server}/#/{page}" for label, page in pages.items()}
    width = max(len(_START), *map(len, lines))
    for label, text in lines.items():
        print(f"{label:{width}}  {text}")
