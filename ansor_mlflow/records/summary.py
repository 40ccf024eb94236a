"""What a tuning run leaves behind in `records/`, besides the database: the device and the provenance."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from ansor_mlflow import names
from ansor_mlflow.device import DeviceFingerprint
from ansor_mlflow.errors import RecordsError
from ansor_mlflow.files import write_text
from ansor_mlflow.foreign import Report, Reported, Table, microseconds, read_json, typed
from ansor_mlflow.records.applicability import target_key, target_name
from ansor_mlflow.records.lines import FAILED_RUN_S, RecordLine, numbered, target_attributes
from ansor_mlflow.records.store import Database, RecordPair


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Where records come from. It decides whether two numbers may be compared, never whether records apply."""

    network: str
    """Built-in name, or the path as it was given."""
    from_file: bool
    """Whether the network was read from a file; the run then has a copy of it."""
    network_sha256: str
    batch_size: int
    input_shapes: dict[str, list[int | list[int]]]
    seed: int
    layout: str
    dtype: str
    pad_channels: int | str
    target: str
    """The target as it was given."""
    num_threads: int
    lowering_version: int
    tvm_version: str
    host: str
    measure: dict[str, Any]
    """Settings of the time evaluator, with the CPUs that were measured on, or with the `rpc_key` of the servers."""
    partition: str = "auto"
    algorithm: str = "auto"
    input_values: dict[str, Any] = field(default_factory=dict)
    """Values that inputs were fixed to; runs of earlier versions have none."""
    estimated_latency_ms: float | None = None
    trials_per_task: float | None = None
    """Trials that the tuning was ready to give a task, on average; None before its end."""

    @property
    def rpc_key(self) -> str | None:
        """Key of the servers that the records were measured on; None where it was the tuning host itself."""
        return self.measure.get("rpc_key")


def write_description(directory: Path, device: DeviceFingerprint, provenance: Provenance) -> None:
    """Writes both files."""
    write_text(directory / names.FINGERPRINT_FILE, device.to_json())
    write_text(directory / names.PROVENANCE_FILE, json.dumps(asdict(provenance), indent=1))


def read_fingerprint(directory: Path) -> DeviceFingerprint | None:
    """Reads the device that records are for; None where nothing says so, as in a database that TVM wrote."""
    path = directory / names.FINGERPRINT_FILE
    if not path.is_file():
        return None
    try:
        return DeviceFingerprint.from_dict(read_json(path.read_bytes()))
    except (ValueError, TypeError, LookupError) as err:
        raise RecordsError(
            f"{path} is damaged ({type(err).__name__}), so nobody knows which device the records are for; fetch them "
            "again, or tune"
        ) from err


def read_provenance(directory: Path) -> Provenance:
    """Reads the provenance of a tuning run's records."""
    path = directory / names.PROVENANCE_FILE
    try:
        return typed(Provenance, read_json(path.read_bytes()))
    except (OSError, ValueError, TypeError) as err:
        raise RecordsError(
            f"{path.name} of the tuning run is missing or damaged ({type(err).__name__}); give the records with "
            "records=… and the network by name"
        ) from err


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
        """Number of records, failed trials included."""
        return sum(workload.num_records for workload in self.workloads)

    @property
    def num_failed(self) -> int:
        return sum(workload.num_failed for workload in self.workloads)

    @property
    def best_s(self) -> float:
        """Seconds that one call of every workload takes with its fastest record."""
        return sum(workload.best_s or 0.0 for workload in self.workloads)

    @property
    def median_s(self) -> float:
        """Seconds that one call of every workload takes with the median of its records."""
        return sum(workload.median_s or 0.0 for workload in self.workloads)

    def table(self) -> Table:
        """A row for each workload."""
        counts = f"{len(self.workloads)} workloads, {self.num_records} records, {self.num_failed} failed"
        sums = f"best {self.best_s * 1e3:.3f} ms, median {self.median_s * 1e3:.3f} ms for one call of each"
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
        """Number of records, failed trials included."""
        return sum(target.num_records for target in self.targets)

    def report(self) -> Report:
        """A table of workloads for each target."""
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
    by_target: dict[str, list[RecordLine]] = {}
    for record in database.records:
        by_target.setdefault(target_key(record.target), []).append(record)
    return DatabaseSummary(
        records=str(database.pair.records),
        num_workloads=len({hash_ for hash_ in database.hashes if hash_ is not None}),
        targets=tuple(
            TargetSummary(
                name=target_name(target_attributes(records[0].target)),
                attributes=key,
                workloads=_summarize_workloads(database, records),
            )
            for key, records in by_target.items()
        ),
        damaged_records=database.damaged_records,
        damaged_workloads=database.damaged_workloads,
    )


def _summarize_workloads(database: Database, records: Iterable[RecordLine]) -> tuple[WorkloadSummary, ...]:
    times_s: dict[str, list[float]] = {}
    for record in records:
        hash_ = database.hashes[record.workload]
        assert hash_ is not None  # or the record would be among the damaged ones
        times_s.setdefault(hash_, []).append(record.run_s)
    return tuple(_summarize_workload(hash_, run_s) for hash_, run_s in times_s.items())


def _summarize_workload(hash_: str, run_s: list[float]) -> WorkloadSummary:
    valid_s = [seconds for seconds in run_s if seconds < FAILED_RUN_S]
    return WorkloadSummary(
        hash=hash_,
        num_records=len(run_s),
        num_failed=len(run_s) - len(valid_s),
        best_s=min(valid_s, default=None),
        median_s=median(valid_s) if valid_s else None,
    )
