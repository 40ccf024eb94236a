"""What is in a database, counted by target and workload."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from ansor_mlflow.errors import RecordsError
from ansor_mlflow.foreign import Report, Reported, Table, microseconds
from ansor_mlflow.records.applicability import target_key, target_name
from ansor_mlflow.records.lines import FAILED_RUN_S, numbered, target_attributes
from ansor_mlflow.records.store import Database, RecordPair


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
        return sum(workload.num_records for workload in self.workloads)

    @property
    def best_s(self) -> float:
        """Seconds that one call of every workload takes with its fastest record."""
        return sum(workload.best_s or 0.0 for workload in self.workloads)

    @property
    def median_s(self) -> float:
        """Seconds that one call of every workload takes with the median of its records."""
        return sum(workload.median_s or 0.0 for workload in self.workloads)

    def table(self) -> Table:
        num_failed = sum(workload.num_failed for workload in self.workloads)
        counts = f"{len(self.workloads)} workloads, {self.num_records} records, {num_failed} failed"
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
        return sum(target.num_records for target in self.targets)

    def report(self) -> Report:
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
    names: dict[str, str] = {}
    times_s: dict[str, dict[str, list[float]]] = {}
    for record in database.records:
        key = target_key(record.target)
        names.setdefault(key, target_name(target_attributes(record.target)))
        hash_ = str(database.hashes[record.workload])
        times_s.setdefault(key, {}).setdefault(hash_, []).append(record.run_s)
    return DatabaseSummary(
        records=str(database.pair.records),
        num_workloads=len({hash_ for hash_ in database.hashes if hash_ is not None}),
        targets=tuple(
            TargetSummary(name=names[key], attributes=key, workloads=tuple(_summarize_workload(*w) for w in by.items()))
            for key, by in times_s.items()
        ),
        damaged_records=database.damaged_records,
        damaged_workloads=database.damaged_workloads,
    )


def _summarize_workload(hash_: str, run_s: list[float]) -> WorkloadSummary:
    valid_s = [seconds for seconds in run_s if seconds < FAILED_RUN_S]
    return WorkloadSummary(
        hash=hash_,
        num_records=len(run_s),
        num_failed=len(run_s) - len(valid_s),
        best_s=min(valid_s, default=None),
        median_s=median(valid_s) if valid_s else None,
    )
