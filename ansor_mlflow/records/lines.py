"""The lines of TVM's database, read without TVM and, as far as possible, without parsing them.

Format of `tvm.s_tir.meta_schedule.database.JSONDatabase` (TVM 0.27, src/s_tir/meta_schedule/database/): a workload line
is `[structural hash, module in base64]`; a record line is `[index of its workload line, [trace, run_secs, target,
args_info]]`. A failed trial has one run time of 1e10 s.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

from ansor_mlflow.foreign import read_json
from ansor_mlflow.records.traces import check_trace

FAILED_RUN_S = 1e9
"""Run times from here on mark failed trials."""
_SHORTEST_S, _LONGEST_S = 1e-9, 1e4
"""No call of a kernel is shorter, and none that is longer is measured: such a time is a mistake, or a lie."""
_MAX_INDEX_DIGITS = 24
_MAX_NUMBERS = 10
"""Lines of a file that a message names."""


@dataclass(frozen=True, slots=True)
class RecordLine:
    """What tells records apart, and where the line is."""

    number: int
    """Number of the line in its file, from 1."""
    offset: int
    length: int
    """Length of the line with its end, in bytes."""
    workload: int
    """Index of its line in the workload file."""
    run_s: float
    """Mean seconds per call; `FAILED_RUN_S` or more for a failed trial."""
    target: str
    """Attributes of the target as JSON."""


@dataclass(frozen=True, slots=True)
class DamagedLine:
    """A line that is no record."""

    number: int
    offset: int
    length: int


def scan_records(path: Path, *, thorough: bool = False) -> Iterator[RecordLine | DamagedLine]:
    """What every line of a record file is; `thorough` parses them as a whole, instead of looking at both ends."""
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            length = len(line)
            if length > _MAX_INDEX_DIGITS or line.strip():
                try:
                    if thorough:
                        parse_record(line)
                    yield RecordLine(number, offset, length, *(_quick_look(line) or _parsed(line)))
                except ValueError:
                    yield DamagedLine(number, offset, length)
            offset += length


def numbered(lines: Sequence[int]) -> str:
    """Lines as the subject of a sentence: "line 7 is", "lines 7, 9 are"."""
    more = f", … ({len(lines)} in all)" if len(lines) > _MAX_NUMBERS else ""
    listed = ", ".join(map(str, lines[:_MAX_NUMBERS])) + more
    return f"line {listed} is" if len(lines) == 1 else f"lines {listed} are"


def parse_record(line: bytes) -> tuple[int, float, dict[str, Any]]:
    """Workload index, mean seconds and target of a record line, parsed as a whole; a ValueError if it is none."""
    try:
        index, (trace, run_secs, target, args_info) = read_json(line)
        if any(isinstance(seconds, bool) for seconds in run_secs):
            raise ValueError("a time is no number")
        mean_s = mean_time(run_secs)
        check_trace(trace)
    except (TypeError, ArithmeticError, LookupError, AttributeError) as err:
        raise ValueError(str(err)) from err
    is_record = isinstance(trace, list) and isinstance(target, dict) and isinstance(args_info, list)
    if not is_record or type(index) is not int or index < 0:
        raise ValueError("no record")
    return index, mean_s, target


def mean_time(run_secs: Sequence[float]) -> float:
    """Mean time of a record, `FAILED_RUN_S` or more for a failed trial; a ValueError if no kernel takes such times."""
    mean_s = fmean(run_secs)
    if not math.isfinite(mean_s) or (mean_s < FAILED_RUN_S and not all(map(is_time, run_secs))):
        raise ValueError(f"no call of a kernel takes {mean_s} s")
    return mean_s


def is_time(seconds: float) -> bool:
    """Whether a call of a kernel can take so long."""
    return _SHORTEST_S <= seconds <= _LONGEST_S


def fields_of(line: str) -> str:
    """What follows the index of the workload in a record line: JSON `[trace, run_secs, target, args_info]`."""
    return line[line.index(",") + 1 : line.rindex("]")].strip()


def workload_hash(line: str) -> str:
    """The structural hash in a workload line, in hexadecimal digits as TVM shows it: "0x" and sixteen."""
    try:
        hash_, module = read_json(line)
        base64.b64decode(module, validate=True)
        return f"{int(hash_):#018x}"
    except TypeError as err:
        raise ValueError("no workload") from err


@lru_cache(maxsize=1024)
def target_attributes(text: str) -> dict[str, Any]:
    """The attributes of `RecordLine.target`; not to be changed."""
    return dict(read_json(text))


def _quick_look(line: bytes) -> tuple[int, float, str] | None:
    """Index, mean seconds and target of a line as TVM writes it; None for one that looks otherwise.

    Behind the trace, which is nearly all of the line, there are only numbers, one object and names of types.
    """
    target = line.rfind(b'],{"') + 2
    times = line.rfind(b",[", 0, target) + 2
    comma = line.find(b",", 0, _MAX_INDEX_DIGITS)
    end = line.find(b"},[", target) + 1
    if not (0 < comma < times < target < end and line.startswith(b"[") and line.endswith(b"]]]\n")):
        return None
    try:
        seconds = [float(second) for second in line[times : target - 2].split(b",")]
        text = line[target:end].decode()
        target_attributes(text)
        index, mean_s = int(line[1:comma]), mean_time(seconds)
    except (ValueError, TypeError, OverflowError):
        return None
    return None if index < 0 else (index, mean_s, text)


def _parsed(line: bytes) -> tuple[int, float, str]:
    index, run_s, target = parse_record(line)
    return index, run_s, json.dumps(target)
