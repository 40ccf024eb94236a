"""Records are found, read without TVM and distilled to the best of this device; damage is named, and set aside."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansor_mlflow import names
from ansor_mlflow.device.device import DeviceFingerprint, fingerprint
from ansor_mlflow.errors import RecordsError, UserInputError
from ansor_mlflow.lowering.network import LoweredNetwork
from ansor_mlflow.records.applicability import Provenance, read_provenance, write_description
from ansor_mlflow.records.damage import Repair, check_records, repair
from ansor_mlflow.records.store import RECORD_FILE, WORKLOAD_FILE, Database, RecordPair, distill, find_records, merge

if TYPE_CHECKING:
    from tvm.s_tir.meta_schedule.database import JSONDatabase
    from tvm.target import Target

Record = Any
"""A record line's JSON value: `[workload index, [trace, run_secs, target, args_info]]`."""


def read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_lines(path: Path, values: list[Any]) -> None:
    path.write_text("".join(f"{json.dumps(value)}\n" for value in values))


def timed(record: Record, *run_secs: float, target: dict[str, Any] | None = None) -> Record:
    """The record's schedule with other times, and perhaps of another device."""
    index, (trace, _, own_target, args_info) = record
    return [index, [trace, list(run_secs), target or own_target, args_info]]


def open_with_tvm(directory: Path) -> JSONDatabase:
    from tvm.s_tir.meta_schedule.database import JSONDatabase

    return JSONDatabase(work_dir=str(directory), allow_missing=False)


@pytest.fixture
def pair(tuned_records: Path, tmp_path: Path) -> RecordPair:
    """A copy of the tuned database."""
    copy = RecordPair.in_directory(tmp_path)
    shutil.copyfile(tuned_records / WORKLOAD_FILE, copy.workloads)
    shutil.copyfile(tuned_records / RECORD_FILE, copy.records)
    return copy


@pytest.fixture
def made_up(tmp_path: Path) -> RecordPair:
    """A pair of one record, for what is decided without a look at the schedule."""
    pair = RecordPair.in_directory(tmp_path)
    write_lines(pair.workloads, [["123", "bW9kdWxl"]])
    write_lines(pair.records, [[0, [[], [1e-3], {"kind": "llvm", "mcpu": "znver4"}, []]]])
    return pair


HERE = {"kind": "llvm", "mcpu": "znver4", "tag": "", "keys": ["cpu"]}


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (".", RECORD_FILE),
        (RECORD_FILE, RECORD_FILE),
        ("run", "run/records/" + RECORD_FILE),
        ("mine_tuning_record.json", "mine_tuning_record.json"),
    ],
    ids=["work directory", "file", "directory with records", "prefix"],
)
def test_records_are_found(tmp_path: Path, given: str, found: str) -> None:
    (tmp_path / "run" / "records").mkdir(parents=True)
    for name in (RECORD_FILE, f"run/records/{RECORD_FILE}", "mine_tuning_record.json"):
        for file in (name, name.replace("tuning_record", "workload")):
            (tmp_path / file).touch()
    pair = find_records(tmp_path / given)
    assert pair.records == tmp_path / found
    assert pair.workloads == tmp_path / found.replace("tuning_record", "workload")


