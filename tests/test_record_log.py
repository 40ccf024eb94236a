"""The log of a tuning, in TVM's own lines, whole after every round; and which earlier records one begins with."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import pytest
from helpers.programs import random_candidates

from ansor_mlflow import names
from ansor_mlflow.errors import MachineError
from ansor_mlflow.lowering.network import LoweredNetwork
from ansor_mlflow.records.log import RecordLog, RecordText
from ansor_mlflow.records.selection import matching_records, open_winners, read_similar, similar_records
from ansor_mlflow.records.store import RECORD_FILE, WORKLOAD_FILE, Database, RecordPair, merge
from ansor_mlflow.tuning.candidates import log_lines

if TYPE_CHECKING:
    from tvm.target import Target

HOST = {"kind": "llvm", "mcpu": "znver4"}
WORKLOAD = '["255","bW9kdWxl"]'
HASH = f"{255:#018x}"
"""The same number as in `WORKLOAD`."""


def record(*run_secs: float, target: dict[str, Any] = HOST) -> RecordText:
    return RecordText(fmean(run_secs), json.dumps([[], list(run_secs), target, []]))


def lines(directory: Path) -> list[Any]:
    return [json.loads(line) for line in (directory / RECORD_FILE).read_text().splitlines()]


def test_workloads_are_numbered_in_the_order_of_their_first_records(tmp_path: Path) -> None:
    log = RecordLog(tmp_path, HOST)
    for workload in (WORKLOAD, '["7","bW9kdWxl"]', WORKLOAD):
        log.append(workload, [record(1e-3), record(2e-3)])
    assert (tmp_path / WORKLOAD_FILE).read_text() == f'{WORKLOAD}\n["7","bW9kdWxl"]\n'
    assert [index for index, _ in lines(tmp_path)] == [0, 0, 1, 1, 0, 0]


def test_the_fastest_records_are_at_hand(tmp_path: Path) -> None:
    """A few of them, of this target, and no failed trials; the mean of a record's measurements counts."""
    log = RecordLog(tmp_path, HOST)
    assert log.best(HASH) == ()
    log.append(WORKLOAD, [record(1e10), record(1e-3, 9e-3), *(record(1e-3 * number) for number in range(2, 12))])
    assert [best.run_s for best in log.best(HASH)] == pytest.approx([1e-3 * n for n in (2, 3, 4, 5, 5, 6, 7, 8)])
    assert log.best("0x7") == ()


def test_earlier_records_of_other_targets_are_not_among_them(tmp_path: Path) -> None:
    RecordLog(tmp_path, HOST).append(WORKLOAD, [record(1e-3, target={"kind": "llvm", "mcpu": "znver3"})])
    assert RecordLog(tmp_path, HOST).best(HASH) == ()


@pytest.mark.parametrize("name", [WORKLOAD_FILE, RECORD_FILE])
def test_a_line_that_was_cut_off_is_set_aside_before_others_follow(tmp_path: Path, name: str) -> None:
    RecordLog(tmp_path, HOST).append(WORKLOAD, [record(1e-3)])
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole + whole[:9])
    log = RecordLog(tmp_path, HOST)
    assert (tmp_path / name).read_bytes() == whole
    assert log.best(HASH) == (record(1e-3),)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_records_that_do_not_fit_on_the_disk_leave_no_part_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    log = RecordLog(tmp_path, HOST)
    log.append(WORKLOAD, [record(1e-3)])
    before = (tmp_path / RECORD_FILE).read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MachineError, match=f"no space is left for records in {tmp_path}; free some, and tune again"):
        log.append(WORKLOAD, [record(2e-3)])
    assert (tmp_path / RECORD_FILE).read_bytes() == before
    assert log.best(HASH) == (record(1e-3),)


def test_the_lines_are_those_that_tvm_writes(
    small_lowered: LoweredNetwork, host_target: Target, tmp_path: Path
) -> None:
    """Byte for byte, layouts of weights included, for which TVM has an encoding of its own."""
    from tvm.s_tir.meta_schedule.database import JSONDatabase, TuningRecord

    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    theirs.mkdir()
    log, database = RecordLog(ours, host_target.export()), JSONDatabase(work_dir=str(theirs))
    for task in small_lowered.tasks:
        candidates = random_candidates(task, host_target, tmp_path / task.info.name)
        run_secs = [(1e-3 / 3, 2e-4), (), (1e-9,), (0.1,)][: len(candidates)]
        log.append(*log_lines(task.mod, host_target, candidates, run_secs))
        workload = database.commit_workload(task.mod)
        for candidate, seconds in zip(candidates, run_secs, strict=True):
            times = list(seconds) or [1e10]
            record = TuningRecord(candidate.sch.trace, workload, times, host_target, list(candidate.args_info))
            database.commit_tuning_record(record)
    for name in (WORKLOAD_FILE, RECORD_FILE):
        assert (ours / name).read_text() == (theirs / name).read_text()
    assert "TransformLayout" in (ours / RECORD_FILE).read_text()


def test_damage_within_a_line_costs_that_record(tmp_path: Path) -> None:
    """A quick look at both ends of the lines does not see it."""
    RecordLog(tmp_path, HOST).append(WORKLOAD, [record(1e-3), record(2e-3)])
    lines = (tmp_path / RECORD_FILE).read_bytes().splitlines(keepends=True)
    head, _, rest = lines[0].partition(b"[[")
    lines[0] = head + b"[\xff" + rest
    (tmp_path / RECORD_FILE).write_bytes(b"".join(lines))
    log = RecordLog(tmp_path, HOST)
    assert log.earlier(HASH) == [record(2e-3)]
    assert list(log.best(HASH)) == [record(2e-3)]


