"""What the commands `records …` print."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from ansor_mlflow.records import DatabaseSummary, TargetSummary
    from ansor_mlflow.steps.records import PoolContents, ReplayedRecord, Verification, WrittenRecords

_PIPE_WIDTH = 1000
"""Columns where there is no terminal: lines are not broken."""
_MAX_NUMBERS = 10
"""Damaged lines that are named."""
_STATUS_NAMES = {
    "pass": "pass",
    "wrong_answer": "wrong answer",
    "failed": "exception",
    "timed_out": "timeout",
    "crashed": "crash",
}


def print_summary(summary: DatabaseSummary) -> None:
    """Prints a table of kernels for each target, and what is damaged."""
    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False, markup=False)
    console.print(f"{summary.records}: {summary.num_records} records of {summary.num_workloads} workloads")
    for target in summary.targets:
        counts = f"{len(target.workloads)} workloads, {target.num_records} records, {target.num_failed} failed"
        sums = f"best {target.best_s * 1e3:.3f} ms, median {target.median_s * 1e3:.3f} ms for one call of each"
        console.print(f"\n{target.name}: {counts}; {sums}\n")
        console.print(_table(target))
    for kind, numbers in (("record", summary.damaged_records), ("workload", summary.damaged_workloads)):
        if numbers:
            console.print(f"\n{len(numbers)} damaged lines in the {kind} file: {_listed(numbers)}")


def _table(target: TargetSummary) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("workload", no_wrap=True)
    for header in ("records", "failed", "best µs", "median µs"):
        table.add_column(header, justify="right", no_wrap=True)
    for workload in target.workloads:
        counts = (str(workload.num_records), str(workload.num_failed))
        table.add_row(workload.hash, *counts, _microseconds(workload.best_s), _microseconds(workload.median_s))
    return table


def _microseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e6:.1f}"


def _listed(numbers: tuple[int, ...]) -> str:
    more = ", …" if len(numbers) > _MAX_NUMBERS else ""
    return ", ".join(map(str, numbers[:_MAX_NUMBERS])) + more


def print_pool(contents: PoolContents) -> None:
    """Prints a line for each device."""
    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False, markup=False)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for header in ("device", "CPU"):
        table.add_column(header, no_wrap=True)
    for header in ("kernels", "objects"):
        table.add_column(header, justify="right", no_wrap=True)
    for device in contents.devices:
        made_for, counts = device.fingerprint, (str(device.num_kernels), str(device.num_objects))
        table.add_row(made_for.description, f"{made_for.cpu_model} ({made_for.machine})", *counts)
    console.print(table if contents.devices else "the pool is empty")


def print_written(written: WrittenRecords) -> None:
    """Prints where the new database is."""
    click.echo(f"{written.num_records} records are in {written.output}")


def print_replayed(record: ReplayedRecord) -> None:
    """Prints a line for a record."""
    reason = record.error or f"error {record.max_rel_error:.1e}"
    where = f"{record.file}:{record.line}"
    status = _STATUS_NAMES[record.status]
    click.echo(f"{status:<13}{record.task}  {record.run_s * 1e6:.1f} µs  {where}  {reason}")


def print_verification(verification: Verification) -> None:
    """Prints the summary."""
    counts = ", ".join(f"{count} {_STATUS_NAMES[status]}" for status, count in verification.num_by_status.items())
    click.echo(f"\n{len(verification.records)} records of {verification.network} for {verification.target}: {counts}")
    for note in verification.notes:
        click.echo(note)