@pytest.mark.parametrize(
    ("given", "found"), [("run", "run/records/best"), ("run/records", "run/records/best"), ("flat", "flat/best")]
)
def test_winners_beside_the_records_are_preferred(tmp_path: Path, given: str, found: str) -> None:
    for directory in ("run/records", "run/records/best", "flat", "flat/best"):
        pair = RecordPair.in_directory(tmp_path / directory)
        pair.records.parent.mkdir(parents=True, exist_ok=True)
        pair.records.touch()
        pair.workloads.touch()
    assert find_records(tmp_path / given) == RecordPair.in_directory(tmp_path / found)
    file = tmp_path / given / RECORD_FILE
    if file.exists():
        assert find_records(file).records == file


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("nowhere", f"records=.*nowhere: no such file or directory; give a directory with {RECORD_FILE}"),
        (".", f"the directory has no {RECORD_FILE}; give TVM's work directory"),
        ("mine_tuning_record.json", r"the workload file mine_workload.json is missing beside mine_tuning_record.json"),
        ("log.json", "the workload file log.json is missing beside log.json"),
    ],
    ids=["nothing", "empty directory", "half a pair", "another file"],
)
def test_records_that_are_not_there(tmp_path: Path, given: str, message: str) -> None:
    for name in ("mine_tuning_record.json", "log.json"):
        (tmp_path / name).touch()
    with pytest.raises(UserInputError, match=message):
        find_records(tmp_path / given)


def test_records_are_ranked_by_their_mean(pair: RecordPair, host_target: Target, tmp_path: Path) -> None:
    first = read_lines(pair.records)[0]
    write_lines(pair.records, [timed(first, 1e-3, 9e-3), timed(first, 4e-3, 4e-3), timed(first, 6e-3)])
    assert distill(pair, tmp_path / "best", fingerprint(host_target, 1).target) == 1
    assert read_lines(tmp_path / "best" / RECORD_FILE)[0][1][1] == [4e-3, 4e-3]


def test_failed_trials_are_left_out(pair: RecordPair, host_target: Target, tmp_path: Path) -> None:
    first, *others = read_lines(pair.records)
    failed = [timed(record, 1e10) if record[0] == first[0] else record for record in (first, *others)]
    write_lines(pair.records, failed)
    distill(pair, tmp_path / "best", fingerprint(host_target, 1).target)
    workloads, kept = read_lines(pair.workloads), read_lines(tmp_path / "best" / WORKLOAD_FILE)
    assert kept == [workloads[index] for index in sorted({record[0] for record in others} - {first[0]})]


def test_nothing_but_failed_trials(pair: RecordPair, host_target: Target, tmp_path: Path) -> None:
    write_lines(pair.records, [timed(record, 1e10) for record in read_lines(pair.records)])
    with pytest.raises(RecordsError, match=f"{RECORD_FILE}: there is no valid record in it; tune first"):
        distill(pair, tmp_path / "best", fingerprint(host_target, 1).target)


@pytest.mark.parametrize("blank", ["\n", "   \n\n"])
def test_blank_lines_are_no_damage(made_up: RecordPair, tmp_path: Path, blank: str) -> None:
    made_up.records.write_text(blank + made_up.records.read_text() + blank)
    assert distill(made_up, tmp_path / "best", HERE) == 1


def test_a_faster_record_of_another_device_is_not_taken(
    pair: RecordPair, small_lowered: LoweredNetwork, host_target: Target, tmp_path: Path
) -> None:
    """TVM takes it: a query ignores its target."""
    here = fingerprint(host_target, 1).target
    elsewhere = {**here, "num-cores": 64}
    records = read_lines(pair.records)
    write_lines(pair.records, [*records, *(timed(record, 2e-9, target=elsewhere) for record in records)])
    best = tmp_path / "best"
    assert distill(pair, best, here) == len(small_lowered.tasks)
    for task in small_lowered.tasks:
        by_tvm, ours = (
            open_with_tvm(directory).query_tuning_record(task.mod, host_target, task.info.name)
            for directory in (tmp_path, best)
        )
        assert int(by_tvm.target.attrs["num-cores"]) == 64
        assert int(ours.target.attrs["num-cores"]) == here["num-cores"]
        assert min(ours.run_secs) > 2e-9


