"""Damaged records: what is wrong is said once, with the command that mends it; mending sets damaged lines aside."""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ansor_mlflow import names
from ansor_mlflow.errors import RecordsError, UserInputError
from ansor_mlflow.files import append, end_last_line, new_file, write_text
from ansor_mlflow.foreign import without_credentials
from ansor_mlflow.records.lines import numbered
from ansor_mlflow.records.pieces import changed_files
from ansor_mlflow.records.store import Database, RecordPair, find_pairs

_log = logging.getLogger("ansor_mlflow")


@dataclass(frozen=True, kw_only=True)
class Damage:
    """What is wrong with the files of records; paths are below their directory."""

    lines: Mapping[str, Sequence[int]]
    """Numbers of the lines of a file that are damaged, or of a damaged workload; other files have whole paths."""
    changed: Sequence[str]
    """Files that are not those that the manifest describes."""

    def in_words(self, called: Callable[[str], str]) -> str:
        """A clause for each file; `called` is what messages call it."""
        clauses = []
        for name in dict.fromkeys([*self.lines, *self.changed]):
            facts = [f"{numbered(self.lines[name])} damaged"] if name in self.lines else []
            if name == names.MANIFEST_FILE:
                facts.append("it is damaged")
            elif name in self.changed:
                facts.append(f"it is not the file whose SHA-256 is in {names.MANIFEST_FILE}")
            clauses.append(f"{called(name)}: {', and '.join(facts)}")
        return "; ".join(clauses)


def check_records(path: Path) -> None:
    """Warns of damage in records that a user has on this machine: what is whole is used.

    Where there is no database, whoever reads it says so.
    """
    pairs = _pairs_in(path)
    if pairs:
        warn_of_damage(pairs, path)


def warn_of_damage(pairs: Sequence[RecordPair], path: Path) -> None:
    """As `check_records`, of pairs that are known, the one with all records last."""
    damage, root = _find_damage(pairs), pairs[-1].root
    if damage.lines or damage.changed:
        words = damage.in_words(lambda name: str(root / name))
        _log.warning("%s; what is whole is used; `%s` mends it", words, _mending(str(path)))


def check_copy(path: Path, called: str, download: str, parts: Collection[str] = ()) -> None:
    """Checks records that were just copied from a run or an artifact store; warns of damaged lines.

    Messages call the copy `called`, and `download` is the command that brings the user one. Where `parts` are given,
    only these files and folders were copied.
    """
    pairs = _pairs_in(path)
    damage = _find_damage(pairs) if pairs else Damage(lines={}, changed=changed_files(path))
    if parts:
        changed = [name for name in damage.changed if name == names.MANIFEST_FILE or name.split("/")[0] in parts]
        damage = replace(damage, changed=changed)
    if not damage.lines and not damage.changed:
        return
    words = without_credentials(damage.in_words(lambda name: f"{name} of {called}"))
    mend = without_credentials(f"`{download}`, then `{_mending(path.name)}`")
    if damage.changed:
        raise RecordsError(
            f"{words}: it was changed, or not all of it arrived; try again, and if it stays so, take what is whole: "
            f"{mend}, and give that directory"
        )
    _log.warning("%s; what is whole is used; a copy is mended with %s", words, mend)


def _mending(path: str) -> str:
    return f"ansor-mlflow records verify {shlex.quote(path)} --repair"


def _pairs_in(path: Path) -> list[RecordPair]:
    try:
        return find_pairs(path)
    except UserInputError:
        return []


def _find_damage(pairs: Sequence[RecordPair]) -> Damage:
    """Looks into every line. Databases without a single record are not damaged, but something else."""
    root = pairs[-1].root
    databases = [Database(pair, thorough=True) for pair in pairs]
    lines = {}
    if any(database.records for database in databases):
        for database in databases:
            for file, numbers in (
                (database.pair.workloads, database.damaged_workloads),
                (database.pair.records, database.damaged_records),
            ):
                if numbers:
                    name = file.relative_to(root) if file.is_relative_to(root) else file
                    lines[name.as_posix()] = numbers
    return Damage(lines=lines, changed=changed_files(root))


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
    is_whole = [hash_ is not None for hash_ in database.hashes]
    num_lines = max((number for number, whole in enumerate(is_whole, start=1) if whole), default=0)
    instead = next((line for line, whole in zip(database.workloads, is_whole, strict=True) if whole), "")
    lines = [database.workloads[i] if is_whole[i] else instead for i in range(num_lines)]
    write_text(database.pair.workloads, "".join(f"{line}\n" for line in lines))
