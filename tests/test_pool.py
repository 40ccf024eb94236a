"""A record pool: objects that are named by their content, which anyone may add and nobody changes."""

from __future__ import annotations

import gzip
import json
import logging
import re
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.commands import RunCommand, flags
from helpers.runs_here import QUICK, newest_run, tune_here
from helpers.servers import S3Server, free_port, s3_server
from hypothesis import given
from hypothesis import strategies as st

from ansor_mlflow import names
from ansor_mlflow.device.fingerprints import DeviceFingerprint
from ansor_mlflow.options import DistillRecordsOptions, MergeRecordsOptions, PushPoolOptions
from ansor_mlflow.records.transfer.pool_objects import ObjectName, PoolObject, what_is_new, write_objects
from ansor_mlflow.steps.records.databases import distill_records, merge_records
from ansor_mlflow.steps.records.sharing import known_workloads, push_records
from ansor_mlflow.tracking.record_pool import RecordPool

DEVICE = DeviceFingerprint(
    target={"kind": "llvm", "mcpu": "znver4", "num-cores": 2},
    machine="x86_64",
    cpu_model="AMD EPYC 9354",
    features=("avx2",),
    num_threads=2,
)
TARGET = json.dumps(DEVICE.target)


def workload(hash_: int) -> str:
    return json.dumps([str(hash_), "bW9kdWxl"])


def record(number: int, run_s: float = 1e-3) -> str:
    return f"[[{number}], [{run_s}], {TARGET}, []]"


def found(hash_: int, *numbers: int, winner: str = "") -> PoolObject:
    return PoolObject(
        workload=workload(hash_), records=tuple(map(record, numbers)), winner=winner, trials_per_task=16.0
    )


# -- objects -----------------------------------------------------------------------------------------------------------

TEXT = st.text()
OBJECTS = st.builds(
    PoolObject,
    workload=st.builds(workload, st.integers(0, 2**63)),
    records=st.lists(TEXT.map(json.dumps)).map(tuple),
    winner=st.one_of(st.just(""), TEXT.map(json.dumps)),
    trials_per_task=st.floats(0, 1e6),
)


@given(OBJECTS)
def test_an_object_is_read_as_it_was_packed(object_: PoolObject) -> None:
    packed = object_.pack()
    assert PoolObject.unpack(packed) == object_
    name = ObjectName.of(packed, object_.workload)
    assert name.is_of(packed)
    assert ObjectName.parse(str(name)) == name
    assert PoolObject.unpack(packed).pack() == packed


@given(OBJECTS, st.data())
def test_every_flipped_bit_is_noticed(object_: PoolObject, data: st.DataObject) -> None:
    packed = object_.pack()
    name = ObjectName.of(packed, object_.workload)
    content = bytearray(packed)
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert not name.is_of(bytes(content))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"text",
        gzip.compress(b""),
        gzip.compress(b"{}\n[]\n"),
        gzip.compress(b'{"format_version": 2, "has_winner": false, "trials_per_task": 1}\n["1", "x"]\n'),
        gzip.compress(b'{"format_version": 1, "has_winner": true, "trials_per_task": 1}\n["1", "x"]\n'),
        gzip.compress(b'{"format_version": 1, "has_winner": false, "trials_per_task": 1}\n["1", "x"]\n')[:-4],
        gzip.compress(b"\xff\xfe"),
    ],
    ids=["empty", "text", "nothing", "other JSON", "another version", "no winner", "cut short", "no text"],
)
def test_what_is_no_object(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"it is no object of a pool \(\w+\)|it has format version 2"):
        PoolObject.unpack(content)


@pytest.mark.parametrize("name", ["", "fingerprint.json", "0x1-2.jsonl.gz", "../0x0000000000000001-" + "0" * 32])
def test_other_files_have_other_names(name: str) -> None:
    assert ObjectName.parse(name) is None


def test_objects_become_a_database_in_which_each_record_is_once(tmp_path: Path) -> None:
    write_objects([found(1, 1, 2), found(2, 3), found(1, 2, 4, winner=record(9, 5e-4))], DEVICE, tmp_path)
    lines = (tmp_path / "database_tuning_record.json").read_text().splitlines()
    assert [json.loads(line)[0] for line in lines] == [0, 0, 0, 1]
    assert [json.loads(line)[1][0] for line in lines] == [[1], [2], [4], [3]]
    (winner,) = (tmp_path / names.BEST_DIR / "database_tuning_record.json").read_text().splitlines()
    assert json.loads(winner)[1][1] == [5e-4]
    assert DeviceFingerprint.from_dict(json.loads((tmp_path / names.FINGERPRINT_FILE).read_text())) == DEVICE