def test_records_of_other_devices_alone(made_up: RecordPair, tmp_path: Path) -> None:
    foreign = [
        {"kind": "llvm", "mcpu": "znver4", "num-cores": 64},
        {"kind": "llvm", "mcpu": "znver4", "opt-level": 2},
        {"kind": "cuda", "arch": "sm_90"},
    ]
    (record,) = read_lines(made_up.records)
    write_lines(made_up.records, [timed(record, 1e-3, target=target) for target in (*foreign, *foreign)])
    message = r"the records are for llvm znver4 ×64, llvm znver4 -O2, cuda sm_90, this is llvm znver4; tune on this"
    with pytest.raises(RecordsError, match=message):
        distill(made_up, tmp_path / "best", HERE)


@pytest.mark.parametrize(
    "decoration", [{"tag": "my/tag"}, {"keys": ["cpu", "x"]}, {"libs": []}, {"mtriple": ""}, {"opt-level": 3}]
)
def test_what_does_not_change_code_does_not_change_the_device(
    made_up: RecordPair, tmp_path: Path, decoration: dict[str, Any]
) -> None:
    (record,) = read_lines(made_up.records)
    write_lines(made_up.records, [timed(record, 1e-3, target={**record[1][2], **decoration})])
    assert distill(made_up, tmp_path / "best", HERE) == 1


def copy_of(pair: RecordPair, directory: Path, keep: Callable[[Record], bool] = lambda record: True) -> RecordPair:
    """A database with the workloads in the opposite order and some of the records."""
    directory.mkdir()
    copy = RecordPair.in_directory(directory)
    workloads = pair.workloads.read_text().splitlines()
    copy.workloads.write_text("".join(f"{line}\n" for line in reversed(workloads)))
    with copy.records.open("w") as file:
        for line in pair.records.read_text().splitlines():
            index = int(line[1 : line.index(",")])
            if keep(json.loads(line)):
                file.write(f"[{len(workloads) - 1 - index}{line[line.index(',') :]}\n")
    return copy


def named(directory: Path) -> list[tuple[str, str]]:
    """Hash of the workload and text of every record, sorted."""
    workloads = read_lines(directory / WORKLOAD_FILE)
    return sorted((workloads[index][0], json.dumps(rest)) for index, rest in read_lines(directory / RECORD_FILE))


def test_databases_are_merged_whatever_their_workloads_numbers_are(pair: RecordPair, tmp_path: Path) -> None:
    halves = [copy_of(pair, tmp_path / f"{n}", lambda record, n=n: record[0] % 2 == n) for n in (0, 1)]
    num_records = merge([Database(half) for half in halves], tmp_path / "merged")
    assert named(tmp_path / "merged") == named(tmp_path)
    assert num_records == len(read_lines(pair.records))


