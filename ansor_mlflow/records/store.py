"""Databases of tuning records as pairs of JSON-lines files: found, read and distilled without TVM."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansor_mlflow import names
from ansor_mlflow.errors import RecordsError, UserInputError
from ansor_mlflow.files import new_file, write_text
from ansor_mlflow.records.applicability import code_attributes, has_target, target_key, target_name
from ansor_mlflow.records.lines import (
    FAILED_RUN_S,
    DamagedLine,
    RecordLine,
    fields_of,
    parse_record,
    scan_records,
    target_attributes,
    workload_hash,
)

WORKLOAD_FILE = "database_workload.json"
RECORD_FILE = "database_tuning_record.json"
JOURNAL_FILE = "trials.jsonl"
"""Name of what a tuning keeps beside its records; see `Journal`."""


@dataclass(frozen=True)
class RecordPair:
    """The two files of one database."""

    workloads: Path
    records: Path

    @staticmethod
    def in_directory(directory: Path) -> RecordPair:
        """The pair under the names that TVM gives it in a work directory."""
        return RecordPair(workloads=directory / WORKLOAD_FILE, records=directory / RECORD_FILE)

    def exists(self) -> bool:
        """Whether both are there."""
        return self.records.exists() and self.workloads.exists()

    @property
    def root(self) -> Path:
        """The directory that has what describes the records: that of winners is beside them, not with them."""
        directory = self.records.parent
        return directory.parent if directory.name == names.BEST_DIR else directory


def search_directories(path: Path) -> list[Path]:
    """Where `find_records` looks for the pair that a directory stands for, in this order."""
    return [path / names.BEST_DIR, path, path / names.RECORDS_DIR / names.BEST_DIR, path / names.RECORDS_DIR]


def find_records(path: Path, *, prefer_winners: bool = True) -> RecordPair:
    """The pair that a user means by a directory or by a tuning-record file.

    A directory may be a work directory of TVM, or one that holds such a directory as `records/`. Where the winners of a
    tuning are beside its records, in `best/`, they come first by default: they were measured twice. The workload file
    that belongs to a record file is beside it, with "workload" for "tuning_record" in its name.
    """
    if path.is_dir():
        directories = search_directories(path)
        if not prefer_winners:
            directories.sort(key=lambda directory: directory.name == names.BEST_DIR)
        pairs = [p for d in directories if (p := RecordPair.in_directory(d)).records.exists()]
        if not pairs:
            raise UserInputError(f"records={path}: the directory has no {RECORD_FILE}; give TVM's work directory")
        # Of winners none may be left, all of them damaged; that is no reason to overlook the other records.
        pair = next((p for p in pairs if p.records.stat().st_size), pairs[0])
    elif path.is_file():
        pair = RecordPair(workloads=path.with_name(path.name.replace("tuning_record", "workload")), records=path)
    else:
        raise UserInputError(f"records={path}: no such file or directory; give a directory with {RECORD_FILE}")
    if pair.workloads == pair.records or not pair.workloads.is_file():
        raise UserInputError(
            f"records={path}: the workload file {pair.workloads.name} is missing beside {pair.records.name}; "
            "TVM writes both, and the records mean nothing without it"
        )
    return pair


def find_pairs(path: Path) -> list[RecordPair]:
    """What `find_records` finds: the winners, if there are any, and all records."""
    return list(dict.fromkeys([find_records(path), find_records(path, prefer_winners=False)]))


class Database:
    """What is in a pair: workloads as text, records without their schedules. Damaged lines are left out.

    With `thorough` every line is parsed as a whole; else damage in the middle of one is found by `fields`.
    """

    def __init__(self, pair: RecordPair, *, thorough: bool = False) -> None:
        self.pair = pair
        self.hashes: list[str | None] = []
        """Structural hashes of these lines; None for a damaged one."""
        self.records: list[RecordLine] = []
        self.damaged: list[DamagedLine] = []
        """Lines of the record file that are no records, or of a workload that is not there."""
        content = pair.workloads.read_bytes()
        # Bytes that are no text are kept as they are: a damaged line costs no other one.
        text = content.decode(errors="surrogateescape").removesuffix("\n")
        self.workloads: list[str] = [line.strip() for line in text.split("\n")] if text else []
        """Lines of the workload file."""
        for line in self.workloads:
            try:
                self.hashes.append(workload_hash(line))
            except ValueError:
                self.hashes.append(None)
        if not any(self.hashes):
            try:
                content.decode()
            except UnicodeDecodeError as err:
                raise RecordsError(
                    f"{pair.workloads}: this is not a workload file of TVM, but perhaps a compressed one; give the "
                    "file that TVM wrote"
                ) from err
        for record in scan_records(pair.records, thorough=thorough):
            if isinstance(record, DamagedLine):
                self.damaged.append(record)
            elif record.workload < len(self.hashes) and self.hashes[record.workload] is not None:
                self.records.append(record)
            else:
                self.damaged.append(DamagedLine(record.number, record.offset, record.length))

    def by_workload(self, target: Mapping[str, Any]) -> dict[int, list[RecordLine]]:
        """The valid records for a target, by the index of their workload."""
        wanted = code_attributes(target)
        groups: dict[int, list[RecordLine]] = {}
        for record in self.records:
            if record.run_s < FAILED_RUN_S and has_target(record, wanted):
                groups.setdefault(record.workload, []).append(record)
        return groups

    def text(self, line: RecordLine | DamagedLine) -> bytes:
        """A line as it stands in the record file."""
        with self.pair.records.open("rb") as file:
            file.seek(line.offset)
            return file.read(line.length)

    def fields(self, record: RecordLine) -> str:
        """JSON `[trace, run_secs, target, args_info]` of a record; a ValueError where the first look missed damage."""
        text = self.text(record)
        parse_record(text)
        return fields_of(text.decode())

    @property
    def damaged_records(self) -> tuple[int, ...]:
        """Numbers of the lines in the record file that are no records, or of a damaged workload."""
        return tuple(line.number for line in self.damaged)

    @property
    def damaged_workloads(self) -> tuple[int, ...]:
        """Numbers of the lines in the workload file that are no workloads."""
        return tuple(number for number, hash_ in enumerate(self.hashes, start=1) if hash_ is None)


def distill(
    source: RecordPair,
    destination: Path,
    target: Mapping[str, Any],
    keep: int = 1,
    *,
    any_target: bool = False,
    may_be_none: bool = False,
) -> int:
    """Writes the fastest valid records of each workload for a target to a new database; returns how many.

    TVM's own queries ignore the target and would return the fastest record of any device. With `any_target` a workload
    without such records gets those of another target of the same kind.
    """
    database = Database(source)
    if any_target:
        _take_one_target_each(database, target)
    num_written = merge([database], destination, target=None if any_target else target, keep=keep)
    if may_be_none and not database.records:
        write_pair(destination, [], [])
        return 0
    if num_written:
        return num_written
    valid = [record for record in database.records if record.run_s < FAILED_RUN_S]
    if valid:
        made_for = dict.fromkeys(target_name(target_attributes(record.target)) for record in valid)
        raise RecordsError(
            f"{source.records}: the records are for {', '.join(made_for)}, this is {target_name(target)}; "
            "tune on this device, or give the target they were made for"
        )
    if database.damaged:
        raise RecordsError(
            f"{source.records}: line {database.damaged[0].number} is not a tuning record of TVM, and there is no valid "
            "one; give the file that TVM wrote"
        )
    raise RecordsError(f"{source.records}: there is no valid record in it; tune first")


def _take_one_target_each(database: Database, target: Mapping[str, Any]) -> None:
    """Leaves for every workload the records for the target; where there are none, those of the target of its fastest
    one.
    """
    wanted = target_key(json.dumps(dict(target)))
    taken: dict[int, str] = {}
    valid = [r for r in database.records if target_attributes(r.target).get("kind") == target.get("kind")]
    for record in sorted(valid, key=lambda record: (target_key(record.target) != wanted, record.run_s)):
        if record.run_s < FAILED_RUN_S:
            taken.setdefault(record.workload, target_key(record.target))
    database.records = [r for r in valid if taken.get(r.workload) == target_key(r.target)]


def merge(
    databases: Sequence[Database],
    destination: Path,
    *,
    target: Mapping[str, Any] | None = None,
    keep: int | None = None,
) -> int:
    """Writes the records of several databases to a new one, each once; returns how many. Without any it writes nothing.

    `keep` is the number of fastest valid records of each workload and target; None keeps all, failed trials too, in
    their order.
    """
    wanted = None if target is None else code_attributes(target)
    workloads: dict[str, str] = {}
    groups: dict[str, dict[str, list[tuple[Database, RecordLine]]]] = {}
    for database in databases:
        for record in database.records:
            is_of_others = wanted is not None and not has_target(record, wanted)
            if is_of_others or (keep is not None and record.run_s >= FAILED_RUN_S):
                continue
            hash_ = database.hashes[record.workload]
            assert hash_ is not None  # or the record would be among the damaged ones
            workloads.setdefault(hash_, database.workloads[record.workload])
            key = "" if keep is None else target_key(record.target)
            groups.setdefault(hash_, {}).setdefault(key, []).append((database, record))
    if not groups:
        return 0
    destination.mkdir(parents=True, exist_ok=True)
    pair, num_written = RecordPair.in_directory(destination), 0
    write_text(pair.workloads, "".join(f"{workloads[hash_]}\n" for hash_ in groups))
    with new_file(pair.records) as file:
        for index, group in ((index, group) for index, by in enumerate(groups.values()) for group in by.values()):
            if keep is not None:
                group.sort(key=lambda item: item[1].run_s)
            for fields in itertools.islice(_distinct_fields(group), keep):
                file.write(f"[{index},{fields}]\n".encode())
                num_written += 1
    return num_written


def _distinct_fields(group: Iterable[tuple[Database, RecordLine]]) -> Iterator[str]:
    """The records of a group, each once, without those that a closer look finds damaged."""
    seen: set[bytes] = set()
    for database, record in group:
        try:
            fields = database.fields(record)
        except ValueError:
            continue
        digest = hashlib.sha256(fields.encode()).digest()
        if digest not in seen:
            seen.add(digest)
            yield fields


def write_pair(directory: Path, workloads: Sequence[str], records: Sequence[str]) -> None:
    """Writes a database in a directory, which is made if need be; existing files are replaced."""
    directory.mkdir(parents=True, exist_ok=True)
    pair = RecordPair.in_directory(directory)
    write_text(pair.workloads, "".join(f"{line}\n" for line in workloads))
    write_text(pair.records, "".join(f"{line}\n" for line in records))
