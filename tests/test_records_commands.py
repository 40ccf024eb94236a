"""Databases are looked at, merged, distilled and verified from the command line."""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from helpers.commands import FAST, RunCommand

from ansor_mlflow import names
from ansor_mlflow.commands.databases import distill_records, merge_records, show_records
from ansor_mlflow.commands.verify import Verification, verify_records
from ansor_mlflow.device.device import Device
from ansor_mlflow.errors import MachineError, RecordsError, UserInputError
from ansor_mlflow.lowering.lower import lower
from ansor_mlflow.lowering.network import LoweredNetwork, TuningTask
from ansor_mlflow.networks.load import load_network
from ansor_mlflow.parameters import (
    DistillRecordsOptions,
    MergeRecordsOptions,
    ShowRecordsOptions,
    TuneOptions,
    VerifyRecordsOptions,
    load_options,
)
from ansor_mlflow.records.store import RECORD_FILE, WORKLOAD_FILE, RecordPair
from ansor_mlflow.steps.tuning.tune import tune
from ansor_mlflow.tuning.candidates import log_lines
from ansor_mlflow.tuning.replay import Replayer

if TYPE_CHECKING:
    from tvm.s_tir import Schedule
    from tvm.target import Target

OTHER_TARGET = {"kind": "llvm", "mcpu": "apple-m1", "num-cores": 4}


def read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_lines(path: Path, values: list[Any]) -> None:
    path.write_text("".join(f"{json.dumps(value)}\n" for value in values))


def timed(record: Any, seconds: float, target: dict[str, Any] | None = None) -> Any:
    """The record's schedule with another time, and perhaps for another target."""
    index, (trace, _, own_target, args_info) = record
    return [index, [trace, [seconds], target or own_target, args_info]]


@pytest.fixture
def records(tuned_records: Path, tmp_path: Path) -> Path:
    return Path(
        shutil.copytree(tuned_records, tmp_path / "records", ignore=shutil.ignore_patterns("best", "*.lock", ".*"))
    )


@pytest.fixture
def made_up(tmp_path: Path) -> Path:
    """A database of two workloads: for one target three records, one of which failed, for another a faster one."""
    pair = RecordPair.in_directory(tmp_path / "made_up")
    pair.records.parent.mkdir()
    write_lines(pair.workloads, [["291", "b25l"], ["1110", "dHdv"]])
    here = {"kind": "llvm", "mcpu": "znver4", "num-cores": 2}
    records: list[Any] = [[0, [[], [0.003], here, []]], [0, [[], [1e10], here, []]], [0, [[], [0.001], here, []]]]
    write_lines(pair.records, [*records, [1, [[], [0.002], here, []]], [0, [[], [1e-4], OTHER_TARGET, []]]])
    return pair.records.parent


def test_records_are_counted_by_target_and_workload(made_up: Path) -> None:
    summary = show_records(ShowRecordsOptions(source=str(made_up)))
    assert (summary.num_workloads, summary.num_records) == (2, 5)
    here, there = summary.targets
    assert (here.name, here.num_records) == ("llvm znver4 ×2", 4)
    np.testing.assert_allclose([here.best_s, here.median_s], [0.003, 0.004])
    assert [(w.hash, w.num_records, w.num_failed) for w in here.workloads] == [
        ("0x0000000000000123", 3, 1),
        ("0x0000000000000456", 1, 0),
    ]
    assert (there.name, there.num_records, there.best_s) == ("llvm apple-m1 ×4", 1, 1e-4)
    assert summary.damaged_records == summary.damaged_workloads == ()


def test_a_directory_means_all_trials_unless_it_has_only_winners(records: Path) -> None:
    lines = read_lines(records / RECORD_FILE)
    shutil.copytree(records, records / "best")
    write_lines(records / "best" / RECORD_FILE, lines[:1])
    assert show_records(ShowRecordsOptions(source=str(records))).num_records == len(lines)
    assert show_records(ShowRecordsOptions(source=str(records / "best"))).num_records == 1
    (records / RECORD_FILE).unlink()
    assert show_records(ShowRecordsOptions(source=str(records))).num_records == 1


