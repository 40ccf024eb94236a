"""Damaged lines of a database are set aside, and TVM reads what is left."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ansor_mlflow.lowering.network import LoweredNetwork
from ansor_mlflow.records.damage import Repair, repair
from ansor_mlflow.records.store import RECORD_FILE, WORKLOAD_FILE, RecordPair

QUARANTINE = ".quarantine"


@pytest.fixture
def pair(tuned_records: Path, tmp_path: Path) -> RecordPair:
    """A copy of the tuned database."""
    copy = RecordPair.in_directory(tmp_path)
    shutil.copyfile(tuned_records / WORKLOAD_FILE, copy.workloads)
    shutil.copyfile(tuned_records / RECORD_FILE, copy.records)
    return copy


def lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def aside(path: Path) -> Path:
    return path.with_name(path.name + QUARANTINE)


def num_records_of_tvm(pair: RecordPair) -> int:
    from tvm.s_tir.meta_schedule.database import JSONDatabase

    return len(JSONDatabase(work_dir=str(pair.records.parent), allow_missing=False))


def test_what_is_whole_stays_as_it_is(pair: RecordPair) -> None:
    before = [path.read_bytes() for path in (pair.workloads, pair.records)]
    assert repair(pair, thorough=True) == Repair(0, 0, ())
    assert [path.read_bytes() for path in (pair.workloads, pair.records)] == before
    assert sorted(path.name for path in pair.records.parent.iterdir()) == [RECORD_FILE, WORKLOAD_FILE]


def test_files_that_are_missing_are_empty(tmp_path: Path) -> None:
    pair = RecordPair.in_directory(tmp_path)
    assert repair(pair) == Repair(0, 0, ())
    assert pair.workloads.read_bytes() == pair.records.read_bytes() == b""


def test_a_record_that_was_cut_off(pair: RecordPair, caplog: pytest.LogCaptureFixture) -> None:
    whole = pair.records.read_bytes()
    pair.records.write_bytes(whole + whole[:700])
    assert repair(pair) == Repair(0, 1, (aside(pair.records),))
    assert pair.records.read_bytes() == whole
    assert aside(pair.records).read_bytes() == whole[:700] + b"\n"
    assert f"{pair.records}: line {whole.count(10) + 1} is damaged, and in {RECORD_FILE}{QUARANTINE} now" in caplog.text


def test_a_last_line_without_its_end_is_whole(pair: RecordPair) -> None:
    before = {path: path.read_bytes() for path in (pair.workloads, pair.records)}
    for path, text in before.items():
        path.write_bytes(text.rstrip(b"\n"))
    assert repair(pair) == Repair(0, 0, ())
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize(
    "damage",
    [lambda line: b"<html>not found</html>\n", lambda line: line[:700] + b"\n", lambda line: b"\x1f\x8b\x00\xff\n"],
    ids=["html", "torn", "binary"],
)
def test_a_line_in_the_middle(pair: RecordPair, damage: Callable[[bytes], bytes]) -> None:
    first, second, *others = lines(pair.records)
    pair.records.write_bytes(b"".join([first, damage(second), *others]))
    assert repair(pair) == Repair(0, 1, (aside(pair.records),))
    assert lines(pair.records) == [first, *others]
    assert lines(aside(pair.records)) == [damage(second)]
    assert num_records_of_tvm(pair) == 1 + len(others)


def test_damage_inside_a_schedule_takes_a_thorough_repair(pair: RecordPair) -> None:
    first, second, *others = lines(pair.records)
    broken = second[:300] + b"\x00" + second[301:]
    pair.records.write_bytes(b"".join([first, broken, *others]))
    assert repair(pair).num_records == 0
    assert repair(pair, thorough=True) == Repair(0, 1, (aside(pair.records),))
    assert lines(pair.records) == [first, *others]


def test_later_damage_is_added(pair: RecordPair) -> None:
    for text in (b"one", b"two"):
        pair.records.write_bytes(pair.records.read_bytes() + text)
        repair(pair)
    assert lines(aside(pair.records)) == [b"one\n", b"two\n"]


def test_a_workload_takes_its_records_with_it(pair: RecordPair, small_lowered: LoweredNetwork) -> None:
    """The other records keep their numbers."""
    workloads, records = lines(pair.workloads), lines(pair.records)
    assert len(workloads) == len(small_lowered.tasks) > 2
    pair.workloads.write_bytes(b"".join([workloads[0], b"[]\n", *workloads[2:]]))
    lost = [line for line in records if json.loads(line)[0] == 1]
    assert repair(pair) == Repair(1, len(lost), (aside(pair.records), aside(pair.workloads)))
    assert lines(pair.records) == [line for line in records if line not in lost]
    assert lines(aside(pair.records)) == lost
    assert lines(aside(pair.workloads)) == [b"[]\n"]
    assert num_records_of_tvm(pair) == len(records) - len(lost)
    assert repair(pair) == Repair(0, 0, ())


def test_a_workload_that_was_cut_off(pair: RecordPair) -> None:
    workloads = lines(pair.workloads)
    pair.workloads.write_bytes(b"".join(workloads)[:-100])
    repair(pair)
    assert lines(pair.workloads) == workloads[:-1]
    assert lines(aside(pair.workloads)) == [workloads[-1][:-100] + b"\n"]
    assert num_records_of_tvm(pair) == len(lines(pair.records)) > 0


def test_nothing_is_left_of_another_tools_files(tmp_path: Path) -> None:
    pair = RecordPair.in_directory(tmp_path)
    pair.workloads.write_text("a log\nof another tool\n")
    pair.records.write_text('{"i": [["llvm"]], "v": "v0.6"}\n')
    assert repair(pair) == Repair(2, 1, (aside(pair.records), aside(pair.workloads)))
    assert pair.workloads.read_bytes() == pair.records.read_bytes() == b""
