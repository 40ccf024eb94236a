"""Which records of earlier tunings a new one begins with."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ansor_mlflow import names
from ansor_mlflow.records.applicability import code_attributes, has_target, target_key
from ansor_mlflow.records.lines import FAILED_RUN_S, RecordLine, target_attributes
from ansor_mlflow.records.log import RecordText
from ansor_mlflow.records.store import Database, RecordPair, find_records

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