def test_a_workload_whose_trials_all_failed_has_no_time(made_up: Path) -> None:
    write_lines(made_up / RECORD_FILE, [timed(read_lines(made_up / RECORD_FILE)[0], 1e10)])
    ((workload,),) = (target.workloads for target in show_records(ShowRecordsOptions(source=str(made_up))).targets)
    assert (workload.num_failed, workload.best_s, workload.median_s) == (1, None, None)


def test_the_table(run_here: RunCommand, made_up: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = made_up.with_name("summary.json")
    assert run_here("records", "show", str(made_up), "--json", str(path)) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line]
    assert " ".join(lines[0]).endswith(f"{RECORD_FILE}: 5 records of 2 workloads")
    assert " ".join(lines[1]) == (
        "llvm znver4 ×2: 2 workloads, 4 records, 1 failed; best 3 ms, median 4 ms for one call of each"
    )
    assert lines[3] == ["0x0000000000000123", "3", "1", "1000.0", "2000.0"]
    assert lines[4] == ["0x0000000000000456", "1", "0", "2000.0", "2000.0"]
    written = json.loads(path.read_text())
    assert [target["name"] for target in written["targets"]] == ["llvm znver4 ×2", "llvm apple-m1 ×4"]


def test_records_of_several_sources_are_written_once(made_up: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(made_up, tmp_path / "copy"))
    write_lines(copy / RECORD_FILE, [*read_lines(copy / RECORD_FILE)[:2], [1, [[1], [0.5], OTHER_TARGET, []]]])
    written = merge_records(MergeRecordsOptions(sources=(str(made_up), str(copy)), output=str(tmp_path / "new")))
    assert written.num_records == 6
    assert show_records(ShowRecordsOptions(source=str(tmp_path / "new"))).num_records == 6


def test_a_merged_database_says_what_it_is_made_from(made_up: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(made_up, tmp_path / "other"))
    for directory, network in ((made_up, "a"), (other, "b")):
        (directory / names.FINGERPRINT_FILE).write_text('{"machine": "x86_64"}')
        (directory / names.PROVENANCE_FILE).write_text(json.dumps({"network": network}))
    output = tmp_path / "new"
    merge_records(MergeRecordsOptions(sources=(str(made_up), str(other)), output=str(output)))
    assert json.loads((output / names.SOURCES_FILE).read_text())["sources"] == [str(made_up), str(other)]
    assert (output / names.FINGERPRINT_FILE).read_text() == '{"machine": "x86_64"}'
    assert not (output / names.PROVENANCE_FILE).exists()
    distill_records(DistillRecordsOptions(sources=(str(other),), output=str(output)))
    assert json.loads((output / names.PROVENANCE_FILE).read_text()) == {"network": "b"}


