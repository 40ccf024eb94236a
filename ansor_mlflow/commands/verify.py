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
from ansor_mlflow.foreign import Report, Reported, duration
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
    run_s: float
    status: Status
    max_rel_error: float | None
    """Error of the scheduled kernel's results against the unscheduled one's; None where there is no finite one."""
    error: str

    def __str__(self) -> str:
        reason = self.error or f"error {self.max_rel_error:.1e}"
        line = f"{self.file}:{self.line}"
        return f"{_STATUS_NAMES[self.status]:<13}{self.task}  {duration(self.run_s)}  {line}  {reason}"


@dataclass(frozen=True, kw_only=True)
class Verification(Reported):
    """Which records hold what they promise."""

    network: str
    target: str
    tolerance: float
    records: tuple[ReplayedRecord, ...]
    num_unverified_tasks: int
    num_of_other_targets: dict[str, int]
    """Valid records that were not run, by the short description of their target."""
    num_of_other_kernels: int
    """Valid records for this target of workloads that the network does not have."""
    num_damaged: int

    def report(self) -> Report:
        counts = ", ".join(f"{count} {_STATUS_NAMES[status]}" for status, count in self.num_by_status.items())
        return Report(f"{len(self.records)} records of {self.network} for {self.target}: {counts}", self.notes)

    @property
    def num_by_status(self) -> dict[Status, int]:
        return dict(Counter(record.status for record in self.records))

    @property
    def notes(self) -> tuple[str, ...]:
        others = (f"{count} records for {target} were not run." for target, count in self.num_of_other_targets.items())
        counts = {
            "tasks have no record.": self.num_unverified_tasks,
            "records are of workloads that the network does not have.": self.num_of_other_kernels,
        }
        return (*others, *(f"{count} {text}" for text, count in counts.items() if count))

    def require_pass(self) -> None:
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
    quarantines: tuple[str, ...]
    changed: tuple[str, ...]
    """Files, below the directory of the records, that the manifest did not describe; they count as they are now."""

    def report(self) -> Report:
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
        device.require_measurable_here()
        candidates = _candidates(databases, device.fingerprint.target)
        wanted = code_attributes(device.fingerprint.target)
        valid = [record for record in databases[-1].records if record.run_s < FAILED_RUN_S]
        elsewhere = [record.target for record in valid if not has_target(record, wanted)]
        others = dict(Counter(target_name(target_attributes(target)) for target in elsewhere))
        by_task = [(task, candidates.pop(task.info.workload_hash, [])) for task in lowered.tasks]
        if not any(records for _, records in by_task):
            raise RecordsError(_nothing_to_replay(options.source, lowered, others))
        tolerance = TOLERANCES[recorded.options.dtype]
        largest = max(argument_bytes(task.mod) for task in lowered.tasks)
        memory_bytes = options.worker_memory_mib * 2**20 + COPIES_OF_ARGUMENTS * largest
        replayer = Replayer(
            device,
            seed=recorded.options.seed,
            timeout_s=options.measure_timeout_s,
            memory_bytes=memory_bytes if device.platform.in_process else None,  # a GPU's driver maps more than it uses
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


_Candidate = tuple[bool, RecordLine, Database]
"""A valid record for the target in its database, and whether it is none of a tuning's winners."""


def _candidates(databases: Sequence[Database], target: Mapping[str, Any]) -> dict[str | None, list[_Candidate]]:
    """The valid records for a target by the hash of their workload: the winners first, then the fastest."""
    by_hash: dict[str | None, list[_Candidate]] = {}
    for database in databases:
        is_other = database is databases[-1]  # a winner was measured twice
        for workload, records in database.by_workload(target).items():
            found = by_hash.setdefault(database.hashes[workload], [])
            found += [(is_other, record, database) for record in records]
    for found in by_hash.values():
        found.sort(key=lambda candidate: (candidate[0], candidate[1].run_s))
    return by_hash


def _distinct(candidates: Iterable[_Candidate]) -> Iterator[tuple[_Candidate, str]]:
    """Candidates with the JSON of their schedules, each schedule once."""
    seen: set[str] = set()
    for candidate in candidates:
        trace = schedule_of(candidate[2], candidate[1])
        if trace not in seen:
            seen.add(trace)
            yield candidate, trace


def _nothing_to_replay(source: str, network: NetworkTasks, others: Mapping[str, int]) -> str:
    if others:
        named = ", ".join(f"{count} records for {target}" for target, count in others.items())
        return f"{source}: nothing was verified: there are {named}, none for {network.device.description}; give target"
    return (
        f"{source}: nothing was verified: the records fit none of the {len(network.tasks)} tasks of {network.network}; "
        "give the network, layout and input_shapes that they were made with"
    )


def _replayed(task: TuningTask, candidate: _Candidate, outcome: Outcome[float], tolerance: float) -> ReplayedRecord:
    is_other, record, database = candidate
    status: Status = outcome.failure or "pass"
    text, error = outcome.error, outcome.value
    if error is not None and not error <= tolerance:
        status, text = "wrong_answer", f"max_rel_error={error:.3g}, allowed is {tolerance:g}"
    file = database.pair.records.name
    return ReplayedRecord(
        task=task.info.name,
        file=file if is_other else f"{names.BEST_DIR}/{file}",
        line=record.number,
        run_s=record.run_s,
        status=status,
        max_rel_error=error if error is not None and math.isfinite(error) else None,
        error=first_line(text),
    )
