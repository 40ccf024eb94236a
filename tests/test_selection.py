"""A tuning begins with a choice of earlier records: the fastest, some of the others, and none of another device."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from ansor_mlflow import names
from ansor_mlflow.records.selection import matching_records, open_winners, read_similar, similar_records
from ansor_mlflow.records.store import Database, RecordPair, merge

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


def test_a_winner_is_taken_once(tmp_path: Path) -> None:
    """With the time of its second measurement, though the first was slower."""
    found = database(tmp_path, [(0, 1.2, HERE), (0, 1.1, HERE)])
    winners = database(tmp_path / names.BEST_DIR, [(0, 1.0, HERE)])
    assert times(*matching_records(found, winners, HERE, {FIRST})) == [1.0, 1.1]


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


def test_without_winners(tmp_path: Path) -> None:
    database(tmp_path, [])
    assert open_winners(tmp_path) is None


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


def test_without_similar_records(tmp_path: Path) -> None:
    assert read_similar(tmp_path) == {}
