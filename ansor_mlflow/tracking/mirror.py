"""Copies the records of a tuning to its run while it goes on, so that they outlive this machine."""

from __future__ import annotations

import os
import time
from pathlib import Path

from ansor_mlflow import names
from ansor_mlflow.records import PARTS_DIR, PartWriter, write_manifest
from ansor_mlflow.tracking.outbox import Message, Outbox
from ansor_mlflow.trials import TuningPlan, TuningResult, TuningRound

_MAX_TRIALS = 64
_MAX_S = float(os.environ.get(names.UPLOADS_VARIABLE, "60"))
"""Seconds that pass, or `_MAX_TRIALS` that are measured, until the next part."""
_EMPTY_DIR = "no_records"


def whole_records(directory: Path) -> list[tuple[str, str]]:
    """The artifacts of a message with all records of a run.

    The manifest comes last, when what it describes is there. Before that, an empty one takes the place of an older one,
    so that an upload which is cut short leaves no manifest of other files.

    Args:
        directory: The run's directory.
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
    """A `TuningObserver` that sends what was recorded, in parts: see `records.PartWriter`.

    Args:
        outbox: Delivers to the run.
        directory: The run's directory, with the records in it.
    """

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
        """Sends a part when one is due."""
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
