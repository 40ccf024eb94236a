"""Results as JSON, for scripts."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ansor_mlflow.errors import UserInputError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def write_json(path: str, result: DataclassInstance) -> None:
    """Writes the fields of a result; nothing where `path` is empty.

    Raises:
        UserInputError: The file cannot be written.
    """
    if not path:
        return
    try:
        Path(path).write_text(json.dumps(asdict(result), indent=1), encoding="utf-8")
    except OSError as err:
        raise UserInputError(f"json_file={path}: it cannot be written ({err.strerror}); give another path") from err