@given(st.lists(st.sets(st.integers(0, 9)), max_size=6))
def test_every_record_is_added_once(pushes: list[set[int]]) -> None:
    there: list[PoolObject] = []
    for numbers in pushes:
        known = {text for one in there for text in one.records}
        new = what_is_new([found(1, *numbers)], there)
        assert {text for one in new for text in one.records} == set(map(record, numbers)) - known
        there += new
    texts = [text for one in there for text in one.records]
    assert len(texts) == len(set(texts))


def test_a_workload_has_records_of_its_own() -> None:
    assert what_is_new([found(2, 1)], [found(1, 1)]) == [found(2, 1)]


def test_a_winner_and_a_longer_search_are_new_without_a_record() -> None:
    there = [found(1, 1, winner=record(1, 2e-3))]
    assert what_is_new(there, there) == []
    assert what_is_new([replace(found(1), records=(record(1, 2e-3),))], there) == []  # as a warm start has it
    assert what_is_new([found(1, 1, winner=record(1, 3e-3))], there) == [found(1, winner=record(1, 3e-3))]
    longer = replace(there[0], trials_per_task=17.0)
    assert what_is_new([longer], there) == [replace(longer, records=(), winner="")]
    assert known_workloads([*there, *what_is_new([longer], there)], 17.0) == {f"{1:#018x}"}


def test_a_search_that_found_nothing_valid_leaves_its_workload_unknown() -> None:
    assert known_workloads([replace(found(1), records=(record(1, 1e10),))], 16.0) == frozenset()


# -- the pool ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3"), "team") as server:
        yield server