def test_an_output_that_cannot_be_replaced_at_once(
    made_up: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(UserInputError, match=r"output=\.: it is the current directory .*; give a directory in it"):
        merge_records(MergeRecordsOptions(sources=(str(made_up),), output="."))
    assert merge_records(MergeRecordsOptions(sources=(str(made_up),), output="new")).num_records == 5


@pytest.mark.parametrize(
    "what",
    ["a file", "a file of our name", "a file beside our database", "a database of TVM", "records that came later"],
)
def test_an_output_of_the_users_is_left_alone(made_up: Path, tmp_path: Path, what: str) -> None:
    output = tmp_path / "new"
    if what.startswith("a file"):
        if what == "a file beside our database":
            merge_records(MergeRecordsOptions(sources=(str(made_up),), output=str(output)))
        output.mkdir(exist_ok=True)
        (output / (names.PROVENANCE_FILE if what == "a file of our name" else "notes.txt")).write_text("mine")
    elif what == "a database of TVM":
        shutil.copytree(made_up, output)
    else:
        merge_records(MergeRecordsOptions(sources=(str(made_up),), output=str(output)))
        with (output / RECORD_FILE).open("a") as file:
            file.write(json.dumps([1, [[], [0.5], OTHER_TARGET, []]]) + "\n")
    before = {path.name: path.read_bytes() for path in output.iterdir()}
    with pytest.raises(UserInputError, match=r"output=.*new: the directory holds something else than a database as"):
        merge_records(MergeRecordsOptions(sources=(str(made_up),), output=str(output)))
    assert {path.name: path.read_bytes() for path in output.iterdir()} == before


@pytest.mark.parametrize("below", ["", "best", "records"])
def test_a_source_is_never_written_to(made_up: Path, tmp_path: Path, below: str) -> None:
    ours = tmp_path / "ours"
    merge_records(MergeRecordsOptions(sources=(str(made_up),), output=str(ours)))
    with pytest.raises(UserInputError, match=r"that is where records are read from; give another directory"):
        merge_records(MergeRecordsOptions(sources=(str(ours), str(made_up)), output=str(ours / below)))


def test_an_output_that_cannot_be_written(made_up: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserInputError, match=r"output=.*file: it is a file; give a directory"):
        merge_records(MergeRecordsOptions(sources=(str(made_up),), output=str(tmp_path / "file")))
    with pytest.raises(UserInputError, match=r"output=.*below: it cannot be written \(File exists\)"):
        merge_records(MergeRecordsOptions(sources=(str(made_up),), output=str(tmp_path / "file" / "below")))


def distilled(source: Path, **options: Any) -> list[tuple[int, float, str]]:
    """Index of the workload, time and CPU of the records that are kept."""
    output = source.with_name("distilled")
    distill_records(DistillRecordsOptions(sources=(str(source),), output=str(output), **options))
    return [(index, run_s[0], target["mcpu"]) for index, (_, run_s, target, _) in read_lines(output / RECORD_FILE)]


def test_the_fastest_of_each_workload_and_target_are_kept(made_up: Path) -> None:
    assert distilled(made_up) == [(0, 0.001, "znver4"), (0, 1e-4, "apple-m1"), (1, 0.002, "znver4")]
    assert distilled(made_up, keep=2) == [
        (0, 0.001, "znver4"),
        (0, 0.003, "znver4"),
        (0, 1e-4, "apple-m1"),
        (1, 0.002, "znver4"),
    ]


@pytest.mark.parametrize(
    ("target", "cpus"),
    [
        ("llvm -mcpu=apple-m1", ["apple-m1"]),
        ("llvm -mcpu=znver4 -num-cores 2", ["znver4", "znver4"]),
        ('{"num-cores": 4, "keys": ["cpu"], "tag": ""}', ["apple-m1"]),
        ("llvm", ["znver4", "apple-m1", "znver4"]),
    ],
)
def test_a_target_is_given_by_some_of_its_attributes(made_up: Path, target: str, cpus: list[str]) -> None:
    assert [cpu for *_, cpu in distilled(made_up, target=target)] == cpus


def test_a_target_without_records(made_up: Path) -> None:
    with pytest.raises(
        RecordsError, match=r"target='llvm -mcpu=znver5': there are no records for it; `ansor-mlflow re"
    ):
        distilled(made_up, target="llvm -mcpu=znver5")
    assert not made_up.with_name("distilled").exists()


def test_an_empty_file_has_no_records(made_up: Path, tmp_path: Path) -> None:
    (made_up / RECORD_FILE).write_text("")
    assert show_records(ShowRecordsOptions(source=str(made_up))).num_records == 0
    with pytest.raises(RecordsError, match=r"there is no record in .*made_up; tune first"):
        merge_records(MergeRecordsOptions(sources=(str(made_up),), output=str(tmp_path / "new")))
    assert not (tmp_path / "new").exists()


ANSOR_LOG = '{"i": [["[\\"abc\\"]", "llvm"], [[], []]], "r": [[0.0001], 0, 1.0, 1], "v": "v0.6"}\n'


@pytest.mark.parametrize("verb", ["show", "merge", "distill", "verify"])
@pytest.mark.parametrize("kind", ["another tool's", "compressed"])
def test_a_file_of_another_kind(
    run_here: RunCommand, made_up: Path, tmp_path: Path, verb: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = made_up / RECORD_FILE
    path.write_bytes(ANSOR_LOG.encode() if kind == "another tool's" else gzip.compress(path.read_bytes()))
    before = path.read_bytes()
    more = {"merge": ["--output", str(tmp_path / "new")], "verify": ["--repair"]}
    more["distill"] = more["merge"]
    assert run_here("records", verb, str(made_up), *more.get(verb, [])) == 5
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("Error: ")]
    assert re.search(r"line 1 is not a tuning record of TVM, and no other line is; give the file that TVM wrote", line)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["show"], "source='': it must be the ID of a tuning run"),
        (["show", "missing"], "source='missing' is neither a run's ID"),
        (["merge", "--output", "new"], "sources='': it must be one source of records at least"),
        (["distill", "missing", "--output", "new", "--keep", "0"], "keep='0': it must be a whole number of at least 1"),
        (["verify", "runs:/x/records", "--repair"], "source=runs:/x/records: only a directory or a file on this machi"),
        (["shw"], "No such command 'shw'"),
    ],
)
def test_bad_input_is_one_line(
    run_here: RunCommand, args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here("records", *args) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("Error: ")]
    assert message in line


