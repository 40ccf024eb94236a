"""Delivers what earlier steps could not tell MLflow, because a server was away or they were killed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import mlflow

from ansor_mlflow import names
from ansor_mlflow.errors import AnsorMlflowError, MachineError, RecordsError, UserInputError
from ansor_mlflow.files import scratch_directory
from ansor_mlflow.records import GROWING_FILES
from ansor_mlflow.steps.fetching import fetch_run
from ansor_mlflow.tracking import (
    WORK_ROOT,
    StepRun,
    deliver_left,
    ended,
    has_messages,
    has_records,
    is_held,
    remove_directory,
    translated_errors,
)

_HAS_ENDED = {"FINISHED", "FAILED", "KILLED"}


@dataclass(frozen=True)
class Delivered:
    """What became of what a run has on this machine."""

    run_id: str
    num_messages: int
    left: str = ""
    """What stays here, why, and what to do with it; empty where nothing does."""
    error: AnsorMlflowError | None = None


def sync() -> Iterator[Delivered]:
    """Delivers the messages of every run below the current directory, and removes the files here of those that ended.

    A run that cannot be told holds up no other. Records are removed only when the run has them: the last trials of a
    tuner that was killed may be nowhere else.
    """
    for directory in sorted(WORK_ROOT.glob("*/")):
        try:
            if has_messages(directory) or (has_records(directory) and not is_held(directory)):
                with ended(directory.name, directory):  # it cannot go on before its records are compared and removed
                    delivered = _deliver(directory)
                yield delivered
        except AnsorMlflowError as err:
            drop = "" if isinstance(err, MachineError) else f"; {_how_to_drop(directory.name)}"
            yield Delivered(directory.name, 0, f"{str(err).rstrip('.')}{drop}", err)


def drop(run_id: str) -> None:
    """Removes what a run has on this machine, delivered or not, with its records."""
    known = sorted(directory.name for directory in WORK_ROOT.glob("*/"))
    if run_id not in known:
        raise UserInputError(
            f"drop={run_id}: {WORK_ROOT} has nothing of such a run; it has {', '.join(known) or 'none'}"
        )
    with ended(run_id, WORK_ROOT / run_id):
        remove_directory(WORK_ROOT / run_id)


def require_all_delivered(delivered: list[Delivered]) -> None:
    """Checks that every run was told everything."""
    errors = [one.error for one in delivered if one.error]
    errors.sort(key=lambda err: not isinstance(err, MachineError))
    if errors:
        more = f" ({len(errors)} of {len(delivered)} runs are left; their lines say why)" if len(delivered) > 1 else ""
        raise type(errors[0])(f"{errors[0]}{more}")


def _deliver(directory: Path) -> Delivered:
    run_id = directory.name
    with translated_errors(f"deliver the messages to the run {run_id}"):
        num_messages = deliver_left(run_id, directory) if has_messages(directory) else 0
        status = mlflow.get_run(run_id).info.status
        if status == "FINISHED":  # all that failed was the delivery
            StepRun(run_id, directory).forget_failure()
    if has_records(directory) and not (status in _HAS_ENDED and _run_has(run_id, directory / names.RECORDS_DIR)):
        left = (
            f"its records stay in {directory}, since the run lacks some or goes on: ansor-mlflow tune --resume-run "
            f"{run_id} goes on with them; {_how_to_drop(run_id)}"
        )
        return Delivered(run_id, num_messages, left)
    if status in _HAS_ENDED:
        remove_directory(directory)
    return Delivered(run_id, num_messages)


def _run_has(run_id: str, records: Path) -> bool:
    """Whether all that was recorded here is among the artifacts of a run."""
    with scratch_directory() as scratch:
        try:
            there = fetch_run(run_id, Path(scratch))
        except (UserInputError, RecordsError):
            return False
        files = [name for name in GROWING_FILES if (records / name).exists()]
        return all(
            (there / name).is_file() and (there / name).read_bytes().startswith((records / name).read_bytes())
            for name in files
        )


def _how_to_drop(run_id: str) -> str:
    return f"ansor-mlflow sync --drop {run_id} removes what is left of it here"
