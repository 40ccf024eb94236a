"""What a tuning writes, a line per trial: the log of its records, and a journal of what records do not say.

TVM's own `JSONDatabase` writes the same records, but it keeps every program in memory, applies every schedule again
when it is opened, and does not notice a full disk. The journal makes a tuning resumable: which trials were spent on
which task, in which rounds, how those that failed did, and where the time went.
"""

from __future__ import annotations

import bisect
import contextlib
import heapq
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ansor_mlflow import names
from ansor_mlflow.files import append, disk_full, end_last_line, is_full, write_text
from ansor_mlflow.foreign import read_json, typed
from ansor_mlflow.records.applicability import code_attributes, has_target
from ansor_mlflow.records.damage import repair
from ansor_mlflow.records.lines import FAILED_RUN_S, decision_of, fields_of, is_time, mean_time, workload_hash
from ansor_mlflow.records.store import JOURNAL_FILE, Database, RecordPair
from ansor_mlflow.trials import Durations, Trial, TrialStatus

_NUM_BEST = 8
"""Records of a workload that are kept at hand."""
_DURATIONS = "durations"


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
    """Appends trials to a database; knows the fastest ones of each workload. Not safe for use from several threads.

    Damaged lines are set aside. Records of other targets than the one that is tuned for are not among the fastest.
    """

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
        """Appends records of a workload, which is given by its line `[structural hash, module in base64]`.

        They are on the disk when this returns, and none if it is full.
        """
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


# -- the journal -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Seed:
    """What earlier tunings know of a workload."""

    workload_hash: str
    """Structural hash in hexadecimal digits."""
    best_s: float
    """Seconds per call of the workload's fastest record."""
    is_enough: bool = False
    """Whether so much is known that the task gets no trials."""


@dataclass(frozen=True)
class _Header:
    earlier_records: int
    """Records in the database that belong to earlier tunings."""
    seeds: tuple[Seed, ...] = ()


class Journal:
    """Appends trials to a journal."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / JOURNAL_FILE

    def begin(self, num_earlier: int, seeds: Sequence[Seed] = ()) -> None:
        """Begins a new journal, with the number of records that earlier tunings left, and what they say."""
        write_text(self._path, json.dumps(asdict(_Header(num_earlier, tuple(seeds)))) + "\n")

    def resume(self) -> None:
        """Ends the last line, which the writer may have died in."""
        end_last_line(self._path)

    def append(self, trials: Sequence[Trial], durations: Durations | None = None) -> None:
        """Appends trials, whose records are on the disk already, and where the time went until now."""
        lines = [asdict(trial) for trial in trials]
        for line in lines:
            for name in ("task", "decision"):  # the hash tells tasks apart in every lowering; the records have the rest
                del line[name]
        lines += [{_DURATIONS: asdict(durations)}] if durations else []
        append(self._path, "".join(f"{json.dumps(line)}\n" for line in lines).encode())


def read_seeds(directory: Path) -> tuple[int, list[Seed]]:
    """What a tuning began with: the number of records that earlier ones left in its database, and what they say."""
    path = directory / JOURNAL_FILE
    try:
        with path.open("rb") as file:
            header = typed(_Header, read_json(file.readline()))
        return header.earlier_records, [seed for seed in header.seeds if is_time(seed.best_s)]
    except (OSError, ValueError):
        return 0, []


def read_durations(directory: Path) -> Durations:
    """Where the time of a tuning went, as its last readable line on that says; nothing is known without one."""
    for fields in reversed(_read_lines(directory / JOURNAL_FILE)):
        with contextlib.suppress(ValueError, LookupError):
            return typed(Durations, fields[_DURATIONS])
    return Durations()


def read_journal(directory: Path) -> list[Trial]:
    """The trials of a tuning, one for each record, in their order.

    Where the tuner died before it wrote the last ones, or a line is damaged, what the record says has to do.
    """
    pair = RecordPair.in_directory(directory)
    if not pair.exists():
        return []
    num_earlier, _ = read_seeds(directory)
    entries: dict[int, Trial] = {}
    for fields in _read_lines(directory / JOURNAL_FILE):
        with contextlib.suppress(ValueError, ArithmeticError):
            found = typed(Trial, fields)
            mean_time(found.run_s or [FAILED_RUN_S])
            entries[found.step] = found
    database = Database(pair)
    trials: list[Trial] = []
    for step, record in enumerate(database.records[num_earlier:], start=1):
        entry = entries.get(step)
        if entry is None:
            is_valid = record.run_s < FAILED_RUN_S
            last = trials[-1] if trials else None
            workload_hash = str(database.hashes[record.workload])
            is_next_round = last is not None and last.workload_hash != workload_hash
            entry = Trial(
                step=step,
                workload_hash=workload_hash,
                status=TrialStatus.OK if is_valid else TrialStatus.RUN_FAILED,
                run_s=(record.run_s,) if is_valid else (),
                error="" if is_valid else "how it failed is not known any more",
                round_=last.round_ + is_next_round if last else 1,
                elapsed_s=last.elapsed_s if last else 0.0,
            )
        text = database.text(record).decode(errors="replace")  # it may be damaged in the middle
        trials.append(replace(entry, decision=decision_of(fields_of(text))))
    return trials


def _read_lines(path: Path) -> list[dict[str, Any]]:
    lines = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            fields = read_json(line)
            lines += [fields] if isinstance(fields, dict) else []
    return lines
