"""TVM's JSON database as two JSON-lines files.

Format of `tvm.s_tir.meta_schedule.database.JSONDatabase` (TVM 0.27, src/s_tir/meta_schedule/database/): a workload line
is `[structural hash, module in base64]`; a record line is `[index of its workload line, [trace, run_secs, target,
args_info]]`. A failed trial has one run time of 1e10 s.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from ansor_mlflow import names
from ansor_mlflow.errors import RecordsError, UserInputError
from ansor_mlflow.records.atomic import write_text

WORKLOAD_FILE = "database_workload.json"
RECORD_FILE = "database_tuning_record.json"

FAILED_RUN_S = 1e9
"""Run times from here on mark failed trials."""
_TARGET_DECORATION = {"tag", "keys", "host", "libs", "model"}
"""Entries of a target that do not change generated CPU code."""
_DEFAULT_OPT_LEVEL = 3
"""What TVM takes where a target names no `opt-level`. A program that is fast at one level may be slow at another."""


@dataclass(frozen=True)
class RecordPair:
    """The two files of one database."""

    workloads: Path
    records: Path

    @staticmethod
    def in_directory(directory: Path) -> RecordPair:
        """The pair under the names that TVM gives it in a work directory."""
        return RecordPair(workloads=directory / WORKLOAD_FILE, records=directory / RECORD_FILE)


def find_records(path: Path) -> RecordPair:
    """The pair that a user means by a directory or by a tuning-record file.

    A directory may be a work directory of TVM, or one that holds such a directory as `records/`. Where the winners of a
    tuning are beside its records, in `best/`, they are meant: they were measured twice. The workload file that belongs
    to a record file is beside it, with "workload" for "tuning_record" in its name.

    Raises:
        UserInputError: There is no such pair.
    """
    if path.is_dir():
        directories = [path / names.BEST_DIR, path, path / names.RECORDS_DIR / names.BEST_DIR, path / names.RECORDS_DIR]
        pair = next((p for d in directories if (p := RecordPair.in_directory(d)).records.exists()), None)
        if pair is None:
            raise UserInputError(f"records={path}: the directory has no {RECORD_FILE}; give TVM's work directory")
    elif path.is_file():
        pair = RecordPair(workloads=path.with_name(path.name.replace("tuning_record", "workload")), records=path)
    else:
        raise UserInputError(f"records={path}: no such file or directory; give a directory with {RECORD_FILE}")
    if pair.workloads == pair.records or not pair.workloads.is_file():
        raise UserInputError(
            f"records={path}: the workload file {pair.workloads.name} is missing beside {pair.records.name}; "
            "TVM writes both, and the records mean nothing without it"
        )
    return pair


def distill(source: RecordPair, destination: Path, target: dict[str, Any]) -> int:
    """Writes the fastest valid record of each workload to a new database.

    Args:
        source: Database to read.
        destination: Directory of the new pair; existing files are replaced.
        target: Attributes of the target that the records must be for. TVM's own queries ignore it and would return
            the fastest record of any device.

    Returns:
        The number of records written.

    Raises:
        RecordsError: A line is damaged, there are no records, or all of them are for other targets.
    """
    try:
        workloads = source.workloads.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as err:
        raise RecordsError(
            f"{source.workloads}: this is not a workload file of TVM, but perhaps a compressed one; give the file that "
            "TVM wrote"
        ) from err
    best: dict[int, tuple[float, str]] = {}
    foreign: dict[str, int] = {}
    for number, line in read_lines(source.records):
        try:
            index, fields = json.loads(line)
            run_s, record_target = fmean(fields[1]), dict(fields[2])
            workloads[index]
        except (TypeError, LookupError, ValueError, OverflowError) as err:
            raise _damaged(source.records, number) from err
        if code_attributes(record_target) != code_attributes(target):
            name = target_name(record_target)
            foreign[name] = foreign.get(name, 0) + 1
        elif run_s < FAILED_RUN_S and (index not in best or run_s < best[index][0]):
            best[index] = (run_s, line)
    if not best and foreign:
        raise RecordsError(
            f"{source.records}: the records are for {', '.join(foreign)}, this is {target_name(target)}; "
            "tune on this device, or give the target they were made for"
        )
    if not best:
        raise RecordsError(f"{source.records}: there is no valid record in it; tune first")
    write_pair(destination, workloads, [best[index][1] for index in sorted(best)])
    return len(best)


def code_attributes(target: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a target that decide which code is made for it."""
    return {
        "opt-level": _DEFAULT_OPT_LEVEL,
        **{key: value for key, value in target.items() if key not in _TARGET_DECORATION and value not in ("", [])},
    }


def target_name(target: dict[str, Any]) -> str:
    """A target's short name, such as "llvm znver4 ×2"."""
    words = [target.get("kind", "?"), target.get("mcpu") or target.get("arch") or ""]
    if "num-cores" in target:
        words.append(f"×{target['num-cores']}")
    if target.get("opt-level", _DEFAULT_OPT_LEVEL) != _DEFAULT_OPT_LEVEL:
        words.append(f"-O{target['opt-level']}")
    return " ".join(str(word) for word in words if word)


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yields number and text of every line that is not blank.

    Raises:
        RecordsError: The file is not text.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                text = line.decode().strip()
            except UnicodeDecodeError as err:
                raise _damaged(path, number) from err
            if text:
                yield number, text


def _damaged(path: Path, number: int) -> RecordsError:
    return RecordsError(f"{path}: line {number} is not a tuning record of TVM; remove the line or use another file")


def write_pair(directory: Path, workloads: Sequence[str], records: Sequence[str]) -> None:
    """Writes a database in a directory, which is made if need be; existing files are replaced."""
    directory.mkdir(parents=True, exist_ok=True)
    pair = RecordPair.in_directory(directory)
    write_text(pair.workloads, "".join(f"{line}\n" for line in workloads))
    write_text(pair.records, "".join(f"{line}\n" for line in records))
