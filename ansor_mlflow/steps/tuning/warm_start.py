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
from ansor_mlflow.errors import AnsorMlflowError, one_line
from ansor_mlflow.files import scratch_directory, write_text
from ansor_mlflow.foreign import without_credentials
from ansor_mlflow.lowering import TuningTask
from ansor_mlflow.records import (
    FAILED_RUN_S,
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
)
from ansor_mlflow.sketches import ANNOTATION
from ansor_mlflow.steps.fetching import fetch_databases, fetch_winners
from ansor_mlflow.tracking import EarlierTuning, StepRun, best_source, find_tunings

AUTO = "auto"
"""The source that stands for what the tracking server knows."""
_MAX_TAG = 5000
_MAX_UNREAD = 5
"""Runs that nothing could be taken of, after which no more are tried: a store that is away has each wait for it."""
_log = logging.getLogger("ansor_mlflow")


@dataclass(frozen=True, kw_only=True)
class TakenRecords:
    """What was taken of one source."""

    source: str
    num_records: int
    """Records in the source, failed trials included."""
    num_applied: int
    """Records of this device for tasks of the network."""
    num_tasks: int
    """Tasks that they are for."""
    num_transferred: int
    """Records of similar devices, for the cost model alone."""
    transferred_from: tuple[str, ...]
    """Short descriptions of the similar devices' targets."""
    note: str
    """Why the source's records may not be applied, or that it has none, in one clause; empty where they may."""


class WarmStart:
    """Collects the records that a tuning begins with."""

    def __init__(self, device: DeviceFingerprint, hashes: Collection[str]) -> None:
        self.device = device
        self.hashes = hashes
        self._applied: list[Database] = []
        self._transferred: list[Database] = []
        self.taken: list[TakenRecords] = []

    def take(
        self, source: str, directories: Sequence[Path], hashes: Collection[str] | None = None
    ) -> dict[str, list[str]]:
        """Chooses among the records of a source."""
        hashes = self.hashes if hashes is None else hashes
        applied: list[Database] = []
        transferred: list[Database] = []
        num_records, notes = 0, []
        for directory in directories:
            pair = find_records(directory, prefer_winners=False)
            database = open_database(pair)
            num_records += len(database.records)
            made_for = read_fingerprint(pair.root)
            reason = why_not_applicable(made_for, self.device) if made_for else ""
            if reason:
                notes.append(reason)
            else:
                applied += matching_records(database, open_winners(pair.root), self.device.target, hashes)
            if made_for is None or made_for.machine == self.device.machine:
                transferred.append(similar_records(database, self.device.target, hashes, all_=bool(reason)))
        self._applied += applied
        self._transferred += transferred
        made_for_targets = {record.target for database in transferred for record in database.records}
        found = _valid_records(applied)
        taken = TakenRecords(
            source=without_credentials(source),
            num_records=num_records,
            num_applied=_num_records(applied),
            num_tasks=len(found),
            num_transferred=_num_records(transferred),
            transferred_from=tuple(sorted({target_name(target_attributes(text)) for text in made_for_targets})),
            note="; ".join(dict.fromkeys(notes)),
        )
        self.taken.append(taken)
        _log.log(logging.INFO if taken.num_applied else logging.WARNING, "%s", _in_words(taken))
        return found

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
    sources: Sequence[str],
    device: DeviceFingerprint,
    tasks: Sequence[TuningTask],
    sketched: frozenset[str],
    trials_per_task: float,
    run: StepRun,
) -> frozenset[str]:
    """Fetches the records that a tuning begins with, and says in the run what was taken."""
    if not sources:
        return frozenset()
    start, known = WarmStart(device, [task.info.workload_hash for task in tasks]), frozenset[str]()
    with scratch_directory() as scratch:
        for source in sources:
            directory = Path(tempfile.mkdtemp(dir=scratch))
            if source == AUTO:
                known |= _remember(start, sketched, trials_per_task, directory)
            else:
                start.take(source, fetch_databases(source, directory, "warm_start"))
        start.write(run.directory / names.RECORDS_DIR)
    _report(start, run, len(known))
    return known


def _remember(start: WarmStart, sketched: frozenset[str], trials_per_task: float, scratch: Path) -> frozenset[str]:
    """Takes what finished tuning runs know of the tasks; a run that cannot be read is a warning."""
    tunings, missing, enough = find_tunings(start.device, start.hashes), set(start.hashes), set[str]()
    num_unread = 0
    while num_unread < _MAX_UNREAD and (source := best_source(tunings, missing, trials_per_task)):
        tuning, hashes = source
        tunings.remove(tuning)
        found = _take_run(start, tuning, hashes, scratch)
        num_unread += not found
        missing -= found.keys()
        if tuning.trials_per_task >= trials_per_task:
            enough |= {
                hash_ for hash_, texts in found.items() if hash_ not in sketched or any(ANNOTATION in t for t in texts)
            }
    if len(missing) == len(start.hashes):
        _log.info("warm_start=auto: the tracking server knows no task of this network on this device yet")
    return frozenset(enough)


def _take_run(start: WarmStart, tuning: EarlierTuning, hashes: list[str], scratch: Path) -> dict[str, list[str]]:
    try:
        winners = fetch_winners(tuning.run_id, Path(tempfile.mkdtemp(dir=scratch)))
        return start.take(f"runs:/{tuning.run_id}", [winners], hashes)
    except AnsorMlflowError as err:
        _log.warning("nothing is taken of run %s: %s", tuning.run_id, one_line(err))
        return {}


def _report(start: WarmStart, run: StepRun, num_known: int) -> None:
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
    shares = [f"{taken.num_tasks} of {taken.source}" for taken in start.taken if taken.num_tasks]
    words = f"{start.num_tasks} of {len(start.hashes)} tasks begin with earlier records"
    words += f" ({', '.join(shares)})" if shares else ""
    words += f"; {num_known} of them need no trials" if num_known else ""
    _log.info("%s", words)
    run.log_tags({names.TAG_WARM_START: words[:_MAX_TAG]})


def _valid_records(databases: Sequence[Database]) -> dict[str, list[str]]:
    """The valid records as JSON, by the structural hash of their workload."""
    found: dict[str, list[str]] = {}
    for database in databases:
        for record in database.records:
            if record.run_s < FAILED_RUN_S:
                found.setdefault(str(database.hashes[record.workload]), []).append(database.fields(record))
    return found


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
