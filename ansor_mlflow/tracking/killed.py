"""What steps that were killed left below the current directory, and in MLflow: the next step here finds it."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import mlflow
from filelock import FileLock, Timeout
from mlflow.entities import LoggedModelStatus

from ansor_mlflow import names
from ansor_mlflow.errors import UserInputError, only_warn
from ansor_mlflow.records import RecordPair

WORK_ROOT = Path(".ansor")
"""Where steps keep files until MLflow has them, below the current directory. A failed run leaves its records there."""
LOCK_FILE = ".lock"
OUTBOX_DIR = "outbox"
_log = logging.getLogger("ansor_mlflow")


@contextlib.contextmanager
def held(run_id: str, directory: Path) -> Iterator[None]:
    """Holds a directory of a run, which is made if need be; the system lets go of it when the process ends."""
    directory.mkdir(parents=True, exist_ok=True)
    lock = FileLock(directory / LOCK_FILE)
    try:
        lock.acquire(timeout=0)
    except Timeout as err:
        raise UserInputError(
            f"run {run_id} still goes on in this directory, or is being delivered; wait until that ends"
        ) from err
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def ended(run_id: str, directory: Path) -> Iterator[None]:
    """Keeps every process from a run that none is at; else it is a `UserInputError`. Whoever has worked in its
    directory has left a lock there.
    """
    with contextlib.ExitStack() as locks:
        for folder in (directory, directory / OUTBOX_DIR):
            if (folder / LOCK_FILE).exists():
                locks.enter_context(held(run_id, folder))
        yield


def is_held(directory: Path) -> bool:
    """Whether a process works in the directory of a run."""
    try:
        with ended(directory.name, directory):
            return False
    except UserInputError:
        return True


def has_records(directory: Path) -> bool:
    """Whether a trial was recorded in the directory of a run."""
    records = RecordPair.in_directory(directory / names.RECORDS_DIR).records
    return records.is_file() and records.stat().st_size > 0


def has_messages(directory: Path) -> bool:
    """Whether there are messages that a run was not told."""
    return any((directory / OUTBOX_DIR).glob("*.json"))


def remove_directory(directory: Path) -> None:
    """Removes what a run has on this machine."""
    shutil.rmtree(directory, ignore_errors=True)
    with contextlib.suppress(OSError):  # other runs have files there
        WORK_ROOT.rmdir()


def end_killed_steps() -> None:
    """Ends the runs of steps that were killed here, and removes their files.

    Those with records or messages are only named: a tuning can go on.
    """
    left = []
    for directory in sorted(WORK_ROOT.glob("*/")):
        if not any((folder / LOCK_FILE).exists() for folder in (directory, directory / OUTBOX_DIR)):
            continue  # nobody began to work there
        warn = only_warn(f"{directory} is left of a step that was killed")
        with warn, suppress(UserInputError), ended(directory.name, directory):  # which is raised where the step goes on
            if has_messages(directory) or has_records(directory):
                left.append(directory.name)
                continue
            if (directory / LOCK_FILE).exists():  # else it is the user's own run, in which something was tuned
                end_killed_run(directory.name)
            remove_directory(directory)
    if left:
        _log.warning(
            "%d earlier runs have records or messages in %s (%s): ansor-mlflow sync says what to do with each",
            len(left),
            WORK_ROOT,
            ", ".join(left),
        )


def fail_pending_models(run_id: str) -> None:
    """Marks the models of a run FAILED whose logging did not end; otherwise they would be PENDING for ever."""
    client = mlflow.MlflowClient()
    experiment_id = client.get_run(run_id).info.experiment_id
    found = client.search_logged_models([experiment_id], filter_string=f"source_run_id = '{run_id}'")
    for model in found:
        if model.status == LoggedModelStatus.PENDING:
            client.finalize_logged_model(model.model_id, LoggedModelStatus.FAILED)


def end_killed_run(run_id: str) -> None:
    """Marks a run KILLED whose process is no more, if it does not say so itself."""
    client = mlflow.MlflowClient()
    if client.get_run(run_id).info.status == "RUNNING":
        client.set_tag(run_id, names.TAG_ERROR, "the process was killed")
        client.set_tag(run_id, names.TAG_EXIT_CODE, "137")  # what a shell says of a process that SIGKILL ended
        client.set_terminated(run_id, "KILLED")
        _log.warning("the run %s was killed, and is marked KILLED now", run_id)
    fail_pending_models(run_id)