def torn(line: str) -> str:
    return line[: len(line) // 2]


@pytest.mark.parametrize(
    "damage",
    [
        torn,
        lambda line: "<html>not found</html>",
        lambda line: '[0, [[], "fast", {}, []]]',
        lambda line: '[0, [[], [0.001], "llvm", []]]',
        lambda line: "[99, [[], [0.001], {}, []]]",
    ],
    ids=["torn", "html", "times are text", "target is text", "no such workload"],
)
def test_a_damaged_line_is_left_out_and_named(
    made_up: RecordPair, tmp_path: Path, damage: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    line = made_up.records.read_text()
    made_up.records.write_text(f"{line}\n{damage(line.strip())}\n{line}")
    assert distill(made_up, tmp_path / "best", HERE) == 1
    check_records(made_up.records)
    mend = f"`ansor-mlflow records verify {made_up.records} --repair` mends it"
    assert f"{made_up.records}: line 3 is damaged; what is whole is used; {mend}" in caplog.text


def test_damage_inside_a_schedule_is_found_before_it_is_taken(
    pair: RecordPair, host_target: Target, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the other lines only the ends are looked at."""
    lines = pair.records.read_bytes().splitlines(keepends=True)
    same = [line for line in lines if line.startswith(b"[0,")]
    fastest = min(same, key=lambda line: fmean(json.loads(line)[1][1]))
    broken = bytearray(fastest)
    broken[len(broken) // 3] = 0
    pair.records.write_bytes(b"".join(bytes(broken) if line == fastest else line for line in lines))
    distill(pair, tmp_path / "best", fingerprint(host_target, 1).target)
    (kept,) = (line for line in read_lines(tmp_path / "best" / RECORD_FILE) if line[0] == 0)
    assert len(same) > 1
    assert kept in [json.loads(line) for line in same if line != fastest]
    check_records(pair.records)
    assert f"{pair.records}: line {lines.index(fastest) + 1} is damaged" in caplog.text


@pytest.mark.parametrize("ends", [b"\r\n", b" \n"])
def test_lines_may_end_otherwise(pair: RecordPair, host_target: Target, tmp_path: Path, ends: bytes) -> None:
    here = fingerprint(host_target, 1).target
    distill(pair, tmp_path / "best", here)
    for path in (pair.workloads, pair.records):
        path.write_bytes(path.read_bytes().replace(b"\n", ends))
    distill(pair, tmp_path / "again", here)
    for name in (WORKLOAD_FILE, RECORD_FILE):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "best" / name).read_bytes()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.floats() | st.text(max_size=3),
    lambda values: st.lists(values, max_size=4) | st.dictionaries(st.text(max_size=3), values, max_size=2),
)


run_secs_values = st.lists(st.floats() | st.integers(), max_size=3) | json_values


@given(line=json_values | st.tuples(st.integers() | json_values, st.tuples(json_values, run_secs_values, json_values)))
def test_whatever_a_line_holds_it_is_no_record_of_this_device(
    tmp_path_factory: pytest.TempPathFactory, line: Any
) -> None:
    pair = RecordPair.in_directory(tmp_path_factory.mktemp("pair"))
    write_lines(pair.workloads, [["123", "bW9kdWxl"]])
    write_lines(pair.records, [line])
    with pytest.raises(RecordsError, match=RECORD_FILE):
        distill(pair, pair.records.with_name("best"), HERE)


def test_compressed_workloads_are_damage(made_up: RecordPair, tmp_path: Path) -> None:
    made_up.workloads.write_bytes(gzip.compress(made_up.workloads.read_bytes()))
    message = f"{WORKLOAD_FILE}: this is not a workload file of TVM, but perhaps a compressed one"
    with pytest.raises(RecordsError, match=message):
        distill(made_up, tmp_path / "best", HERE)


PROVENANCE = Provenance(
    network="nets/small.onnx",
    from_file=True,
    network_sha256="0" * 64,
    batch_size=1,
    input_shapes={"data": [1, 3, 16, 16]},
    seed=3,
    layout="NHWC",
    dtype="float32",
    pad_channels="auto",
    target="auto",
    num_threads=2,
    lowering_version=1,
    tvm_version="0.27.0",
    host="build-7",
    measure={"number": 3, "cache_flush": False},
)


@pytest.mark.parametrize("estimated_latency_ms", [None, 1.25])
def test_description_survives_the_disk(tmp_path: Path, host_target: Target, estimated_latency_ms: float | None) -> None:
    device = fingerprint(host_target, 2)
    provenance = replace(PROVENANCE, estimated_latency_ms=estimated_latency_ms)
    write_description(tmp_path, device, provenance)
    assert read_provenance(tmp_path) == provenance
    fields = json.loads((tmp_path / names.FINGERPRINT_FILE).read_text())
    assert DeviceFingerprint.from_dict(fields) == device


@pytest.mark.parametrize("content", [None, b"", b'{"network": ', b"[1]", b'{"network": "x"}', b'{"a": 1}', b"\xff"])
def test_provenance_that_cannot_be_read(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / names.PROVENANCE_FILE).write_bytes(content)
    message = r"provenance.json of the tuning run is missing or damaged \(\w+\); give the records with records=…"
    with pytest.raises(RecordsError, match=message):
        read_provenance(tmp_path)


QUARANTINE = ".quarantine"


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
