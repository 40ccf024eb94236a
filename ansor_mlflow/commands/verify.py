"""The command `records verify`: records are replayed, each in a process of its own."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from ansor_mlflow import names
from ansor_mlflow.errors import RecordsError, UserInputError, first_line
from ansor_mlflow.files import scratch_directory
from ansor_mlflow.foreign import Report, Reported, microseconds
from ansor_mlflow.lowering import TuningTask
from ansor_mlflow.measuring import TOLERANCES
from ansor_mlflow.parameters import VerifyRecordsOptions
from ansor_mlflow.records import (
    FAILED_RUN_S,
    Database,
    RecordLine,
    changed_files,
    code_attributes,
    find_pairs,
    has_target,
    open_database,
    repair,
    schedule_of,
    target_attributes,
    target_name,
)
from ansor_mlflow.steps.fetching import options_of_source
from ansor_mlflow.steps.recorded import NetworkTasks, find_recorded, lower_recorded
from ansor_mlflow.tuning import COPIES_OF_ARGUMENTS, Outcome, Replayer, directory_lock
from ansor_mlflow.workers import argument_bytes

Status = Literal["pass", "wrong_answer", "failed", "timed_out", "crashed"]
_STATUS_NAMES: Mapping[Status, str] = {
    "pass": "pass",
    "wrong_answer": "wrong answer",
    "failed": "exception",
    "timed_out": "timeout",
    "crashed": "crash",
}


@dataclass(frozen=True, kw_only=True)
class ReplayedRecord:
    """What became of a record."""

    task: str
    file: str
    """Path of the record file, below the directory of the records."""
    line: int
    """Number of the line in the file, from 1."""
    run_s: float
    """Seconds per call, as recorded."""
    status: Status
    max_rel_error: float | None
    """Error of the scheduled kernel's results against the unscheduled one's; None where there is no finite one."""
    error: str
    """Why the record does not pass, in one line; empty for one that does."""

    def __str__(self) -> str:
        reason = self.error or f"error {self.max_rel_error:.1e}"
        line = f"{self.file}:{self.line}"
        return f"{_STATUS_NAMES[self.status]:<13}{self.task}  {microseconds(self.run_s)} µs  {line}  {reason}"


@dataclass(frozen=True, kw_only=True)
class Verification(Reported):
    """Which records hold what they promise."""

    network: str
    target: str
    """Short description of the target, such as "llvm znver4 ×2"."""
    tolerance: float
    """Largest `max_rel_error` that passes."""
    records: tuple[ReplayedRecord, ...]
    num_unverified_tasks: int
    """Tasks of the network without a record."""
    num_of_other_targets: dict[str, int]
    """Valid records that were not run, by the short description of their target."""
    num_of_other_kernels: int
    """Valid records for this target of workloads that the network does not have."""
    num_damaged: int
    """Damaged lines of the databases."""

    def report(self) -> Report:
        """How many records ended in which way."""
        counts = ", ".join(f"{count} {_STATUS_NAMES[status]}" for status, count in self.num_by_status.items())
        return Report(f"{len(self.records)} records of {self.network} for {self.target}: {counts}", self.notes)

    @property
    def num_by_status(self) -> dict[Status, int]:
        """Records that ended with each status that occurred."""
        return dict(Counter(record.status for record in self.records))

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on what was not run."""
        others = (f"{count} records for {target} were not run." for target, count in self.num_of_other_targets.items())
        counts = {
            "tasks have no record.": self.num_unverified_tasks,
            "records are of workloads that the network does not have.": self.num_of_other_kernels,
        }
        return (*others, *(f"{count} {text}" for text, count in counts.items() if count))

    def require_pass(self) -> None:
        """Checks that every record passed."""
        bad = [record for record in self.records if record.status != "pass"]
        if bad:
            raise RecordsError(
                f"{len(bad)} of {len(self.records)} records do not pass, the first is line {bad[0].line} of "
                f"{bad[0].file}; do not compile with them, tune {bad[0].task} again"
            )


@dataclass(frozen=True, kw_only=True)
class MendedRecords(Reported):
    """What became of damaged records."""

    num_set_aside: int
    """Damaged lines, and those of damaged workloads."""
    quarantines: tuple[str, ...]
    """Paths of the files that they are in now."""
    changed: tuple[str, ...]
    """Files, below the directory of the records, that the manifest did not describe; they count as they are now."""

    def report(self) -> Report:
        """What was set aside, and what counts from now on."""
        parts = []
        if self.num_set_aside:
            parts.append(f"{self.num_set_aside} damaged lines are in {', '.join(self.quarantines)} now")
        if self.changed:
            changed = ", ".join(self.changed)
            parts.append(f"{changed} changed after {names.MANIFEST_FILE} was written, which is removed")
        return Report("every line that is left is whole", parts)


def repair_records(source: str) -> MendedRecords:
    """Sets damaged lines of a database on this machine aside, and removes a manifest that describes other files."""
    if not Path(source).exists():
        raise UserInputError(
            f"source={source}: only a directory or a file on this machine can be repaired; download it with "
            "`mlflow artifacts download`, and repair the copy"
        )
    pairs = find_pairs(Path(source))
    root = pairs[-1].root
    open_database(pairs[-1])
    with directory_lock(root):
        changed = changed_files(root)
        repaired = [repair(pair, thorough=True) for pair in pairs]
        quarantines = tuple(str(path) for one in repaired for path in one.quarantines)
        if quarantines or changed:
            (root / names.MANIFEST_FILE).unlink(missing_ok=True)
    return MendedRecords(
        num_set_aside=sum(one.num_records + one.num_workloads for one in repaired),
        quarantines=quarantines,
        changed=changed,
    )


