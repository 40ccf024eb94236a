"""The log of a tuning: TVM's own lines, whole after every round, whatever happened to the writer before."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import pytest
from helpers.programs import random_candidates

from ansor_mlflow.errors import MachineError
from ansor_mlflow.lowering.network import LoweredNetwork
from ansor_mlflow.records.log import RecordLog, RecordText
from ansor_mlflow.records.store import RECORD_FILE, WORKLOAD_FILE
from ansor_mlflow.tuning.candidates import log_lines, memory_database

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


def test_a_log_that_is_opened_again_goes_on(tmp_path: Path) -> None:
    RecordLog(tmp_path, HOST).append(WORKLOAD, [record(2e-3)])
    log = RecordLog(tmp_path, HOST)
    log.append('["7","bW9kdWxl"]', [record(3e-3)])
    log.append(WORKLOAD, [record(1e-3)])
    assert [index for index, _ in lines(tmp_path)] == [0, 1, 0]
    assert log.best(HASH) == (record(1e-3), record(2e-3))


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


def test_a_search_starts_from_the_records_in_its_log(
    single: LoweredNetwork, host_target: Target, tmp_path: Path
) -> None:
    (task,) = single.tasks
    candidates = random_candidates(task, host_target, tmp_path)
    log = RecordLog(tmp_path, host_target.export())
    log.append(*log_lines(task.mod, host_target, candidates, [(1e-3 * (4 - n),) for n in range(len(candidates))]))
    database = memory_database(task.mod, log.best(task.info.workload_hash))
    records = database.get_top_k(database.commit_workload(task.mod), 99)
    assert [float(seconds) for record in records for seconds in record.run_secs] == pytest.approx(
        [1e-3, 2e-3, 3e-3, 4e-3]
    )
    assert [str(record.trace) for record in records] == [str(c.sch.trace) for c in reversed(candidates)]


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
