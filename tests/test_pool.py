"""A record pool: objects that are named by their content, which anyone may add and nobody changes."""

from __future__ import annotations

import gzip
import json
import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.commands import RunCommand, flags
from helpers.runs_here import QUICK, newest_run, tune_here
from helpers.servers import S3Server, free_port, s3_server
from hypothesis import given
from hypothesis import strategies as st

from ansor_mlflow import names
from ansor_mlflow.device.fingerprints import DeviceFingerprint
from ansor_mlflow.records.transfer.pool_objects import ObjectName, PoolObject, write_objects
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
    pool.push(DEVICE, [first, second])
    pool.push(DEVICE, [third])
    pool.push(DEVICE, [first])  # again
    assert contents(pool) == [first, second, third]
    assert contents(pool, [f"{2:#018x}", f"{3:#018x}"]) == [second]
    (device,) = pool.devices()
    assert (device.fingerprint, device.num_kernels, device.num_objects) == (DEVICE, 2, 3)


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
def test_a_network_that_was_tuned_before_needs_no_trial(project: Path, s3_uri: str, run_here: RunCommand) -> None:
    first = tune_here(run_here, record_pool=s3_uri)
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
    again = tune_here(run_here, record_pool=s3_uri, trials=20)
    assert again.data.metrics[names.TRIALS_MEASURED] == 0
    assert not (project / ".ansor").exists()


@pytest.mark.system
def test_what_runs_measured_is_pushed_listed_and_pulled(
    project: Path, s3_uri: str, run_here: RunCommand, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [tune_here(run_here, seed=seed).info.run_id for seed in (0, 1)]
    capsys.readouterr()
    assert run_here("pool", "list", s3_uri) == 0
    assert capsys.readouterr().out == "the pool is empty\n"
    assert run_here("pool", "push", s3_uri, *runs) == 0
    pushed = capsys.readouterr().out
    assert re.fullmatch(r"24 records of \d+ workloads are in the pool\n", pushed)
    assert run_here("pool", "list", s3_uri, "--json", "-") == 0
    (device,) = json.loads(capsys.readouterr().out)["devices"]
    assert device["fingerprint"]["target"]["kind"] == "llvm"
    assert device["num_objects"] == 2 * device["num_kernels"]
    assert run_here("pool", "list", s3_uri) == 0
    assert re.search(rf"llvm \S+ ×\d+ .* {device['num_kernels']} +{device['num_objects']}", capsys.readouterr().out)
    assert run_here("pool", "pull", s3_uri, "--output", "mine") == 0
    assert re.fullmatch(r"2\d records of \d+ workloads are in mine\n", capsys.readouterr().out)
    assert run_here("compile", "--network", "small.onnx", "--records", "mine") == 0
    assert newest_run().data.metrics[names.COVERAGE_TASKS] == 1
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
        (["pull", "pool"], "output='': it must be the path of a directory"),
    ],
)
def test_bad_input(
    project: Path, run_here: RunCommand, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
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