@pytest.mark.nightly
def test_tvm_is_not_needed_to_look_merge_and_distill(made_up: Path, tmp_path: Path) -> None:
    code = (
        "import sys\nfrom ansor_mlflow.cli.main import cli\n"
        f"source, out = {str(made_up)!r}, {str(tmp_path)!r}\n"
        "for args in (['show', source], ['merge', source, '--output', out + '/a'],\n"
        "             ['distill', source, '--output', out + '/b', '--target', 'llvm -mcpu=znver4']):\n"
        "    cli.main(['records', *args], standalone_mode=False)\n"
        "print('tvm' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "False"


def verified(source: Path, network: Path, **options: Any) -> Verification:
    return verify_records(VerifyRecordsOptions(source=str(source), network=str(network), **options))


def add_schedule(
    records: Path, task: TuningTask, target: Target, change: Callable[[Schedule], None], run_s: float = 1e-9
) -> None:
    """Adds a record of the task whose schedule is what `change` does."""
    from tvm.s_tir import Schedule
    from tvm.s_tir.meta_schedule.arg_info import ArgInfo
    from tvm.s_tir.meta_schedule.search_strategy import MeasureCandidate

    schedule = Schedule(task.mod)
    change(schedule)
    candidate = MeasureCandidate(schedule, ArgInfo.from_entry_func(task.mod))
    _, (record,) = log_lines(task.mod, target, [candidate], [[run_s]])
    hashes = [f"{int(hash_):#018x}" for hash_, _ in read_lines(records / WORKLOAD_FILE)]
    with (records / RECORD_FILE).open("a") as file:
        file.write(record.line(hashes.index(task.info.workload_hash)) + "\n")


@pytest.fixture(scope="session")
def conv(small_lowered: LoweredNetwork) -> TuningTask:
    (task,) = [task for task in small_lowered.tasks if "conv" in task.info.name]
    return task


@pytest.mark.nightly
def test_tuned_tasks_compute_what_the_untuned_ones_do(
    tuned_records: Path, small_onnx: Path, small_lowered: LoweredNetwork
) -> None:
    """The winners come first."""
    seen: list[str] = []
    options = VerifyRecordsOptions(source=str(tuned_records), network=str(small_onnx), keep="all")
    verification = verify_records(options, lambda record: seen.append(record.task))
    verification.require_pass()
    assert {record.status for record in verification.records} == {"pass"}
    assert seen == [record.task for record in verification.records]
    assert list(dict.fromkeys(seen)) == [task.info.name for task in small_lowered.tasks]
    firsts = {record.task: record.file for record in reversed(verification.records)}
    assert set(firsts.values()) == {f"best/{RECORD_FILE}"}
    num_schedules = len({(index, json.dumps(f[0])) for index, f in read_lines(tuned_records / RECORD_FILE)})
    assert len(verification.records) == num_schedules > len(firsts)
    assert verification.notes == ()


@pytest.mark.system
def test_what_does_not_hold_is_told_apart(
    run_here: RunCommand,
    records: Path,
    small_onnx: Path,
    conv: TuningTask,
    host_target: Target,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each schedule here is one that TVM takes, except for the block that the task does not have."""

    def share_elements(schedule: Schedule) -> None:
        """Lets two elements of the result have one place, which TVM takes, and is wrong."""
        index_map = lambda n, y, x, c: [n, y, x, c // 2]  # noqa: E731 - TVM counts its parameters
        schedule.transform_layout("conv2d_nhwc", ("write", 0), index_map, assume_injective_transform=True)

    def exhaust_memory(schedule: Schedule) -> None:
        index_map = lambda n, y, x, c: [n, y, x, c * 10**8]  # noqa: E731
        schedule.transform_layout("conv2d_nhwc", ("write", 0), index_map, assume_injective_transform=True)

    for order, change in enumerate((share_elements, exhaust_memory, share_elements), start=1):
        add_schedule(records, conv, host_target, change, run_s=order * 1e-9)
    *lines, unfit = read_lines(records / RECORD_FILE)
    unfit = json.loads(json.dumps(unfit).replace("conv2d_nhwc", "no_such_block"))
    write_lines(records / RECORD_FILE, [*lines, unfit])
    path = records / "verification.json"
    args = ("records", "verify", str(records), "--network", str(small_onnx), "--keep", "4", "--json", str(path))
    assert run_here(*args) == 5
    verified = json.loads(path.read_text())["records"]
    found = {record["line"]: record for record in verified if record["task"] == conv.info.name}
    shared, exhausted, unapplied = (found[len(lines) - 1 + step] for step in range(3))
    assert shared["status"] == "wrong_answer"
    assert shared["max_rel_error"] > 1e-2
    assert re.fullmatch(r"max_rel_error=[\d.]+, allowed is 0\.0001", shared["error"])
    assert exhausted["status"] == "crashed"
    assert unapplied["status"] == "failed"
    assert unapplied["error"].startswith("ScheduleError: ")
    captured = capsys.readouterr()
    *_, wrong = (line for line in captured.out.splitlines() if line.startswith("wrong answer "))
    assert conv.info.name in wrong
    assert f"{len(verified) - 3} pass" in captured.out.splitlines()[-1]
    message = rf"3 of {len(verified)} records do not pass, the first is line \d+ of {RECORD_FILE}; do not"
    assert re.search(message, captured.err)


@pytest.mark.nightly
def test_a_schedule_that_takes_too_long(records: Path, small_onnx: Path, conv: TuningTask, host_target: Target) -> None:
    """Unrolled as a whole, the convolution keeps the compiler busy for minutes."""

    def unroll_all(schedule: Schedule) -> None:
        for loop in schedule.get_loops("conv2d_nhwc"):
            schedule.unroll(loop)

    add_schedule(records, conv, host_target, unroll_all)
    (record,) = [r for r in verified(records, small_onnx, measure_timeout_s=4).records if r.task == conv.info.name]
    assert (record.status, record.error) == ("timed_out", "killed after 4 s")


def test_a_kernel_that_cannot_be_compared_is_no_records_fault(host_target: Target) -> None:
    """Two billion operations, one after the other."""
    (task,) = lower(load_network("dense:1024,1024,1024").model, host_target).tasks
    message = r"the kernel before any schedule, which records are compared with, does not run \(killed after 0.2 s\)"
    replayer = Replayer(Device.of(host_target, 1), seed=0, timeout_s=0.2)
    with contextlib.closing(replayer), pytest.raises(MachineError, match=message):
        replayer.replay(task, "[[], []]")


def test_records_for_another_target_are_counted(records: Path, small_onnx: Path) -> None:
    lines = read_lines(records / RECORD_FILE)
    foreign = [timed(line, 1e-9, OTHER_TARGET) for line in lines]
    mine = [line for line in lines if line[0] == 0]
    write_lines(records / RECORD_FILE, [*mine, *foreign])
    verification = verified(records, small_onnx)
    assert len(verification.records) == 1
    assert verification.num_of_other_targets == {"llvm apple-m1 ×4": len(foreign)}
    assert verification.notes[0] == f"{len(foreign)} records for llvm apple-m1 ×4 were not run."
    assert verification.notes[1].endswith("tasks have no record.")
    write_lines(records / RECORD_FILE, foreign)
    with pytest.raises(
        RecordsError, match=rf"nothing was verified: there are {len(foreign)} records for llvm apple-m1"
    ):
        verified(records, small_onnx)


def test_records_of_another_network(tuned_records: Path) -> None:
    with pytest.raises(
        RecordsError, match=r"nothing was verified: the records fit none of the \d tasks of dense:8,64,32"
    ):
        verify_records(VerifyRecordsOptions(source=str(tuned_records), network="dense:8,64,32"))


@pytest.mark.system
def test_repair_sets_damage_aside_and_verifies_the_rest(
    run_here: RunCommand,
    records: Path,
    small_onnx: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole = (records / RECORD_FILE).read_bytes()
    first, *_ = whole.splitlines(keepends=True)
    inside = first[:200] + b"\x00" + first[201:]
    (records / RECORD_FILE).write_bytes(whole + inside + b"[0, [[")
    args = ("records", "verify", str(records), "--network", str(small_onnx))
    assert run_here(*args) == 0
    number = whole.count(b"\n") + 1
    assert f"{RECORD_FILE}: lines {number}, {number + 1} are damaged; what is whole is used" in caplog.text
    assert (records / RECORD_FILE).read_bytes() == whole + inside + b"[0, [["
    assert run_here(*args, "--repair") == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(" pass")
    assert (records / RECORD_FILE).read_bytes() == whole
    aside = (records / f"{RECORD_FILE}.quarantine").read_bytes().splitlines(keepends=True)
    assert sorted(aside) == sorted([inside, b"[0, [[\n"])
    assert not list(records.parent.glob("*.tuner.json"))


@pytest.mark.nightly
def test_a_run_is_a_source_and_knows_its_network(
    run_here: RunCommand,
    experiment_id: str,
    small_onnx: Path,
    made_up: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", experiment_id)
    monkeypatch.chdir(tmp_path)
    parameters = {**FAST, "network": str(small_onnx), "num_threads": "1", "trials": "6", "cost_model": "none"}
    run_id = tune(load_options(TuneOptions, parameters)).run_id
    capsys.readouterr()
    assert run_here("records", "show", run_id, "--json", "-") == 0
    summary = json.loads(capsys.readouterr().out)
    num_records = sum(w["num_records"] for target in summary["targets"] for w in target["workloads"])
    assert run_here("records", "merge", run_id, f"runs:/{run_id}/records", str(made_up), "--output", "new") == 0
    assert capsys.readouterr().out == f"{num_records + 5} records are in {tmp_path / 'new'}\n"
    assert run_here("records", "verify", run_id) == 0
    *_, total = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"\d records of small for llvm \S+ ×1: \d pass", total)
