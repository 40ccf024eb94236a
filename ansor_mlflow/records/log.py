"""The log that a tuning writes: a pair of JSON-lines files that grows by a line per trial.

TVM's own `JSONDatabase` writes the same lines, but it keeps every program in memory, applies every schedule again when
it is opened, and does not notice a full disk.
"""

from __future__ import annotations

import bisect
import contextlib
import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansor_mlflow import names
from ansor_mlflow.files import append, disk_full, is_full
from ansor_mlflow.records.applicability import code_attributes, has_target
from ansor_mlflow.records.damage import repair
from ansor_mlflow.records.lines import FAILED_RUN_S, workload_hash
from ansor_mlflow.records.store import Database, RecordPair

_NUM_BEST = 8
"""Records of a workload that are kept at hand."""


@dataclass(frozen=True)
class RecordText:
    """A record as it stands in the log."""

    run_s: float
    """Mean seconds per call; `FAILED_RUN_S` or more for a failed trial."""
    text: str
    """JSON: `[trace, run_secs, target, args_info]`."""

    def line(self, index: int) -> str:
        """The record's line, given the index of its workload."""
        return f"[{index},{self.text}]"


class RecordLog:
    """Appends trials to a database; knows the fastest ones of each workload. Not safe for use from several threads."""

    def __init__(self, directory: Path, target: Mapping[str, Any]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._pair = RecordPair.in_directory(directory)
        if repair(self._pair).quarantines:
            (directory / names.MANIFEST_FILE).unlink(missing_ok=True)  # of the files as they were
        database = Database(self._pair)
        self._indices = {hash_: index for index, hash_ in reversed(list(enumerate(database.hashes)))}
        self._num_workloads = len(database.hashes)
        self._earlier = database
        self._best: dict[int, list[RecordText]] = {}
        self._target = code_attributes(target)
        for workload, records in database.by_workload(target).items():
            for record in heapq.nsmallest(_NUM_BEST, records, key=lambda record: record.run_s):
                with contextlib.suppress(ValueError):  # damage in the middle of the line
                    self._keep(workload, RecordText(record.run_s, database.fields(record)))

    def best(self, workload_hash: str) -> Sequence[RecordText]:
        """The fastest records of a workload, fastest first."""
        index = self._indices.get(workload_hash)
        return () if index is None else tuple(self._best.get(index, ()))

    def drop(self, workload_hash: str, record: RecordText) -> None:
        """Takes a record out of the fastest ones: its schedule does not apply. It stays in the file."""
        self._best[self._indices[workload_hash]].remove(record)

    @property
    def num_earlier(self) -> int:
        """Records that were there when the log was opened."""
        return len(self._earlier.records)

    def earlier(self, workload_hash: str) -> list[RecordText]:
        """The records of a workload for this target that were there when the log was opened, failed trials too."""
        database, index = self._earlier, self._indices.get(workload_hash)
        records = []
        for record in database.records:
            if record.workload == index and has_target(record, self._target):
                with contextlib.suppress(ValueError):  # damage in the middle of the line
                    records.append(RecordText(record.run_s, database.fields(record)))
        return records

    def append(self, workload: str, records: Sequence[RecordText]) -> None:
        """Appends records of a workload; they are on the disk when this returns, and none if it is full."""
        if is_full(self._pair.records.parent):
            raise disk_full(self._pair.records)
        hash_ = workload_hash(workload)
        if hash_ not in self._indices:
            append(self._pair.workloads, f"{workload}\n".encode())
            self._indices[hash_] = self._num_workloads
            self._num_workloads += 1
        index = self._indices[hash_]
        append(self._pair.records, "".join(f"{record.line(index)}\n" for record in records).encode())
        for record in records:
            self._keep(index, record)

    def _keep(self, index: int, record: RecordText) -> None:
        if record.run_s < FAILED_RUN_S:
            best = self._best.setdefault(index, [])
            bisect.insort(best, record, key=lambda other: other.run_s)
            del best[_NUM_BEST:]
