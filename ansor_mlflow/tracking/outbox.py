"""What a run has to tell MLflow, kept on disk until MLflow has it.

Messages are files, written whole, delivered in their order and then removed. A server that is away holds up nothing but
their delivery; what is left when the process ends is delivered by `ansor-mlflow sync`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import mlflow
import tenacity
from mlflow.entities import Metric, Param, RunTag
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from mlflow.utils.mlflow_tags import MLFLOW_RUN_NAME

from ansor_mlflow import names
from ansor_mlflow.errors import MachineError, RecordsError, one_line
from ansor_mlflow.files import path_below, write_text
from ansor_mlflow.foreign import without_credentials
from ansor_mlflow.records import PARTS_DIR, PartWriter, write_manifest
from ansor_mlflow.tracking.killed import OUTBOX_DIR, held
from ansor_mlflow.tracking.report.note import note_tags
from ansor_mlflow.trials import TuningPlan, TuningResult, TuningRound

_MAX_PAUSE_S = 30.0
"""Longest pause between two attempts: a server that is back is noticed within half a minute, and many runs that wait
for one do not keep it from coming back."""
GRACE_S = float(os.environ.get(names.GRACE_VARIABLE, "60"))
"""How long a server that is away is waited for at the end of a step."""
GRACE_AFTER_ERROR_S = 10.0
"""The same after an error or Ctrl-C: whoever waits for the prompt is told what failed, and `sync` does the rest."""
_MAX_TRIALS = 64
_MAX_S = float(os.environ.get(names.UPLOADS_VARIABLE, "60"))
"""Seconds that pass, or `_MAX_TRIALS` that are measured, until the next part of the records is sent: that much is lost
with the machine, and a part costs an upload."""
_EMPTY_DIR = "no_records"
_log = logging.getLogger("ansor_mlflow")


def as_logged(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics as MLflow gets them, which shows every digit: with five significant ones. Whole numbers stay.

    The order is that in which a page shows them; see `names.FIRST_METRICS`.
    """
    first = {name: position for position, name in enumerate(names.FIRST_METRICS)}
    ordered = sorted(metrics, key=lambda name: ("/" in name, first.get(name, len(first))))
    return {name: five_digits(metrics[name]) for name in ordered}


def five_digits(value: float) -> float:
    """A number with five significant digits; a whole one stays."""
    return value if float(value).is_integer() else float(f"{value:.5g}")


@dataclass(frozen=True)
class Message:
    """What is sent to a run, all of it at once or in this order."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    step: int = 0  # step of the metrics
    params: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    note: str = ""  # description of the run, as Markdown; it does not replace what a user has written
    artifacts: Sequence[tuple[str, str]] = ()
    """File or directory below the run's directory, and the artifact path to put it, or its contents, under."""
    remove: str = ""  # artifact path of a folder that is not needed any more
    status: str = ""  # status that ends the run, such as "FINISHED"; empty while it goes on
    time_ms: int = field(default_factory=lambda: int(time.time() * 1000))

    def deliver(self, run_id: str, directory: Path) -> None:
        """Sends it. A message that is sent twice leaves what one does."""
        client = mlflow.MlflowClient()
        metrics = [Metric(key, value, self.time_ms, self.step) for key, value in as_logged(self.metrics).items()]
        known = client.get_run(run_id).data.params if self.params else {}  # they cannot change any more
        params = [Param(key, value) for key, value in self.params.items() if key not in known]
        tags = [RunTag(key, value) for key, value in self.tags.items()]
        if self.note:
            noted = note_tags(client.get_run(run_id).data.tags, self.note)
            tags += [RunTag(key, value) for key, value in noted.items()]
        if metrics or params or tags:
            client.log_batch(run_id, metrics=metrics, params=params, tags=tags)
        for name, artifact_path in self.artifacts:
            path = path_below(directory, name)
            if not path.exists():  # somebody removed it; what comes after it is delivered nevertheless
                _log.warning("%s is not here any more, and the run %s does not get it", path, run_id)
            elif path.is_dir():
                client.log_artifacts(run_id, str(path), artifact_path or None)
            else:
                client.log_artifact(run_id, str(path), artifact_path or None)
        if self.remove and any(client.list_artifacts(run_id, self.remove)):
            get_artifact_repository(client.get_run(run_id).info.artifact_uri).delete_artifacts(self.remove)
        if self.status:  # last: a run that has ended has all that is said of it
            client.set_terminated(run_id, self.status, self.time_ms)


