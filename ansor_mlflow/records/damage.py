"""What is wrong with records that are about to be read, said once, with the lines and the command that mends them."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ansor_mlflow import names
from ansor_mlflow.errors import RecordsError, UserInputError
from ansor_mlflow.foreign import without_credentials
from ansor_mlflow.records.lines import numbered
from ansor_mlflow.records.store import Database, RecordPair, find_pairs
from ansor_mlflow.records.transfer.manifest import changed_files

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

    Args:
        path: A directory or a tuning-record file. Where there is no database, whoever reads it says so.
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


def check_copy(path: Path, called: str, download: str) -> None:
    """Checks records that were just copied from a run or an artifact store; warns of damaged lines.

    Args:
        path: The copy.
        called: What messages call it.
        download: The command that brings the user a copy into the working directory, under the name of `path`.

    Raises:
        RecordsError: A file is not the one that the manifest describes.
    """
    pairs = _pairs_in(path)
    damage = _find_damage(pairs) if pairs else Damage(lines={}, changed=changed_files(path))
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