def verify_records(
    options: VerifyRecordsOptions, on_replayed: Callable[[ReplayedRecord], None] = lambda _: None
) -> Verification:
    """Replays the best records of each task of a network."""
    if options.repair:
        repair_records(options.source)
    with scratch_directory() as scratch:
        recorded = find_recorded(options_of_source(options.source, options), Path(scratch))
        databases = [open_database(pair) for pair in find_pairs(recorded.records)]
        lowered = lower_recorded(recorded)
        device = lowered.device
        if not device.platform.in_process:
            raise UserInputError(
                f"source={options.source}: its records are for a GPU, and only those for CPUs are replayed"
            )
        device.require_measurable_here()
        candidates = _candidates(databases, device.fingerprint.target)
        others = _num_of_other_targets(databases[-1], device.fingerprint.target)
        by_task = [(task, candidates.pop(task.info.workload_hash, [])) for task in lowered.tasks]
        if not any(records for _, records in by_task):
            raise RecordsError(_nothing_to_replay(options.source, lowered, others))
        tolerance = TOLERANCES[recorded.options.dtype]
        replayer = Replayer(
            device,
            seed=recorded.options.seed,
            timeout_s=options.measure_timeout_s,
            memory_bytes=_memory_bytes(options, lowered),
        )
        replayed = []
        with contextlib.closing(replayer):
            for task, records in by_task:
                for candidate, trace in islice(_distinct(records), None if options.keep == "all" else options.keep):
                    outcome = replayer.replay(task, trace)
                    replayed.append(_replayed(task, candidate, outcome, tolerance))
                    on_replayed(replayed[-1])
    return Verification(
        network=lowered.network,
        target=device.description,
        tolerance=tolerance,
        records=tuple(replayed),
        num_unverified_tasks=sum(not records for _, records in by_task),
        num_of_other_targets=others,
        num_of_other_kernels=sum(len(records) for records in candidates.values()),
        num_damaged=sum(len(database.damaged) for database in databases),
    )


def _memory_bytes(options: VerifyRecordsOptions, network: NetworkTasks) -> int:
    """Data memory that replaying a record may take."""
    arguments = max(argument_bytes(task.mod) for task in network.tasks)
    return options.worker_memory_mib * 2**20 + COPIES_OF_ARGUMENTS * arguments


@dataclass(frozen=True)
class _Candidate:
    """A valid record for the target."""

    database: Database
    record: RecordLine
    is_winner: bool
    """Whether it is the winner of a tuning, which was measured twice."""


def _candidates(databases: Sequence[Database], target: Mapping[str, Any]) -> dict[str | None, list[_Candidate]]:
    """The valid records for a target by the hash of their workload: the winners first, then the fastest."""
    by_hash: dict[str | None, list[_Candidate]] = {}
    for database in databases:
        is_winner = database is not databases[-1]
        for workload, records in database.by_workload(target).items():
            found = by_hash.setdefault(database.hashes[workload], [])
            found += [_Candidate(database, record, is_winner) for record in records]
    for found in by_hash.values():
        found.sort(key=lambda candidate: (not candidate.is_winner, candidate.record.run_s))
    return by_hash


def _distinct(candidates: Iterable[_Candidate]) -> Iterator[tuple[_Candidate, str]]:
    """Candidates with the JSON of their schedules, each schedule once."""
    seen: set[str] = set()
    for candidate in candidates:
        trace = schedule_of(candidate.database, candidate.record)
        if trace not in seen:
            seen.add(trace)
            yield candidate, trace


def _num_of_other_targets(database: Database, target: Mapping[str, Any]) -> dict[str, int]:
    wanted = code_attributes(target)
    return dict(
        Counter(
            target_name(target_attributes(record.target))
            for record in database.records
            if record.run_s < FAILED_RUN_S and not has_target(record, wanted)
        )
    )


def _nothing_to_replay(source: str, network: NetworkTasks, others: Mapping[str, int]) -> str:
    if others:
        named = ", ".join(f"{count} records for {target}" for target, count in others.items())
        return f"{source}: nothing was verified: there are {named}, none for {network.device.description}; give target"
    return (
        f"{source}: nothing was verified: the records fit none of the {len(network.tasks)} tasks of {network.network}; "
        "give the network, layout and input_shapes that they were made with"
    )


def _replayed(task: TuningTask, candidate: _Candidate, outcome: Outcome[float], tolerance: float) -> ReplayedRecord:
    status: Status = outcome.failure or "pass"
    text = outcome.error
    error = outcome.value
    if error is not None and not error <= tolerance:
        status, text = "wrong_answer", f"max_rel_error={error:.3g}, allowed is {tolerance:g}"
    file = candidate.database.pair.records
    return ReplayedRecord(
        task=task.info.name,
        file=f"{names.BEST_DIR}/{file.name}" if candidate.is_winner else file.name,
        line=candidate.record.number,
        run_s=candidate.record.run_s,
        status=status,
        max_rel_error=error if error is not None and math.isfinite(error) else None,
        error=first_line(text),
    )
