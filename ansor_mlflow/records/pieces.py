"""How the records of a tuning get to its run whole: in parts while they grow, with a manifest at the end.

A part holds what was appended to the files of a tuning since the part before: a line of JSON with the place of each
piece, then the pieces themselves. Its name has its place and its digest. Parts that follow one another give the files
again, byte for byte. The manifest has the digests of whole files.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

from ansor_mlflow import names
from ansor_mlflow.errors import RecordsError
from ansor_mlflow.files import append, new_file, path_below, sha256_of_file, write_text
from ansor_mlflow.foreign import read_json
from ansor_mlflow.records.store import JOURNAL_FILE, RECORD_FILE, WORKLOAD_FILE

PARTS_DIR = "parts"
GROWING_FILES = (WORKLOAD_FILE, RECORD_FILE, JOURNAL_FILE)
"""Files of a tuning that only grow."""
_DIGEST_LENGTH = 32
_SUFFIX = ".part"
_log = logging.getLogger("ansor_mlflow")


class PartWriter:
    """Writes what is new in a directory of records since the last part. What is there at first is in no part."""

    def __init__(self, records: Path, destination: Path) -> None:
        self._records = records
        self._destination = destination
        self._sizes = {name: _size(records / name) for name in GROWING_FILES}

    def write(self) -> Path | None:
        """Writes a part; None where nothing is new."""
        pieces = {}
        for name, start in self._sizes.items():
            pieces[name] = b""
            if (self._records / name).exists():
                with (self._records / name).open("rb") as grown:
                    grown.seek(start)
                    pieces[name] = grown.read()
        if not any(pieces.values()):
            return None
        header = {name: [self._sizes[name], len(piece)] for name, piece in pieces.items()}
        content = json.dumps(header).encode() + b"\n" + b"".join(pieces.values())
        digest = hashlib.sha256(content).hexdigest()[:_DIGEST_LENGTH]
        path = self._destination / f"{sum(self._sizes.values()):015d}-{digest}{_SUFFIX}"
        path.parent.mkdir(parents=True, exist_ok=True)
        with new_file(path) as file:
            file.write(content)
        self._sizes = {name: self._sizes[name] + len(piece) for name, piece in pieces.items()}
        return path


def join_parts(records: Path) -> int:
    """Appends the parts in a directory of records to its files; returns how many were taken.

    Behind a part that is damaged or missing nothing is taken: its workloads would be numbered otherwise.
    """
    num_taken = 0
    for path in sorted((records / PARTS_DIR).glob(f"*{_SUFFIX}")):
        content = path.read_bytes()
        if not path.stem.endswith(f"-{hashlib.sha256(content).hexdigest()[:_DIGEST_LENGTH]}"):
            _log.warning("%s is damaged; what it and later parts hold is measured again", path.name)
            break
        head, _, pieces = content.partition(b"\n")
        places = _places(records, head, len(pieces), path.name)
        sizes = {name: _size(records / name) for name in places}
        if all(start + length <= sizes[name] for name, (start, length) in places.items()):
            continue  # it is in the files already
        if any(start > sizes[name] for name, (start, _) in places.items()):
            _log.warning("a part before %s is missing; what later parts hold is measured again", path.name)
            break
        begin = 0
        for name, (start, length) in places.items():
            piece = pieces[begin : begin + length]
            begin += length
            append(records / name, piece[sizes[name] - start :])  # one of the files may have more than the part
        num_taken += 1
    return num_taken


def _places(records: Path, head: bytes, num_bytes: int, part: str) -> dict[str, tuple[int, int]]:
    """Where the pieces of a part go, by the names of the files that grow: the start in the file, and the length."""
    try:
        places = {name: (start, length) for name, (start, length) in read_json(head).items()}
        for name in places:
            path_below(records, name)
        is_sound = places.keys() <= set(GROWING_FILES) and all(
            type(size) is int and size >= 0 for place in places.values() for size in place
        )
    except (ValueError, TypeError, AttributeError):
        is_sound = False
    if not is_sound or sum(length for _, length in places.values()) != num_bytes:
        raise RecordsError(
            f"{PARTS_DIR}/{part} of the records is no part that a tuning wrote: it may name "
            f"{', '.join(GROWING_FILES)} alone, "
            "and has to hold what it describes; nothing of it is taken: ask who can write to that run"
        )
    return places


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def write_manifest(records: Path, path: Path) -> None:
    """Writes the SHA-256 and the length of every file of a tuning's records, but for parts, whose names have them."""
    files = {}
    for file in sorted(records.rglob("*")):
        name = file.relative_to(records)
        is_described = name.parts[0] not in (PARTS_DIR, names.MANIFEST_FILE)
        if file.is_file() and is_described and not file.name.startswith("."):
            size = file.stat().st_size
            files[name.as_posix()] = {"bytes": size, "sha256": sha256_of_file(file, size)}
    write_text(path, json.dumps({"format_version": 1, "files": files}, indent=1))


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
    return has_length and sha256_of_file(file, size) == digest
