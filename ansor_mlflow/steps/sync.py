"""Delivers what earlier steps could not tell MLflow, because a server was away."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import mlflow

from ansor_mlflow.tracking import WORK_ROOT, StepRun, deliver_left, has_messages, remove_directory, translated_errors

_HAS_ENDED = {"FINISHED", "FAILED", "KILLED"}


@dataclass(frozen=True)
class Delivered:
    """A run that knows everything now."""

    run_id: str
    num_messages: int


def sync() -> Iterator[Delivered]:
    """Delivers the messages of every run below the current directory, and removes the files here of those that ended.

    A tuner that was killed has not ended its run, and its last trials may be nowhere else: they wait to be resumed.

    Raises:
        UserInputError: A run still goes on.
        MachineError: A server is still away; what is not delivered stays.
    """
    for directory in sorted(WORK_ROOT.glob("*/")):
        if not has_messages(directory):
            continue
        run_id = directory.name
        with translated_errors(f"deliver the messages to the run {run_id}"):
            num_messages = deliver_left(run_id, directory)
            status = mlflow.get_run(run_id).info.status
            if status == "FINISHED":  # all that failed was the delivery
                StepRun(run_id, directory).forget_failure()
        if status in _HAS_ENDED:
            remove_directory(directory)
        yield Delivered(run_id, num_messages)
