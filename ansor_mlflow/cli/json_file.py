"""Results as text or as JSON, for readers and for scripts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import pydantic_core

from ansor_mlflow.cli.console import show
from ansor_mlflow.errors import UserInputError
from ansor_mlflow.files import translated_disk_errors, write_text
from ansor_mlflow.foreign import printable_json, without_credentials

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

STANDARD_OUTPUT = "-"
"""The path that means standard output."""


def report(result: Any, json_file: str) -> None:
    """Prints a result's report, and writes its fields to a file; to standard output they go in place of the text.

    Raises:
        UserInputError: The file cannot be written.
    """
    if json_file != STANDARD_OUTPUT:
        show(result.report())
    write_json(json_file, result)


def write_json(path: str, result: DataclassInstance) -> None:
    """Writes the fields of a result, with null for a number that is not finite; nothing where `path` is empty.

    Raises:
        UserInputError: The file cannot be written.
    """
    if not path:
        return
    plain = _without_credentials(pydantic_core.to_jsonable_python(result))
    text = printable_json(pydantic_core.to_json(plain, indent=1, inf_nan_mode="null").decode())
    if path == STANDARD_OUTPUT:
        click.echo(text)
        return
    write_output("json_file", path, text)


def write_output(parameter: str, path: str, text: str) -> None:
    """Writes a file that the user named, whole or not at all.

    A pipe or a device, and a file in a folder that may not be written, is written to as it is.

    Raises:
        UserInputError: The path cannot be that of a file.
        MachineError: The disk is full, or may not be written.
    """
    file = Path(path)
    try:
        with translated_disk_errors():
            if file.exists() and not (file.is_file() and os.access(file.resolve().parent, os.W_OK)):
                file.write_text(text, encoding="utf-8")
            else:
                write_text(file.resolve(), text)  # a link stays one
    except OSError as err:
        raise UserInputError(f"{parameter}={path}: it cannot be written ({err.strerror}); give another path") from err


def _without_credentials(value: Any) -> Any:
    """Plain JSON with its texts, names among them, as they may be shown."""
    if isinstance(value, dict):
        return {without_credentials(key): _without_credentials(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_credentials(item) for item in value]
    return without_credentials(value) if isinstance(value, str) else value
