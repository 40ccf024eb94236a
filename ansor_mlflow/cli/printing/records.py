"""What the commands `records …` print."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ansor_mlflow import names
from ansor_mlflow.cli.console import console, microseconds, say, table

if TYPE_CHECKING:
    from ansor_mlflow.records import DatabaseSummary, WorkloadSummary
    from ansor_mlflow.steps.records import MendedRecords, PoolContents, ReplayedRecord, Verification, WrittenRecords

_STATUS_NAMES = {
    "pass": "pass",
    "wrong_answer": "wrong answer",
    "failed": "exception",
    "timed_out": "timeout",
    "crashed": "crash",
}


def print_summary(summary: DatabaseSummary) -> None:
    """Prints a table of workloads for each target."""
    out = console()
    out.print(f"{summary.records}: {summary.num_records} records of {summary.num_workloads} workloads")
    for target in summary.targets:
        counts = f"{len(target.workloads)} workloads, {target.num_records} records, {target.num_failed} failed"
        sums = f"best {target.best_s * 1e3:.3f} ms, median {target.median_s * 1e3:.3f} ms for one call of each"
        out.print(f"\n{target.name}: {counts}; {sums}\n")
        headers = ["workload", ">records", ">failed", ">best µs", ">median µs"]
        out.print(table(headers, map(_cells, target.workloads)))


def _cells(workload: WorkloadSummary) -> tuple[str, ...]:
    counts = (str(workload.num_records), str(workload.num_failed))
    return (workload.hash, *counts, microseconds(workload.best_s), microseconds(workload.median_s))


def print_pool(contents: PoolContents) -> None:
    """Prints a line for each device."""
    rows = [
        (
            device.fingerprint.description,
            f"{device.fingerprint.cpu_model} ({device.fingerprint.machine})",
            str(device.num_kernels),
            str(device.num_objects),
        )
        for device in contents.devices
    ]
    console().print(
        table(["device", "CPU", ">workloads", ">objects"], rows)
        if rows
        else "the pool is empty, or not there yet: the first push makes it"
    )


def print_written(written: WrittenRecords) -> None:
    """Prints where the new database is."""
    say(f"{written.num_records} records are in {written.output}")


def print_mended(mended: MendedRecords) -> None:
    """Prints what was set aside, and what counts from now on."""
    if mended.num_set_aside:
        say(f"{mended.num_set_aside} damaged lines are in {', '.join(mended.quarantines)} now")
    if mended.changed:
        say(f"{', '.join(mended.changed)} changed after {names.MANIFEST_FILE} was written, which is removed")
    say("every line that is left is whole")


def print_replayed(record: ReplayedRecord) -> None:
    """Prints a line for a record."""
    reason = record.error or f"error {record.max_rel_error:.1e}"
    where = f"{record.file}:{record.line}"
    status = _STATUS_NAMES[record.status]
    say(f"{status:<13}{record.task}  {microseconds(record.run_s)} µs  {where}  {reason}")


def print_verification(verification: Verification) -> None:
    """Prints the summary."""
    counts = ", ".join(f"{count} {_STATUS_NAMES[status]}" for status, count in verification.num_by_status.items())
    say(f"\n{len(verification.records)} records of {verification.network} for {verification.target}: {counts}")
    for note in verification.notes:
        say(note)
