"""A growing database in small immutable parts, each named by its place and its digest.

A part holds what was appended to the files of a tuning since the part before: a line of JSON with the place of each
piece, then the pieces themselves. Parts that follow one another give the files again, byte for byte.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path

from ansor_mlflow.errors import RecordsError
from ansor_mlflow.files import append, new_file, path_below
from ansor_mlflow.foreign import read_json
from ansor_mlflow.records.journal import JOURNAL_FILE
from ansor_mlflow.records.store import RECORD_FILE, WORKLOAD_FILE

PARTS_DIR = "parts"
GROWING_FILES = (WORKLOAD_FILE, RECORD_FILE, JOURNAL_FILE)
"""Files of a tuning that only grow."""
_DIGEST_LENGTH = 32
_SUFFIX = ".part"
_log = logging.getLogger("ansor_mlflow")


class PartWriter:
    """Writes what is new since the last part. What is there at the beginning is in no part.

    Args:
        records: Directory of the records.
        destination: Directory of the parts.
    """

    def __init__(self, records: Path, destination: Path) -> None:
        self._records = records
        self._destination = destination
        self._sizes = {name: _size(records / name) for name in GROWING_FILES}

    def write(self) -> Path | None:
        """Writes a part; None where nothing is new."""
        pieces = {name: _read_from(self._records / name, start) for name, start in self._sizes.items()}
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
    """Appends the parts in a directory of records to its files.

    Behind a part that is damaged or missing nothing is taken: its workloads would be numbered otherwise.

    Args:
        records: Directory of the records, with the parts in a folder of it.

    Returns:
        The number of parts that were taken.

    Raises:
        RecordsError: A part is whole, but describes what no tuning writes.
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
    """Where the pieces of a part go, by the names of the files that grow: the start in the file, and the length.

    Raises:
        RecordsError: Other files are named, or the pieces are not those that are described.
    """
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


def _read_from(path: Path, start: int) -> bytes:
    if not path.exists():
        return b""
    with path.open("rb") as file:
        file.seek(start)
        return file.read()
