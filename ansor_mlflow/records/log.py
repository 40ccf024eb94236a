"""The log that a tuning writes: a pair of JSON-lines files that grows by a line per trial.

TVM's own `JSONDatabase` writes the same lines, but it keeps every program in memory, applies every schedule again when
it is opened, and does not notice a full disk.
"""

from __future__ import annotations

import bisect
import errno
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from ansor_mlflow.errors import MachineError, RecordsError
from ansor_mlflow.records.atomic import is_full
from ansor_mlflow.records.store import FAILED_RUN_S, RecordPair, code_attributes, read_lines

_NUM_BEST = 8
"""Records of a workload that are kept at hand."""
_logger = logging.getLogger("ansor_mlflow")


@dataclass(frozen=True)
class RecordText:
    """A record as it stands in the log."""

    run_s: float
    """Mean seconds per call; `FAILED_RUN_S` or more for a failed trial."""
    text: str
    """JSON: `[trace, run_secs, target, args_info]`."""

    def line(self, index: int) -> str:
        """The record's line, given the index of its workload."""
        return f"[{index},{self.text}]"


class RecordLog:
    """Appends trials to a database; knows the fastest ones of each workload. Not safe for use from several threads.

    Args:
        directory: Where the pair is, or will be. A last line that was cut off when its writer died is set aside.
        target: Attributes of the target that is tuned for; records of others are not among the fastest.

    Raises:
        RecordsError: A line is damaged.
        MachineError: The disk is full.
    """

    def __init__(self, directory: Path, target: Mapping[str, Any]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._pair = RecordPair.in_directory(directory)
        self._target = code_attributes(dict(target))
        self._best: dict[int, list[RecordText]] = {}
        for path in (self._pair.workloads, self._pair.records):
            path.touch()
            _set_torn_line_aside(path)
        self._indices = {_hash(line): index for index, (_, line) in enumerate(read_lines(self._pair.workloads))}
        self._read_records()

    def best(self, workload_hash: str) -> Sequence[RecordText]:
        """The fastest records of a workload, fastest first.

        Args:
            workload_hash: Its structural hash in hexadecimal digits.
        """
        index = self._indices.get(int(workload_hash, 16))
        return () if index is None else tuple(self._best.get(index, ()))

    def append(self, workload: str, records: Sequence[RecordText]) -> None:
        """Appends records of a workload; they are on the disk when this returns.

        Args:
            workload: Its line in the workload file: the JSON text `[structural hash, module in base64]`.
            records: Its new records.

        Raises:
            MachineError: The disk is full, or nearly so. Nothing of these records is in the log then.
        """
        if is_full(self._pair.records.parent):
            raise _disk_full(self._pair.records)
        hash_ = _hash(workload)
        if hash_ not in self._indices:
            _append(self._pair.workloads, f"{workload}\n")
            self._indices[hash_] = len(self._indices)
        index = self._indices[hash_]
        _append(self._pair.records, "".join(f"{record.line(index)}\n" for record in records))
        for record in records:
            self._keep(index, record)

    def _read_records(self) -> None:
        for number, line in read_lines(self._pair.records):
            try:
                index, fields = json.loads(line)
                run_s, target = fmean(fields[1]), dict(fields[2])
            except (TypeError, LookupError, ValueError) as err:
                raise RecordsError(
                    f"{self._pair.records}: line {number} is not a tuning record of TVM; remove the line, or tune in "
                    "another directory"
                ) from err
            if code_attributes(target) == self._target:
                self._keep(index, RecordText(run_s, fields_of(line)))

    def _keep(self, index: int, record: RecordText) -> None:
        if record.run_s < FAILED_RUN_S:
            best = self._best.setdefault(index, [])
            bisect.insort(best, record, key=lambda other: other.run_s)
            del best[_NUM_BEST:]


def fields_of(line: str) -> str:
    """What follows the index of the workload in a record line."""
    return line[line.index(",") + 1 : -1].strip()


def _hash(workload: str) -> int:
    """The structural hash in a workload's line."""
    return int(json.loads(workload)[0])


def _append(path: Path, text: str) -> None:
    """Appends to a file and flushes it to the disk; takes it back if that fails."""
    size = path.stat().st_size
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as err:
        os.truncate(path, size)
        if err.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _disk_full(path) from err
        raise


def _disk_full(path: Path) -> MachineError:
    return MachineError(f"no space is left for records in {path.parent}; free some, and tune again")


def _set_torn_line_aside(path: Path) -> None:
    """Moves what follows the last line break to a file of its own."""
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end == len(content):
        return
    aside = path.with_name(f"{path.name}.torn")
    with aside.open("ab") as file:
        file.write(content[end:] + b"\n")
    os.truncate(path, end)
    _logger.warning("%s: its last line was cut off and is in %s now", path, aside.name)