HERE = {"kind": "llvm", "mcpu": "znver4", "num-cores": 2}
THERE = {"kind": "llvm", "mcpu": "znver3", "num-cores": 8}
GPU = {"kind": "cuda", "arch": "sm_90"}
FIRST, SECOND = f"{0x7B:#018x}", f"{0x7C:#018x}"
"""Structural hashes of the two workloads."""
FAILED_S = 1e10


def database(directory: Path, records: Iterable[tuple[int, float, dict[str, Any]]]) -> Database:
    """A database of two workloads; its records have a workload, a time, a target, and a schedule of their own."""
    directory.mkdir(parents=True, exist_ok=True)
    pair = RecordPair.in_directory(directory)
    pair.workloads.write_text(
        "".join(f"{json.dumps([str(int(hash_, 16)), 'bW9kdWxl'])}\n" for hash_ in (FIRST, SECOND))
    )
    lines = [
        json.dumps([index, [[number], [run_s], target, []]]) for number, (index, run_s, target) in enumerate(records)
    ]
    pair.records.write_text("".join(f"{line}\n" for line in lines))
    return Database(pair)


def times(*databases: Database) -> list[float]:
    return [record.run_s for database in databases for record in database.records]


@pytest.mark.parametrize("hashes", [{FIRST}, {SECOND}, {FIRST, SECOND}, {f"{0:#018x}"}])
def test_only_workloads_of_the_network_and_this_target_match(tmp_path: Path, hashes: set[int]) -> None:
    found = database(tmp_path, [(0, 1.0, HERE), (1, 2.0, HERE), (0, 3.0, THERE), (1, 4.0, GPU)])
    expected = [run_s for hash_, run_s in ((FIRST, 1.0), (SECOND, 2.0)) if hash_ in hashes]
    assert times(*matching_records(found, None, HERE, hashes)) == expected


def test_failed_trials_are_taken_too(tmp_path: Path) -> None:
    found = database(tmp_path, [(0, FAILED_S, HERE), (0, 1.0, HERE)])
    assert times(*matching_records(found, None, HERE, {FIRST})) == [1.0, FAILED_S]


@pytest.mark.parametrize("num", [1, 32, 33, 64, 65, 200, 1000])
def test_of_many_records_the_fastest_and_some_others_are_taken(tmp_path: Path, num: int) -> None:
    found = database(tmp_path, [(0, float(number), HERE) for number in reversed(range(1, num + 1))])
    taken = times(*matching_records(found, None, HERE, {FIRST}))
    assert len(taken) == len(set(taken)) == min(num, len(taken)) <= 64
    assert taken[:32] == [float(number) for number in range(1, min(num, 32) + 1)]
    assert len(taken) >= min(num, 48)
    if num > 64:
        assert max(taken) > 0.9 * num


def test_a_winner_stands_for_what_only_seemed_faster(tmp_path: Path) -> None:
    found = database(tmp_path, [(0, 0.8, HERE), (0, 0.9, HERE), (0, 1.1, HERE), (1, 0.5, HERE)])
    winners = database(tmp_path / names.BEST_DIR, [(0, 1.0, HERE), (0, 0.1, THERE)])
    assert times(*matching_records(found, winners, HERE, {FIRST, SECOND})) == [1.0, 1.1, 0.5]


def test_what_is_taken_becomes_a_database(tmp_path: Path) -> None:
    found = database(tmp_path / "all", [(0, 0.8, HERE), (1, 0.5, HERE), (1, 0.6, THERE)])
    database(tmp_path / "all" / names.BEST_DIR, [(0, 1.0, HERE)])
    winners = open_winners(tmp_path / "all")
    assert winners is not None
    assert merge(matching_records(found, winners, HERE, {FIRST, SECOND}), tmp_path / "new") == 2
    merged = Database(RecordPair.in_directory(tmp_path / "new"))
    assert [(merged.hashes[record.workload], record.run_s) for record in merged.records] == [
        (FIRST, 1.0),
        (SECOND, 0.5),
    ]
    assert times(found) == [0.8, 0.5, 0.6]


@pytest.mark.parametrize(("all_", "expected"), [(False, [2.0]), (True, [1.0, 2.0])])
def test_similar_devices_are_of_the_same_kind(tmp_path: Path, all_: bool, expected: list[float]) -> None:
    found = database(tmp_path, [(0, 1.0, HERE), (0, 2.0, THERE), (0, 3.0, GPU), (1, 4.0, THERE)])
    assert times(similar_records(found, HERE, {FIRST}, all_=all_)) == expected


def test_the_records_of_each_similar_device_are_kept_apart(tmp_path: Path) -> None:
    other = {**THERE, "num-cores": 4}
    database(tmp_path, [(0, 1.0, THERE), (0, 2.0, other), (1, 3.0, THERE), (0, 4.0, THERE)])
    similar = read_similar(tmp_path)
    first, second = similar[FIRST], similar[SECOND]
    assert [[record.run_s for record in records] for records in first.values()] == [[1.0, 4.0], [2.0]]
    assert [[record.run_s for record in records] for records in second.values()] == [[3.0]]