class UndeliveredError(MachineError):
    """A server was away until the end."""


class Outbox:
    """Delivers the messages of one run, from a thread of its own; one process is at a run. To be closed."""

    def __init__(self, run_id: str, directory: Path, *, keeps_name: bool = False) -> None:
        self._run_id = run_id
        self._keeps_name = keeps_name
        self._folder = directory / OUTBOX_DIR
        self._held = contextlib.ExitStack()
        self._held.enter_context(held(run_id, self._folder))
        self._names = [path.name for path in _left(directory)]
        """File names of the messages to be delivered; an earlier process of the run may have left some."""
        self._num_put = int(Path(self._names[-1]).stem) if self._names else 0
        self._changed = threading.Condition()
        self._failure = ""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._deliver_all, name="outbox", daemon=True)
        self._thread.start()

    @property
    def was_used(self) -> bool:
        return self._num_put > 0

    def put(self, message: Message) -> None:
        """Takes a message; it is on the disk when this returns. A name that the run's user gave it stays."""
        if self._keeps_name:
            message = replace(message, tags={k: text for k, text in message.tags.items() if k != MLFLOW_RUN_NAME})
        name = f"{self._num_put + 1:06d}.json"
        _write(self._folder / name, message)
        with self._changed:
            self._num_put += 1
            self._names.append(name)
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Waits until everything is delivered, and returns whether it is; at once while the server is away."""
        with self._changed:
            self._changed.wait_for(lambda: not self._names or self._failure, timeout_s)
            return not self._names

    def close(self, timeout_s: float) -> None:
        """Tries for a while to deliver the rest; what is left then is an `UndeliveredError`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._names, timeout_s)
            self._closing.set()
            self._changed.notify_all()
        self._thread.join(timeout_s)  # a delivery that is under way may still succeed
        self._held.close()
        if self._names:
            raise UndeliveredError(
                f"{len(self._names)} messages to the run {self._run_id} are undelivered "
                f"({self._failure or 'no answer in time'}); they are in {self._folder}, beside the records; when the "
                "server is back, run ansor-mlflow sync in this directory"
            )

    def _deliver_all(self) -> None:
        retrying = tenacity.Retrying(
            wait=tenacity.wait_exponential(multiplier=0.5, max=_MAX_PAUSE_S),  # most failures last a moment
            sleep=tenacity.sleep_using_event(self._closing),
            stop=tenacity.stop_when_event_set(self._closing),
            after=self._note_failure,
            reraise=True,
        )
        with contextlib.suppress(Exception):  # noted; the process ends
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._names or self._closing.is_set())
                    if self._closing.is_set():
                        return
                retrying(self._deliver_next)

    def _deliver_next(self) -> None:
        _deliver(self._folder / self._names[0], self._run_id)
        with self._changed:
            if self._failure:
                _log.warning("the MLflow run is reached again")
            self._failure = ""
            self._names.pop(0)
            self._changed.notify_all()

    def _note_failure(self, state: tenacity.RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        if error is None:
            return
        with self._changed:
            if not self._failure:
                _log.warning("the MLflow run cannot be reached and will be told later: %s", one_line(error))
            self._failure = one_line(error)
            self._changed.notify_all()  # who waits in `flush` need not wait for a server that is away


@contextlib.contextmanager
def open_outbox(run_id: str, directory: Path, *, keeps_name: bool = False) -> Iterator[Outbox]:
    """An outbox that is closed at the end, and given the time that a server takes to come back."""
    outbox = Outbox(run_id, directory, keeps_name=keeps_name)
    try:
        yield outbox
    except BaseException:
        try:
            outbox.close(GRACE_AFTER_ERROR_S)
        except UndeliveredError as err:
            _log.warning("%s", err)  # the error that ended the step is the one to report
        raise
    try:
        outbox.close(GRACE_S)
    except UndeliveredError as err:
        raise UndeliveredError(f"the tuning is whole, but {err}") from err


def leave_message(directory: Path, message: Message) -> None:
    """Puts a message behind those that are left of a run."""
    left = _left(directory)
    _write(left[-1].with_name(f"{int(left[-1].stem) + 1:06d}.json"), message)


def deliver_left(run_id: str, directory: Path) -> int:
    """Delivers what is left of a run that has `ended`, and returns the number of messages. Raises what MLflow does."""
    left = _left(directory)
    for path in left:
        _deliver(path, run_id)
    return len(left)


def forget_end(directory: Path) -> None:
    """Takes out of the messages that are left of a run how it ended: it goes on."""
    for path in _left(directory):
        message = _read(path)
        tags = {key: value for key, value in message.tags.items() if key not in names.END_TAGS}
        _write(path, replace(message, tags=tags, status=""))


def _left(directory: Path) -> list[Path]:
    return sorted((directory / OUTBOX_DIR).glob("*.json"))


def _write(path: Path, message: Message) -> None:
    params, tags = (
        {key: without_credentials(value) for key, value in texts.items()} for texts in (message.params, message.tags)
    )
    safe = replace(message, params=params, tags=tags, note=without_credentials(message.note))
    write_text(path, json.dumps(asdict(safe)))


def _deliver(path: Path, run_id: str) -> None:
    _read(path).deliver(run_id, path.parents[1])
    path.unlink()


def _read(path: Path) -> Message:
    try:
        message = Message(**json.loads(path.read_text()))
        for name, _ in message.artifacts:
            path_below(path.parents[1], name)
        return message
    except (ValueError, TypeError) as err:
        raise RecordsError(f"{path}: the message is damaged; remove it, and the others are delivered") from err


def whole_records(directory: Path) -> list[tuple[str, str]]:
    """The artifacts of a message with all records of a run.

    The manifest comes last, when what it describes is there. Before that, an empty one takes the place of an older one,
    so that an upload which is cut short leaves no manifest of other files.
    """
    empty = directory / _EMPTY_DIR
    empty.mkdir(exist_ok=True)
    write_manifest(empty, empty / names.MANIFEST_FILE)
    write_manifest(directory / names.RECORDS_DIR, directory / names.MANIFEST_FILE)
    return [
        (f"{_EMPTY_DIR}/{names.MANIFEST_FILE}", names.RECORDS_DIR),
        (names.RECORDS_DIR, names.RECORDS_DIR),
        (names.MANIFEST_FILE, names.RECORDS_DIR),
    ]


class RecordMirror:
    """A `TuningObserver` that sends what was recorded, in parts: see `records.PartWriter`."""

    def __init__(self, outbox: Outbox, directory: Path) -> None:
        self._outbox = outbox
        self._directory = directory
        self._writer: PartWriter | None = None
        self._num_trials = 0
        self._last_s = time.monotonic()

    def tuning_started(self, plan: TuningPlan) -> None:
        """Sends what is there: the description, and the records of an earlier process."""
        self._writer = PartWriter(self._directory / names.RECORDS_DIR, self._directory / PARTS_DIR)
        self._outbox.put(Message(artifacts=whole_records(self._directory)))
        self._num_trials = plan.past[-1].total_trials if plan.past else 0

    def round_finished(self, round_: TuningRound) -> None:
        num_new = round_.total_trials - self._num_trials
        if num_new < _MAX_TRIALS and time.monotonic() - self._last_s < _MAX_S:
            return
        self._num_trials, self._last_s = round_.total_trials, time.monotonic()
        part = self._writer.write() if self._writer else None
        if part is not None:
            artifacts = [(f"{PARTS_DIR}/{part.name}", f"{names.RECORDS_DIR}/{PARTS_DIR}")]
            self._outbox.put(Message(artifacts=artifacts))

    def tuning_finished(self, result: TuningResult) -> None:
        """Does nothing: at the end of the step the whole files take the place of the parts."""
