"""What a database of records holds, and which of its records match."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ansor_mlflow import names
from ansor_mlflow.errors import RecordsError
from ansor_mlflow.foreign import Report, Reported, Table, duration, microseconds
from ansor_mlflow.records.applicability import code_attributes, has_target, target_key, target_name
from ansor_mlflow.records.lines import FAILED_RUN_S, RecordLine, numbered, target_attributes
from ansor_mlflow.records.log import RecordText
from ansor_mlflow.records.store import Database, RecordPair, find_records


@dataclass(frozen=True, kw_only=True)
class WorkloadSummary:
    """The records of one workload for one target."""

    hash: str
    """Structural hash in hexadecimal digits, as in `tasks.json`."""
    num_records: int
    """Number of records, failed trials included."""
    num_failed: int
    best_s: float | None
    """Seconds per call of the fastest record; None where every trial failed."""
    median_s: float | None


@dataclass(frozen=True, kw_only=True)
class TargetSummary:
    """The records for one target."""

    name: str
    """Short description of the target, such as "llvm znver4 ×2"."""
    attributes: str
    """Attributes of the target that decide which code is made, as JSON."""
    workloads: tuple[WorkloadSummary, ...]

    @property
    def num_records(self) -> int:
        return sum(workload.num_records for workload in self.workloads)

    @property
    def best_s(self) -> float:
        """Seconds that one call of every workload takes with its fastest record."""
        return sum(workload.best_s or 0.0 for workload in self.workloads)

    @property
    def median_s(self) -> float:
        """Seconds that one call of every workload takes with the median of its records."""
        return sum(workload.median_s or 0.0 for workload in self.workloads)

    def table(self) -> Table:
        num_failed = sum(workload.num_failed for workload in self.workloads)
        counts = f"{len(self.workloads)} workloads, {self.num_records} records, {num_failed} failed"
        sums = f"best {duration(self.best_s)}, median {duration(self.median_s)} for one call of each"
        rows = [
            (w.hash, str(w.num_records), str(w.num_failed), microseconds(w.best_s), microseconds(w.median_s))
            for w in self.workloads
        ]
        headers = ("workload", ">records", ">failed", ">best µs", ">median µs")
        return Table(rows, headers, f"{self.name}: {counts}; {sums}")


@dataclass(frozen=True, kw_only=True)
class DatabaseSummary(Reported):
    """What is in a database."""

    records: str
    """Path of the record file."""
    num_workloads: int
    """Distinct workloads in the workload file."""
    targets: tuple[TargetSummary, ...]
    damaged_records: tuple[int, ...]
    """Numbers of the lines in the record file that are no records, or of a damaged workload."""
    damaged_workloads: tuple[int, ...]
    """Numbers of the lines in the workload file that are no workloads."""

    @property
    def num_records(self) -> int:
        return sum(target.num_records for target in self.targets)

    def report(self) -> Report:
        title = f"{self.records}: {self.num_records} records of {self.num_workloads} workloads"
        return Report(title, [target.table() for target in self.targets])


def open_database(pair: RecordPair) -> Database:
    """Reads a pair that may be any file that a user gave, and looks into every line."""
    database = Database(pair, thorough=True)
    if database.damaged and not database.records:
        raise RecordsError(
            f"{pair.records}: line {database.damaged[0].number} is not a tuning record of TVM, and no other line is; "
            "give the file that TVM wrote"
        )
    return database


def require_whole(database: Database) -> None:
    """Checks that no record is damaged."""
    if database.damaged:
        raise RecordsError(f"{database.pair.records}: {numbered(database.damaged_records)} damaged; tune again")


def summarize(database: Database) -> DatabaseSummary:
    """Counts the records by target and workload."""
    names: dict[str, str] = {}
    times_s: dict[str, dict[str, list[float]]] = {}
    for record in database.records:
        key = target_key(record.target)
        names.setdefault(key, target_name(target_attributes(record.target)))
        hash_ = str(database.hashes[record.workload])
        times_s.setdefault(key, {}).setdefault(hash_, []).append(record.run_s)
    return DatabaseSummary(
        records=str(database.pair.records),
        num_workloads=len({hash_ for hash_ in database.hashes if hash_ is not None}),
        targets=tuple(
            TargetSummary(name=names[key], attributes=key, workloads=tuple(_summarize_workload(*w) for w in by.items()))
            for key, by in times_s.items()
        ),
        damaged_records=database.damaged_records,
        damaged_workloads=database.damaged_workloads,
    )


def _summarize_workload(hash_: str, run_s: list[float]) -> WorkloadSummary:
    valid_s = [seconds for seconds in run_s if seconds < FAILED_RUN_S]
    return WorkloadSummary(
        hash=hash_,
        num_records=len(run_s),
        num_failed=len(run_s) - len(valid_s),
        best_s=min(valid_s, default=None),
        median_s=median(valid_s) if valid_s else None,
    )


_MAX_TAKEN = 64
"""Records of a workload and target that are taken."""


def matching_records(
    database: Database, winners: Database | None, target: Mapping[str, Any], hashes: Collection[str]
) -> list[Database]:
    """The records for a target that a tuning may begin with, of some workloads.

    The winner of an earlier tuning was measured twice. Its first measurement is left out, and so is what seemed faster.
    The databases are to be merged: the winners', where there are any, and the others'.
    """
    wanted = code_attributes(target)

    def is_wanted(owner: Database, record: RecordLine) -> bool:
        return owner.hashes[record.workload] in hashes and has_target(record, wanted)

    chosen = []
    fastest_s: dict[str | None, float] = {}
    if winners is not None:
        chosen.append(_with(winners, [record for record in winners.records if is_wanted(winners, record)]))
        for record in sorted(chosen[0].records, key=lambda record: record.run_s):
            fastest_s.setdefault(winners.hashes[record.workload], record.run_s)
    others = [
        record
        for record in database.records
        if is_wanted(database, record) and record.run_s > fastest_s.get(database.hashes[record.workload], 0.0)
    ]
    schedules = {(owner.hashes[r.workload], schedule_of(owner, r)) for owner in chosen for r in owner.records}
    sampled = [
        record
        for record in _sample(others, lambda record: record.workload)
        if (database.hashes[record.workload], schedule_of(database, record)) not in schedules
    ]
    return [*chosen, _with(database, sampled)]


def similar_records(database: Database, target: Mapping[str, Any], hashes: Collection[str], *, all_: bool) -> Database:
    """The records of similar devices, which teach a cost model: those for other targets of the same kind.

    With `all_`, records for the same target are another device's, too.
    """
    wanted = code_attributes(target)
    records = [
        record
        for record in database.records
        if database.hashes[record.workload] in hashes
        and target_attributes(record.target).get("kind") == target.get("kind")
        and (all_ or not has_target(record, wanted))
    ]
    return _with(database, _sample(records, lambda record: (record.workload, target_key(record.target))))


def read_similar(directory: Path) -> dict[str, dict[str, list[RecordText]]]:
    """The records in a directory by the structural hash of their workload, in hexadecimal digits, and their target.

    Without a database there, there are none.
    """
    if not RecordPair.in_directory(directory).records.exists():
        return {}
    database = Database(find_records(directory))
    found: dict[str, dict[str, list[RecordText]]] = {}
    for record in database.records:
        by_target = found.setdefault(str(database.hashes[record.workload]), {})
        with contextlib.suppress(ValueError):  # damage in the middle of the line
            text = RecordText(record.run_s, database.fields(record))
            by_target.setdefault(target_key(record.target), []).append(text)
    return found


def open_winners(records: Path) -> Database | None:
    """The winners beside the records of a tuning; None where there are none."""
    pair = RecordPair.in_directory(records / names.BEST_DIR)
    return Database(pair, thorough=True) if pair.exists() else None


def schedule_of(database: Database, record: RecordLine) -> str:
    """The schedule of a record as JSON, which is the same text for the same schedule."""
    return json.dumps(json.loads(database.fields(record))[0])


def _with(database: Database, records: list[RecordLine]) -> Database:
    narrowed = copy.copy(database)
    narrowed.records = records
    return narrowed


def _sample(records: Sequence[RecordLine], key: Callable[[RecordLine], object]) -> list[RecordLine]:
    """The fastest records of each group, and some of all the others: a cost model learns from slow programs, too."""
    groups: dict[object, list[RecordLine]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    sampled = []
    for group in groups.values():
        group.sort(key=lambda record: min(record.run_s, FAILED_RUN_S))
        fastest, others = group[: _MAX_TAKEN // 2], group[_MAX_TAKEN // 2 :]
        sampled += [*fastest, *others[:: -(-len(others) // (_MAX_TAKEN // 2)) or 1]]
    return sampled
