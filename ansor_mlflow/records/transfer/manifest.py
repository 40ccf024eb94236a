"""The digests of a tuning's files: what was altered or cut short on the way is noticed before it is used."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from ansor_mlflow import names
from ansor_mlflow.files import path_below, write_text
from ansor_mlflow.foreign import read_json
from ansor_mlflow.records.transfer.parts import GROWING_FILES, PARTS_DIR

_FORMAT_VERSION = 1
_CHUNK_BYTES = 2**20


def write_manifest(records: Path, path: Path) -> None:
    """Writes the SHA-256 and the length of every file of a tuning's records.

    Parts are left out, which are named by their digests.

    Args:
        records: Directory of the records.
        path: The manifest.
    """
    files = {}
    for file in sorted(records.rglob("*")):
        name = file.relative_to(records)
        is_described = name.parts[0] not in (PARTS_DIR, names.MANIFEST_FILE)
        if file.is_file() and is_described and not file.name.startswith("."):
            size = file.stat().st_size
            files[name.as_posix()] = {"bytes": size, "sha256": _sha256(file, size)}
    write_text(path, json.dumps({"format_version": _FORMAT_VERSION, "files": files}, indent=1))


def changed_files(records: Path) -> tuple[str, ...]:
    """The files of a tuning's records that are missing, or not those that their manifest describes.

    Without a manifest there is nothing to compare with; one that is damaged is itself the file that was changed.
    """
    path = records / names.MANIFEST_FILE
    if not path.is_file():
        return ()
    try:
        files: dict[str, dict[str, Any]] = read_json(path.read_bytes())["files"]
        expected = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in files.items()}
    except (ValueError, TypeError, LookupError, AttributeError):
        return (names.MANIFEST_FILE,)
    return tuple(name for name, (size, digest) in expected.items() if not _is_as_described(records, name, size, digest))


def _is_as_described(records: Path, name: str, size: int, digest: str) -> bool:
    try:
        file = path_below(records, name)
    except ValueError:
        return False
    actual = file.stat().st_size if file.is_file() else -1
    has_length = actual >= size if name in GROWING_FILES else actual == size  # it is written after them
    return has_length and _sha256(file, size) == digest


def _sha256(path: Path, size: int) -> str:
    """The digest of the first bytes of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while size and (chunk := file.read(min(size, _CHUNK_BYTES))):
            digest.update(chunk)
            size -= len(chunk)
    return digest.hexdigest()