@pytest.fixture
def s3_uri(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A new pool in S3."""
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    return f"s3://team/{tmp_path.name}"


@pytest.fixture(params=["directory", "file URI", "s3"])
def pool_uri(request: pytest.FixtureRequest, s3_uri: str, tmp_path: Path) -> str:
    """A new pool."""
    if request.param == "s3":
        return s3_uri
    return str(tmp_path / "pool") if request.param == "directory" else (tmp_path / "pool").as_uri()


def contents(pool: RecordPool, hashes: list[str] | None = None) -> list[PoolObject]:
    return sorted(pool.pull(DEVICE, hashes), key=lambda one: one.records)


def test_what_was_pushed_is_pulled(pool_uri: str) -> None:
    pool = RecordPool(pool_uri)
    assert pool.devices() == pool.pull(DEVICE) == []
    first, second, third = found(1, 1, 2), found(2, 3, winner=record(3)), found(1, 4)
    assert str(pool.push(DEVICE, [first, second])) == (
        "3 records of 2 workloads are added to the pool, 0 were there already"
    )
    assert pool.push(DEVICE, [third]).num_added == 1
    assert str(pool.push(DEVICE, [first])) == "0 records of 0 workloads are added to the pool, 2 were there already"
    assert contents(pool) == [first, second, third]
    assert contents(pool, [f"{2:#018x}", f"{3:#018x}"]) == [second]
    (device,) = pool.devices()
    assert (device.fingerprint, device.num_kernels, device.num_objects) == (DEVICE, 2, 3)


def test_what_came_out_adds_nothing(tmp_path: Path) -> None:
    """Whether it is pushed as it was pulled, merged or distilled; of what joined it only the new is added."""
    pool = RecordPool(str(tmp_path / "pool"))
    pool.push(DEVICE, [found(1, 1, 2, winner=record(9, 5e-4)), found(2, 3)])
    pool.push(DEVICE, [found(1, 4, winner=record(8, 4e-4))])
    before = sorted(tmp_path.glob("pool/*/*"))
    pulled = tmp_path / "pulled"
    write_objects(pool.pull(DEVICE), DEVICE, pulled)
    merge_records(MergeRecordsOptions(sources=(str(pulled),), output=str(tmp_path / "merged")))
    distill_records(DistillRecordsOptions(sources=(str(pulled),), output=str(tmp_path / "distilled")))
    for name in ("pulled", "merged", "distilled"):
        pushed = push_records(PushPoolOptions(pool=str(tmp_path / "pool"), sources=(str(tmp_path / name),)))
        assert (pushed.num_added, pushed.num_workloads) == (0, 0), name
        assert pushed.num_there == {"pulled": 4, "merged": 4, "distilled": 2}[name]
    assert sorted(tmp_path.glob("pool/*/*")) == before

    own = tmp_path / "own"
    write_objects([found(2, 5)], DEVICE, own)
    both = str(tmp_path / "both")
    merge_records(MergeRecordsOptions(sources=(str(pulled), str(own)), output=both))
    pushed = push_records(PushPoolOptions(pool=str(tmp_path / "pool"), sources=(both, str(own))))
    assert (pushed.num_added, pushed.num_there, pushed.num_workloads) == (1, 4, 1)


def test_two_that_push_at_once_leave_each_record_once(tmp_path: Path) -> None:
    """What each says it added is between what only it had, and all that it gave."""
    uri, barrier = str(tmp_path / "pool"), threading.Barrier(2)
    sources = [[found(1, *range(0, 20)), found(2, 1)], [found(1, *range(10, 30)), found(2, 1)]]

    def push(objects: list[PoolObject]) -> int:
        barrier.wait()
        return RecordPool(uri).push(DEVICE, objects).num_added

    with ThreadPoolExecutor(2) as executor:
        added = list(executor.map(push, sources))
    assert 31 <= sum(added) <= 42
    write_objects(RecordPool(uri).pull(DEVICE), DEVICE, tmp_path / "pulled")
    assert len((tmp_path / "pulled" / "database_tuning_record.json").read_text().splitlines()) == 31
    (device,) = RecordPool(uri).devices()
    assert device.num_kernels == 2


def test_nothing_leaves_no_trace(tmp_path: Path) -> None:
    RecordPool(str(tmp_path / "pool")).push(DEVICE, [])
    assert not (tmp_path / "pool").exists()


@pytest.mark.parametrize("damage", [lambda content: content[:-1], lambda _: b"", lambda content: content + b"x"])
def test_a_damaged_object_is_left_out(tmp_path: Path, damage: object, caplog: pytest.LogCaptureFixture) -> None:
    assert callable(damage)
    pool = RecordPool(str(tmp_path))
    pool.push(DEVICE, [found(1, 1), found(2, 2)])
    (path,) = tmp_path.glob(f"{DEVICE.name}/{1:#018x}-*")
    path.write_bytes(damage(path.read_bytes()))
    (path.parent / "notes.txt").write_text("of somebody")
    with caplog.at_level(logging.WARNING, "ansor_mlflow"):
        assert contents(pool) == [found(2, 2)]
    assert f"{path.name} of the record pool {tmp_path} is damaged and left out" in caplog.text
    assert [device.fingerprint for device in pool.devices()] == [DEVICE]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / names.FINGERPRINT_FILE).write_text("[" * 10**5)
    assert [device.fingerprint for device in pool.devices()] == [DEVICE]
    pool.push(DEVICE, [found(1, 1)])  # whoever has it may push it again
    assert contents(pool) == [found(1, 1), found(2, 2)]


# -- commands ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def project(small_onnx: Path, new_experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory to tune in, with a network from a file."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(small_onnx, "small.onnx")
    return tmp_path


@pytest.mark.system
def test_a_network_that_was_tuned_before_needs_no_trial(
    project: Path, s3_uri: str, run_here: RunCommand, caplog: pytest.LogCaptureFixture
) -> None:
    first = tune_here(run_here, record_pool=s3_uri)
    assert re.search(f"{s3_uri}: the record pool has nothing for llvm .* yet; this tuning will be its f", caplog.text)
    assert re.search(r"12 records of \d+ workloads are added to the pool, 0 were there already", caplog.text)
    caplog.clear()
    assert first.data.metrics[names.TRIALS_MEASURED] == 12
    assert first.data.metrics[names.WARM_START_APPLIED] == 0
    second = tune_here(run_here, record_pool=s3_uri)
    assert second.info.status == "FINISHED"
    assert second.data.tags[names.TAG_STOP_REASON] == "known"
    assert second.data.metrics[names.TRIALS_MEASURED] == 0
    assert second.data.metrics[names.BEST_LATENCY_MS] > 0
    assert run_here("compile", "--tune-run", second.info.run_id) == 0
    assert newest_run().data.metrics[names.COVERAGE_TASKS] == 1

    more = tune_here(run_here, record_pool=s3_uri, trials=24, seed=1)
    assert more.data.metrics[names.TRIALS_MEASURED] == 24
    assert more.data.metrics[names.WARM_START_APPLIED] > 0
    assert re.search(r"24 records of \d+ workloads are added to the pool, 0 were there already", caplog.text)
    again = tune_here(run_here, record_pool=s3_uri, trials=20)
    assert again.data.metrics[names.TRIALS_MEASURED] == 0
    assert not (project / ".ansor").exists()

    tune_here(run_here, record_pool=s3_uri, network="dense:4,16,16", trials=2)
    assert f"{s3_uri}: the record pool knows no task of this network yet" in caplog.text


@pytest.mark.system
def test_what_runs_measured_is_pushed_listed_and_pulled(
    project: Path, s3_uri: str, run_here: RunCommand, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [tune_here(run_here, seed=seed).info.run_id for seed in (0, 1)]
    capsys.readouterr()
    assert run_here("pool", "list", s3_uri) == 0
    assert capsys.readouterr().out == "the pool is empty, or not there yet: the first push makes it\n"
    assert run_here("pool", "push", s3_uri, *runs) == 0
    pushed = capsys.readouterr().out
    sums = re.fullmatch(r"(\d+) records of (\d+) workloads are added to the pool, (\d+) were there already\n", pushed)
    assert sums, pushed
    # Of a kernel of 0.1 µs the second run may have measured what the first one's record or winner says: added once.
    assert 12 < int(sums[1]) <= 24 - int(sums[3])
    assert run_here("pool", "list", s3_uri, "--json", "-") == 0
    (device,) = json.loads(capsys.readouterr().out)["devices"]
    assert device["num_kernels"] == int(sums[2])
    assert device["fingerprint"]["target"]["kind"] == "llvm"
    assert device["num_kernels"] < device["num_objects"] <= 2 * device["num_kernels"]
    assert run_here("pool", "list", s3_uri) == 0
    assert re.search(rf"llvm \S+ ×\d+ .* {device['num_kernels']} +{device['num_objects']}", capsys.readouterr().out)
    assert run_here("pool", "pull", s3_uri, "--output", "mine") == 0
    assert capsys.readouterr().out == f"{sums[1]} records of {sums[2]} workloads are in mine\n"
    assert run_here("compile", "--network", "small.onnx", "--records", "mine") == 0
    assert newest_run().data.metrics[names.COVERAGE_TASKS] == 1
    assert run_here("pool", "push", s3_uri, runs[0], "mine") == 0
    pushed = capsys.readouterr().out
    assert re.search(r"\n0 records of 0 workloads are added to the pool, \d+ were there already\n", pushed)
    assert run_here("pool", "pull", s3_uri, "--output", "mine") == 2
    assert "output=mine: there is something already; give a new directory" in capsys.readouterr().err


@pytest.mark.system
def test_only_what_a_run_measured_itself_is_pushed(project: Path, run_here: RunCommand) -> None:
    first = tune_here(run_here).info.run_id
    second = tune_here(run_here, warm_start=first, seed=1).info.run_id
    assert run_here("pool", "push", "pool", second) == 0
    objects = [PoolObject.unpack(path.read_bytes()) for path in (project / "pool").glob("*/*.gz")]
    assert sum(len(one.records) for one in objects) == 12
    assert all(one.winner and one.trials_per_task == pytest.approx(12 / len(objects)) for one in objects)


def test_a_pool_has_nothing_for_another_device(
    project: Path, run_here: RunCommand, capsys: pytest.CaptureFixture[str]
) -> None:
    RecordPool("pool").push(DEVICE, [found(1, 1)])
    assert run_here("pool", "pull", "pool", "--output", "mine") == 5
    assert re.search(
        r"Error: pool: the pool has no records for llvm .*; `ansor-mlflow pool list` shows", stderr(capsys)
    )
    assert not (project / "mine").exists()


def test_records_that_do_not_say_which_device_they_are_for_are_not_pushed(
    project: Path, tuned_records: Path, run_here: RunCommand, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here("pool", "push", "pool", str(tuned_records)) == 5
    assert "fingerprint.json is missing, so nobody knows which device the records are for" in stderr(capsys)
    assert not (project / "pool").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["list"], "pool='': it must be a path or an artifact URI"),
        (["push", "pool"], "sources=.*: it must be one tuning at least"),
        (["push", "pool", "nothing"], "source='nothing' is neither a run's ID .* nor a file or directory of records"),
        (["push", "gopher://pool", "."], "record_pool=gopher://pool: MLflow reads no gopher: URIs; it reads "),
        (["push", "project-file", "."], "record_pool=project-file is a file; give a directory"),
        (["pull", "pool"], "output='': it must be the path of a directory"),
    ],
)
def test_bad_input(
    project: Path, run_here: RunCommand, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    (project / "project-file").touch()
    assert run_here("pool", *arguments) == 2
    assert re.search(f"^Error: {message}", stderr(capsys), re.MULTILINE), stderr


def test_a_pool_that_is_away_ends_the_tuning_before_it_begins(
    project: Path, run_here: RunCommand, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_S3_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "wrong")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    parameters = {**QUICK, "network": "small.onnx", "trials": 12, "record_pool": "s3://team/pool"}
    assert run_here("tune", *flags(parameters)) == 3
    assert "cannot reach the record pool s3://team/pool: the S3 artifact store answered" in stderr(capsys)
    assert newest_run().info.status == "FAILED"


def stderr(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err
