"""What a tuning begins with: records of earlier ones, chosen for its tasks and its device."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ansor_mlflow import names
from ansor_mlflow.device import DeviceFingerprint
from ansor_mlflow.files import scratch_directory, write_text
from ansor_mlflow.foreign import without_credentials
from ansor_mlflow.lowering import TuningTask
from ansor_mlflow.options import TuneOptions
from ansor_mlflow.records import (
    Database,
    find_records,
    matching_records,
    merge,
    open_database,
    open_winners,
    read_fingerprint,
    similar_records,
    target_attributes,
    target_name,
    why_not_applicable,
    write_objects,
)
from ansor_mlflow.steps.records import fetch_databases, known_workloads
from ansor_mlflow.tracking import RecordPool, StepRun

_log = logging.getLogger("ansor_mlflow")


@dataclass(frozen=True, kw_only=True)
class TakenRecords:
    """What was taken of one source."""

    source: str
    num_records: int
    """Records in the source, failed trials included."""
    num_applied: int
    """Records of this device for tasks of the network."""
    num_transferred: int
    """Records of similar devices, for the cost model alone."""
    transferred_from: tuple[str, ...]
    """Short descriptions of the similar devices' targets."""
    note: str
    """Why the source's records may not be applied, or that it has none, in one clause; empty where they may."""


class WarmStart:
    """Collects the records that a tuning begins with.

    Args:
        device: What is tuned for.
        hashes: Structural hashes of the network's tasks.
    """

    def __init__(self, device: DeviceFingerprint, hashes: Collection[str]) -> None:
        self._device = device
        self._hashes = hashes
        self._applied: list[Database] = []
        self._transferred: list[Database] = []
        self.taken: list[TakenRecords] = []

    def take(self, source: str, directories: Sequence[Path]) -> None:
        """Chooses among the records of a source.

        Args:
            source: What the user gave.
            directories: Its databases, or record files; they are read again by `write`.

        Raises:
            UserInputError: There is no database.
            RecordsError: It is damaged.
        """
        applied: list[Database] = []
        transferred: list[Database] = []
        num_records, notes = 0, []
        for directory in directories:
            pair = find_records(directory, prefer_winners=False)
            database = open_database(pair)
            num_records += len(database.records)
            made_for = read_fingerprint(pair.records.parent)
            reason = why_not_applicable(made_for, self._device) if made_for else ""
            if reason:
                notes.append(reason)
            else:
                winners = open_winners(pair.records.parent)
                applied += matching_records(database, winners, self._device.target, self._hashes)
            if made_for is None or made_for.machine == self._device.machine:
                similar = similar_records(database, self._device.target, self._hashes, all_=bool(reason))
                transferred.append(similar)
        self._applied += applied
        self._transferred += transferred
        made_for_targets = {record.target for database in transferred for record in database.records}
        taken = TakenRecords(
            source=without_credentials(source),
            num_records=num_records,
            num_applied=_num_records(applied),
            num_transferred=_num_records(transferred),
            transferred_from=tuple(sorted({target_name(target_attributes(text)) for text in made_for_targets})),
            note="; ".join(dict.fromkeys(notes)),
        )
        self.taken.append(taken)
        _log.log(logging.INFO if taken.num_applied else logging.WARNING, "%s", _in_words(taken))

    def take_nothing(self, source: str, reason: str) -> None:
        """Notes a source that has nothing to choose among, and why."""
        nothing = TakenRecords(
            source=without_credentials(source),
            num_records=0,
            num_applied=0,
            num_transferred=0,
            transferred_from=(),
            note=reason,
        )
        self.taken.append(nothing)
        _log.info("%s: %s", nothing.source, reason)

    def write(self, records: Path) -> None:
        """Writes the database that the tuning begins with, and that of similar devices beside it."""
        merge(self._applied, records)
        merge(self._transferred, records / names.SIMILAR_DIR)

    @property
    def num_applied(self) -> int:
        """Records of this device, over all sources."""
        return sum(taken.num_applied for taken in self.taken)

    @property
    def num_transferred(self) -> int:
        """Records of similar devices, over all sources."""
        return sum(taken.num_transferred for taken in self.taken)

    @property
    def num_tasks(self) -> int:
        """Tasks of which there is a record of this device."""
        return len({d.hashes[record.workload] for d in self._applied for record in d.records})


def begin_with_records(
    options: TuneOptions,
    device: DeviceFingerprint,
    tasks: Sequence[TuningTask],
    sketched: frozenset[str],
    trials_per_task: float,
    run: StepRun,
) -> frozenset[str]:
    """Fetches the records that a tuning begins with, and says in the run what was taken.

    Args:
        options: `warm_start` and `record_pool` name the sources.
        device: What is tuned for.
        tasks: What is tuned.
        sketched: Structural hashes of those that are searched among the programs of a sketch.
        trials_per_task: Trials that a task would get, on average.
        run: The tuning's run; the records are written into its directory.

    Returns:
        Structural hashes, in hexadecimal digits, of the workloads that the pool knows enough of.

    Raises:
        UserInputError: There is no such source.
        RecordsError: One is damaged, or no database.
        MachineError: A server is away.
    """
    if not options.warm_start and not options.record_pool:
        return frozenset()
    hashes = [task.info.workload_hash for task in tasks]
    start, known = WarmStart(device, hashes), frozenset[str]()
    with scratch_directory() as scratch:
        if options.record_pool:
            pool = RecordPool(options.record_pool)
            objects = pool.pull(device, hashes)
            known = known_workloads(objects, trials_per_task, sketched)
            if objects:
                pulled = Path(scratch, "pool")
                write_objects(objects, device, pulled)
                start.take(options.record_pool, [pulled])
            elif pool.has_device(device):
                start.take_nothing(options.record_pool, "the record pool knows no task of this network yet")
            else:
                reason = f"the record pool has nothing for {device.description} yet; this tuning will be its first"
                start.take_nothing(options.record_pool, reason)
        for source in options.warm_start:
            directory = Path(tempfile.mkdtemp(dir=scratch))
            start.take(source, fetch_databases(source, directory, "warm_start"))
        start.write(run.directory / names.RECORDS_DIR)
    _report(start, run)
    return known


def _report(start: WarmStart, run: StepRun) -> None:
    path = run.directory / names.WARM_START_FILE
    write_text(path, json.dumps([asdict(taken) for taken in start.taken], indent=1))
    run.log_artifacts(path)
    run.log_metrics(
        {
            names.WARM_START_APPLIED: start.num_applied,
            names.WARM_START_TASKS: start.num_tasks,
            names.WARM_START_TRANSFERRED: start.num_transferred,
        }
    )


def _num_records(databases: Sequence[Database]) -> int:
    return sum(len(database.records) for database in databases)


def _in_words(taken: TakenRecords) -> str:
    words = [f"{taken.source}: {taken.num_applied} of {taken.num_records} records are taken"]
    if taken.note:
        words.append(taken.note)
    elif not taken.num_applied and not taken.num_transferred:
        words.append("none is for a task of this network")
    if taken.num_transferred:
        words.append(f"the cost model learns from {taken.num_transferred} for {', '.join(taken.transferred_from)}")
    return "; ".join(words)
