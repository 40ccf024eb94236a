"""Sets damaged lines of a database aside, so that TVM reads the rest."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ansor_mlflow.files import append, end_last_line, new_file, write_text
from ansor_mlflow.records.lines import numbered
from ansor_mlflow.records.store import Database, RecordPair

_log = logging.getLogger("ansor_mlflow")


@dataclass(frozen=True)
class Repair:
    """What was set aside."""

    num_workloads: int
    num_records: int
    quarantines: tuple[Path, ...]
    """Files that the damaged lines are in now; a later repair adds to them."""


def repair(pair: RecordPair, *, thorough: bool = False) -> Repair:
    """Moves damaged lines, and records of damaged workloads, to files of their own.

    Nobody else may write to the database meanwhile. Whole files take the place of the damaged ones, so that a repair
    that is interrupted is done by the next one.

    Args:
        pair: The database; a file that is missing counts as empty.
        thorough: Whether every line is parsed as a whole, instead of looked at from both ends.

    Raises:
        RecordsError: The workload file is no text file.
    """
    for path in (pair.workloads, pair.records):
        path.touch()
    database = Database(pair, thorough=thorough)
    lost = {n: database.workloads[n - 1].encode(errors="surrogateescape") for n in database.damaged_workloads}
    quarantines = []
    if database.damaged:
        damaged = {line.number: database.text(line) for line in database.damaged}
        quarantines.append(_set_aside(pair.records, damaged))
        _drop_damaged(database)
    if lost:
        quarantines.append(_set_aside(pair.workloads, lost))
        _replace_lost(database)
    for path in (pair.workloads, pair.records):
        end_last_line(path)
    return Repair(len(lost), len(database.damaged), tuple(quarantines))


def _set_aside(path: Path, lines: Mapping[int, bytes]) -> Path:
    aside = path.with_name(f"{path.name}.quarantine")
    append(aside, b"".join(line.rstrip(b"\r\n") + b"\n" for line in lines.values()))
    _log.warning("%s: %s damaged, and in %s now", path, numbered(tuple(lines)), aside.name)
    return aside


def _drop_damaged(database: Database) -> None:
    path = database.pair.records
    first = min(line.offset for line in database.damaged)
    if all(record.offset < first for record in database.records):
        os.truncate(path, first)
        return
    with new_file(path) as file:
        for record in database.records:
            file.write(database.text(record).rstrip(b"\r\n") + b"\n")


def _replace_lost(database: Database) -> None:
    """Puts another workload in the place of a lost one, of which no record is left: the others keep their numbers."""
    valid = [line for line, hash_ in zip(database.workloads, database.hashes, strict=True) if hash_ is not None]
    lines = (
        [
            line if hash_ is not None else valid[0]
            for line, hash_ in zip(database.workloads, database.hashes, strict=True)
        ]
        if valid
        else []
    )
    while lines and database.hashes[len(lines) - 1] is None:
        lines.pop()
    write_text(database.pair.workloads, "".join(f"{line}\n" for line in lines))
