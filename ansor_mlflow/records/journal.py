"""The journal of a tuning: what the records of its trials do not say, a JSON line for each trial.

It makes a tuning resumable: which trials were spent on which task, in which rounds, how those that failed did, and
where the time went.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ansor_mlflow.files import append, end_last_line, write_text
from ansor_mlflow.foreign import read_json, typed
from ansor_mlflow.records.lines import FAILED_RUN_S, is_time, mean_time
from ansor_mlflow.records.store import Database, RecordPair
from ansor_mlflow.trials import Durations, Trial, TrialStatus

JOURNAL_FILE = "trials.jsonl"
_DURATIONS = "durations"


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
    """The first line of a journal."""

    earlier_records: int
    """Records in the database that belong to earlier tunings."""
    seeds: tuple[Seed, ...] = ()


class Journal:
    """Appends trials to a journal."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / JOURNAL_FILE

    def begin(self, num_earlier: int, seeds: Sequence[Seed] = ()) -> None:
        """Begins a new journal."""
        write_text(self._path, json.dumps(asdict(_Header(num_earlier, tuple(seeds)))) + "\n")

    def resume(self) -> None:
        """Ends the last line, which the writer may have died in."""
        end_last_line(self._path)

    def append(self, trials: Sequence[Trial], durations: Durations | None = None) -> None:
        """Appends trials, whose records are on the disk already."""
        lines = [asdict(trial) for trial in trials]
        for line in lines:
            del line["task"]  # names are those of one lowering; the hash tells tasks apart
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
    entries = _read_entries(directory / JOURNAL_FILE)
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
        trials.append(entry)
    return trials


def _read_entries(path: Path) -> dict[int, Trial]:
    """The readable trials of a journal, by step."""
    entries = {}
    for fields in _read_lines(path):
        try:
            entry = typed(Trial, fields)
            mean_time(entry.run_s or [FAILED_RUN_S])
            entries[entry.step] = entry
        except (ValueError, ArithmeticError):
            continue
    return entries


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """The readable lines of a journal."""
    lines = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            fields = read_json(line)
            lines += [fields] if isinstance(fields, dict) else []
    return lines
