"""What a tuning begins with: records of earlier ones, chosen for its tasks, or the records of the run that goes on."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlflow

from ansor_mlflow import names
from ansor_mlflow.device import DeviceFingerprint
from ansor_mlflow.errors import AnsorMlflowError, RecordsError, UserInputError, one_line
from ansor_mlflow.files import replace_directory, scratch_directory
from ansor_mlflow.foreign import without_credentials
from ansor_mlflow.lowering import LOWERING_VERSION, TuningTask
from ansor_mlflow.networks import Network
from ansor_mlflow.parameters import NetworkOptions, TuneOptions, as_text, load_options
from ansor_mlflow.records import (
    FAILED_RUN_S,
    Database,
    RecordPair,
    find_records,
    matching_records,
    merge,
    open_database,
    open_winners,
    read_fingerprint,
    read_journal,
    read_provenance,
    similar_records,
    target_attributes,
    target_name,
    why_not_applicable,
)
from ansor_mlflow.sketches import ANNOTATION
from ansor_mlflow.steps.fetching import fetch_databases, fetch_run, fetch_winners
from ansor_mlflow.tracking import EarlierTuning, StepRun, best_source, find_tunings, params_used, translated_errors

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
    num_applied: int
    """Records of this device for tasks of the network."""
    num_tasks: int
    num_transferred: int
    """Records of similar devices, for the cost model alone."""
    transferred_from: tuple[str, ...]
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
        """Chooses among the records of a source those for tasks with these hashes; by default for all.

        Returns the valid ones that the tuning begins with, as JSON, by the hash of their workload.
        """
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
            num_applied=sum(len(database.records) for database in applied),
            num_tasks=len(found),
            num_transferred=sum(len(database.records) for database in transferred),
            transferred_from=tuple(sorted({target_name(target_attributes(text)) for text in made_for_targets})),
            note="; ".join(dict.fromkeys(notes)),
        )
        self.taken.append(taken)
        _log.log(logging.INFO if taken.num_applied else logging.WARNING, "%s", _in_words(taken))
        return found

    def write(self, records: Path) -> None:
        merge(self._applied, records)
        merge(self._transferred, records / names.SIMILAR_DIR)

    def report(self, run: StepRun, num_known: int) -> None:
        """Says in the run what was taken of which source, and how many tasks need no trials."""
        run.log_json(self.taken, names.WARM_START_FILE)
        num_tasks = len({database.hashes[record.workload] for database in self._applied for record in database.records})
        run.log_metrics(
            {
                names.WARM_START_APPLIED: sum(taken.num_applied for taken in self.taken),
                names.WARM_START_TASKS: num_tasks,
                names.WARM_START_TRANSFERRED: sum(taken.num_transferred for taken in self.taken),
            }
        )
        shares = [f"{taken.num_tasks} of {taken.source}" for taken in self.taken if taken.num_tasks]
        words = f"{num_tasks} of {len(self.hashes)} tasks begin with earlier records"
        words += f" ({', '.join(shares)})" if shares else ""
        words += f"; {num_known} of them need no trials" if num_known else ""
        _log.info("%s", words)
        run.log_tags({names.TAG_WARM_START: words[:_MAX_TAG]})


def begin_with_records(
    sources: Sequence[str],
    device: DeviceFingerprint,
    tasks: Sequence[TuningTask],
    sketched: frozenset[str],
    trials_per_task: float,
    run: StepRun,
) -> frozenset[str]:
    """Fetches the records that a tuning begins with into the run's directory, and says in the run what was taken.

    Returns the structural hashes of the workloads that earlier tunings know enough of.
    """
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
    start.report(run, len(known))
    return known


def _remember(start: WarmStart, sketched: frozenset[str], trials_per_task: float, scratch: Path) -> frozenset[str]:
    """Takes what finished tuning runs know of the tasks; a run that cannot be read is a warning.

    Returns the hashes of those that were tuned enough: by a tuning that was ready to give a task as many trials, with
    a valid program, and where a sketch has programs, with one of them, as hundreds of others may be slower.
    """
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


def _valid_records(databases: Sequence[Database]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for database in databases:
        for record in database.records:
            if record.run_s < FAILED_RUN_S:
                found.setdefault(str(database.hashes[record.workload]), []).append(database.fields(record))
    return found


def _in_words(taken: TakenRecords) -> str:
    words = [f"{taken.source}: {taken.num_applied} of {taken.num_records} records are taken"]
    if taken.note:
        words.append(taken.note)
    elif not taken.num_applied and not taken.num_transferred:
        words.append("none is for a task of this network")
    if taken.num_transferred:
        words.append(f"the cost model learns from {taken.num_transferred} for {', '.join(taken.transferred_from)}")
    return "; ".join(words)


_MEASURED_FOR = (*(name for name in NetworkOptions.model_fields if name not in ("seed", "trust")), "warm_start")
"""Parameters that the records of a run depend on."""


def resumed_options(options: TuneOptions) -> TuneOptions:
    """The parameters of the run that goes on, and those that were given now."""
    run_id = options.resume_run
    with translated_errors(f"resume the run {run_id}"):
        run = mlflow.get_run(run_id)
    if run.data.tags.get(names.TAG_STEP) != "tune":
        raise UserInputError(f"resume_run={run_id}: it is not a tuning run; give the ID of one, such as a run of tune")
    used = params_used(run, TuneOptions)
    given = options.changed()
    for name in _MEASURED_FOR:
        now, then = _as_logged(given.get(name)), _as_logged(used.get(name))
        if name in given and now != then:
            raise UserInputError(
                f"{name}={now}, but the run {run_id} has {name}={then}; leave {name} out, or start a new tuning"
            )
    return load_options(TuneOptions, {**used, **given})


def _as_logged(value: Any) -> str:
    return without_credentials(as_text(value))


def copy_of_network(run_id: str) -> str:
    """URI of the copy that a run has of a network from a file; empty where it has none."""
    with translated_errors(f"read the artifacts of run {run_id}"):
        files = {file.path for file in mlflow.MlflowClient().list_artifacts(run_id)}
    return f"runs:/{run_id}/{names.NETWORK_FILE}" if names.NETWORK_FILE in files else ""


def fetch_what_was_measured(run_id: str, records: Path) -> None:
    """Brings the records of a run to this machine, unless it still has as many."""
    records.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetched-", dir=records.parent) as scratch:
        with translated_errors(f"read the records of run {run_id}"):
            if not any(file.path == names.RECORDS_DIR for file in mlflow.MlflowClient().list_artifacts(run_id)):
                return
        fetched = fetch_run(run_id, Path(scratch))
        if _num_bytes(fetched) > _num_bytes(records):
            replace_directory(fetched, records)


def require_same_tasks(
    run_id: str, records: Path, network: Network, device: DeviceFingerprint, tasks: Sequence[TuningTask]
) -> None:
    """Checks that records were measured on such a device, of the tasks that this network has today."""
    if not RecordPair.in_directory(records).records.exists():
        return
    made_for = read_fingerprint(records)
    if made_for is None:
        raise RecordsError(
            f"resume_run={run_id}: {names.FINGERPRINT_FILE} of its records is missing, so nobody knows which device "
            "they are for; start a new tuning"
        )
    if reason := why_not_applicable(made_for, device):
        raise RecordsError(f"resume_run={run_id}: {reason}; resume it on such a device, or start a new tuning")
    provenance = read_provenance(records)
    has_sizes = network.chosen is None or network.chosen.input_shapes == provenance.input_shapes
    is_of_today = provenance.lowering_version == LOWERING_VERSION or (
        {trial.workload_hash for trial in read_journal(records)} <= {task.info.workload_hash for task in tasks}
    )
    if not has_sizes or not is_of_today or provenance.network_sha256 != network.sha256:
        raise RecordsError(
            f"resume_run={run_id}: the network has other tasks today than the run tuned (lowering version "
            f"{provenance.lowering_version}, this is {LOWERING_VERSION}; or another version of the network, or other "
            "sizes in the range of input_shapes); start a new tuning"
        )


def _num_bytes(records: Path) -> int:
    path = RecordPair.in_directory(records).records
    return path.stat().st_size if path.exists() else -1
