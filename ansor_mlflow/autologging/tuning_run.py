"""The run that a tuning of the user's is logged to: the active one, or one of its own."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import mlflow
from mlflow.entities import Run
from mlflow.utils.autologging_utils.safety import is_testing
from mlflow.utils.mlflow_tags import MLFLOW_AUTOLOGGING, MLFLOW_LOGGED_ARTIFACTS, MLFLOW_RUN_NAME

from ansor_mlflow import names
from ansor_mlflow.errors import one_line
from ansor_mlflow.foreign import read_json
from ansor_mlflow.tracking import (
    GRACE_AFTER_ERROR_S,
    GRACE_S,
    Message,
    Outbox,
    UndeliveredError,
    held,
    remove_directory,
    work_directory,
)

INTEGRATION = "ansor_mlflow"
"""The name of our autologging in MLflow."""
_log = logging.getLogger("ansor_mlflow")


@dataclass(frozen=True)
class TuningRun:
    """The run of a tuning."""

    run: Run
    """The run as it was before the tuning."""
    directory: Path
    """Scratch directory; removed at the end, unless messages are left in it."""
    outbox: Outbox


@contextlib.contextmanager
def open_run(extra_tags: Mapping[str, str]) -> Iterator[TuningRun]:
    """The active run if nothing was tuned in it yet; else a new one, below the active one if there is one.

    A new run ends with the truth about how the tuning ended; the active run stays open.
    """
    active = mlflow.active_run()
    run = mlflow.get_run(active.info.run_id) if active else None
    with contextlib.ExitStack() as stack:
        is_guest = run is not None and names.TAG_STEP not in run.data.tags
        if run is None or not is_guest:
            run = stack.enter_context(_new_run(extra_tags, nested=run is not None))
        directory = work_directory(run.info.run_id).absolute()  # the user may change the current directory
        if not is_guest:
            stack.enter_context(held(run.info.run_id, directory))  # if this process is killed, the next step ends it
        outbox = GuestOutbox(run, directory) if is_guest else Outbox(run.info.run_id, directory)
        stack.enter_context(_closing(outbox, directory, status="" if is_guest else "FINISHED"))
        yield TuningRun(run, directory, outbox)


class GuestOutbox(Outbox):
    """The outbox of a user's own run: its name, and the params and tables that it has, stay."""

    def __init__(self, run: Run, directory: Path) -> None:
        super().__init__(run.info.run_id, directory)
        self._params = run.data.params
        self._tables = read_json(run.data.tags.get(MLFLOW_LOGGED_ARTIFACTS, "[]"))

    def put(self, message: Message) -> None:
        """See `Outbox.put`."""
        tags = {key: value for key, value in message.tags.items() if key != MLFLOW_RUN_NAME}
        if MLFLOW_LOGGED_ARTIFACTS in tags:
            tags[MLFLOW_LOGGED_ARTIFACTS] = json.dumps([*self._tables, *json.loads(tags[MLFLOW_LOGGED_ARTIFACTS])])
        params = {key: value for key, value in message.params.items() if key not in self._params}
        super().put(replace(message, tags=tags, params=params))


@contextlib.contextmanager
def only_warn() -> Iterator[None]:
    """Makes errors inside warnings: while another error is on its way to the user, that is the one to report."""
    try:
        yield
    except Exception as err:
        if is_testing():
            raise
        _log.warning("the tuning could not be logged: %s", one_line(err))


@contextlib.contextmanager
def _new_run(extra_tags: Mapping[str, str], *, nested: bool) -> Iterator[Run]:
    run = mlflow.start_run(nested=nested, tags={**extra_tags, MLFLOW_AUTOLOGGING: INTEGRATION})
    try:
        yield run
    except BaseException as err:
        with only_warn():
            mlflow.end_run(_status(err))
        raise
    mlflow.end_run()


def _status(err: BaseException) -> str:
    if isinstance(err, UndeliveredError):  # the tuning itself went well
        return "FINISHED"
    return "KILLED" if isinstance(err, KeyboardInterrupt) else "FAILED"


@contextlib.contextmanager
def _closing(outbox: Outbox, directory: Path, *, status: str) -> Iterator[None]:
    """Closes an outbox at the end, and removes its directory if no message is left in it."""
    try:
        yield
    except BaseException as err:
        with only_warn():
            outbox.put(Message(tags={names.TAG_ERROR: f"{type(err).__name__}: {one_line(err)}"}))
            outbox.close(GRACE_AFTER_ERROR_S)
            remove_directory(directory)
        raise
    if status:
        outbox.put(Message(status=status))
    outbox.close(GRACE_S)
    remove_directory(directory)
