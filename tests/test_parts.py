"""Parts of a growing database give its files again, and its manifest notices every change but that its log grows."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansor_mlflow import names
from ansor_mlflow.errors import RecordsError
from ansor_mlflow.records.pieces import PARTS_DIR, PartWriter, changed_files, join_parts, write_manifest
from ansor_mlflow.records.store import JOURNAL_FILE, RECORD_FILE, WORKLOAD_FILE
from ansor_mlflow.tracking.outbox import Message, RecordMirror, whole_records
from ansor_mlflow.trials import TuningPlan, TuningRound

FILES = (WORKLOAD_FILE, RECORD_FILE, JOURNAL_FILE)


def grow(records: Path, number: int) -> None:
    """Appends a round to the files; every second one has a new workload."""
    records.mkdir(exist_ok=True)
    for name in FILES if number % 2 else FILES[1:]:
        with (records / name).open("a") as file:
            file.write(f"{name} of round {number}\n")


def contents(records: Path) -> list[bytes]:
    return [(records / name).read_bytes() for name in FILES]


@pytest.fixture
def records(tmp_path: Path) -> Path:
    writer = PartWriter(tmp_path / "records", tmp_path / "mirror" / PARTS_DIR)
    for number in range(1, 6):
        grow(tmp_path / "records", number)
        assert writer.write() is not None
        assert writer.write() is None  # nothing is new
    return tmp_path / "records"


@pytest.fixture
def mirror(records: Path) -> Path:
    return records.parent / "mirror"


def test_parts_give_the_files_again(records: Path, mirror: Path) -> None:
    assert join_parts(mirror) == 5
    assert contents(mirror) == contents(records)
    assert join_parts(mirror) == 0  # they are there already
    assert contents(mirror) == contents(records)


def test_parts_follow_whole_files(records: Path, mirror: Path, tmp_path: Path) -> None:
    """Those of a process that was resumed: what was there is in no part of its own."""
    again = tmp_path / "again"
    shutil.copytree(records, again)
    writer = PartWriter(records, again / PARTS_DIR)
    grow(records, 6)
    writer.write()
    shutil.copytree(mirror / PARTS_DIR, again / PARTS_DIR, dirs_exist_ok=True)  # older ones were not removed
    assert join_parts(again) == 1
    assert contents(again) == contents(records)


@pytest.mark.parametrize("place", [0, 60, -1])
def test_nothing_is_taken_behind_a_part_with_a_flipped_bit(
    records: Path, mirror: Path, place: int, caplog: pytest.LogCaptureFixture
) -> None:
    third = sorted((mirror / PARTS_DIR).iterdir())[2]
    content = bytearray(third.read_bytes())
    content[place] ^= 1
    third.write_bytes(content)
    assert join_parts(mirror) == 2
    assert f"{third.name} is damaged; what it and later parts hold is measured again" in caplog.text
    for whole, joined in zip(contents(records), contents(mirror), strict=True):
        assert whole.startswith(joined)


def test_nothing_is_taken_behind_a_gap(records: Path, mirror: Path, caplog: pytest.LogCaptureFixture) -> None:
    parts = sorted((mirror / PARTS_DIR).iterdir())
    parts[2].unlink()
    assert join_parts(mirror) == 2
    assert f"a part before {parts[3].name} is missing" in caplog.text
    assert (mirror / RECORD_FILE).read_text() == "".join(f"{RECORD_FILE} of round {n}\n" for n in (1, 2))


def test_files_of_which_one_is_whole_and_the_others_old(records: Path, mirror: Path) -> None:
    """As an upload leaves them that was cut off between two files."""
    shutil.copy(records / RECORD_FILE, mirror / RECORD_FILE)
    assert join_parts(mirror) == 5
    assert contents(mirror) == contents(records)


def foreign_part(records: Path, head: object, pieces: bytes = b"a line\n") -> None:
    content = json.dumps(head).encode() + b"\n" + pieces
    (records / PARTS_DIR).mkdir()
    name = f"{0:015d}-{hashlib.sha256(content).hexdigest()[:32]}.part"
    (records / PARTS_DIR / name).write_bytes(content)


@pytest.mark.parametrize(
    "head",
    [
        {"../outside": [0, 7]},
        {"/tmp/outside": [0, 7]},
        {"outside": [0, 7]},
        {RECORD_FILE: [0, 8]},
        {RECORD_FILE: [-3, 7]},
        {RECORD_FILE: [0, -7], WORKLOAD_FILE: [0, 14]},
        {RECORD_FILE: 7},
        None,
    ],
)
def test_a_part_that_no_tuning_wrote(tmp_path: Path, head: object) -> None:
    records = tmp_path / "records"
    records.mkdir()
    foreign_part(records, head)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RecordsError, match="is no part that a tuning wrote"):
        join_parts(records)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_part_for_a_file_that_is_a_link(tmp_path: Path) -> None:
    records, outside = tmp_path / "records", tmp_path / "outside"
    records.mkdir()
    outside.touch()
    (records / RECORD_FILE).symlink_to(outside)
    foreign_part(records, {RECORD_FILE: [0, 7]})
    with pytest.raises(RecordsError, match="is no part that a tuning wrote"):
        join_parts(records)
    assert outside.read_bytes() == b""


PLAN = TuningPlan(network="net", target="host", tasks=(), num_trials=64)


class Run:
    """A run that takes the artifacts of messages, as an `Outbox` delivers them."""

    def __init__(self, run_directory: Path, artifacts: Path) -> None:
        self._directory = run_directory
        self._artifacts = artifacts

    def put(self, message: Message, *, limit: int | None = None) -> None:
        """Copies the artifacts of a message; only the first ones, if it is cut off."""
        for name, place in message.artifacts[:limit]:
            source, destination = self._directory / name, self._artifacts / place
            if source.is_dir():
                shutil.copytree(source, destination, dirs_exist_ok=True)
            else:
                destination.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, destination)


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    records = tmp_path / "run" / names.RECORDS_DIR
    records.mkdir(parents=True)
    (records / RECORD_FILE).write_text("first\nsecond\ntorn")
    (records / names.PROVENANCE_FILE).write_text("{}")
    return tmp_path / "run"


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_an_upload_that_is_cut_off_leaves_no_manifest_of_other_files(
    run_directory: Path, tmp_path: Path, limit: int
) -> None:
    run = Run(run_directory, tmp_path / "artifacts")
    run.put(Message(artifacts=whole_records(run_directory)))
    (run_directory / names.RECORDS_DIR / names.PROVENANCE_FILE).write_text('{"estimated_latency_ms": 1}')
    run.put(Message(artifacts=whole_records(run_directory)), limit=limit)
    assert changed_files(tmp_path / "artifacts" / names.RECORDS_DIR) == ()


def test_parts_begin_where_the_records_ended_when_the_tuning_began(run_directory: Path, tmp_path: Path) -> None:
    """A line that was torn is gone by then."""
    records = run_directory / names.RECORDS_DIR / RECORD_FILE
    run: Any = Run(run_directory, tmp_path / "artifacts")
    mirror = RecordMirror(run, run_directory)
    os.truncate(records, len("first\nsecond\n"))
    mirror.tuning_started(PLAN)
    with records.open("a") as file:
        file.write("third\n")
    mirror.round_finished(TuningRound(**{**ROUND, "total_trials": 64}))
    mirrored = tmp_path / "artifacts" / names.RECORDS_DIR
    assert (mirrored / RECORD_FILE).read_text() == "first\nsecond\n"
    assert len(list((mirrored / PARTS_DIR).iterdir())) == 1
    assert join_parts(mirrored) == 1
    assert (mirrored / RECORD_FILE).read_text() == "first\nsecond\nthird\n"


ROUND: dict[str, Any] = {"trials": (), "task": None, "tasks": (), "elapsed_s": 1.0, "durations": None}


CONTENTS = {
    WORKLOAD_FILE: b"workloads",
    RECORD_FILE: b"records",
    JOURNAL_FILE: b"trials",
    names.FINGERPRINT_FILE: b"{}",
    f"{names.BEST_DIR}/{RECORD_FILE}": b"winners",
    f"{names.SIMILAR_DIR}/{RECORD_FILE}": b"of others",
}


@pytest.fixture
def described(tmp_path: Path) -> Path:
    fill(tmp_path)
    return tmp_path


def fill(directory: Path) -> None:
    for name, content in CONTENTS.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(content)
    write_manifest(directory, directory / names.MANIFEST_FILE)


def test_files_as_they_were_written(described: Path) -> None:
    assert changed_files(described) == ()
    assert set(json.loads((described / names.MANIFEST_FILE).read_text())["files"]) == set(CONTENTS)


def test_without_a_manifest_nothing_is_checked(described: Path) -> None:
    (described / names.MANIFEST_FILE).unlink()
    (described / RECORD_FILE).unlink()
    assert changed_files(described) == ()


@pytest.mark.parametrize("name", [WORKLOAD_FILE, RECORD_FILE, JOURNAL_FILE])
def test_a_log_may_have_grown(described: Path, name: str) -> None:
    with (described / name).open("ab") as file:
        file.write(b"more")
    assert changed_files(described) == ()


def test_what_changes_while_a_tuning_runs_is_not_described(described: Path) -> None:
    (described / PARTS_DIR).mkdir()
    (described / PARTS_DIR / "1.part").write_bytes(b"a part")
    (described / ".lock").touch()
    write_manifest(described, described / names.MANIFEST_FILE)
    assert set(json.loads((described / names.MANIFEST_FILE).read_text())["files"]) == set(CONTENTS)


@given(name=st.sampled_from(sorted(CONTENTS)), data=st.data())
def test_every_flipped_bit_is_noticed(tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject) -> None:
    described = tmp_path_factory.mktemp("records")
    fill(described)
    content = bytearray(CONTENTS[name])
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    (described / name).write_bytes(content)
    assert changed_files(described) == (name,)


@pytest.mark.parametrize("name", sorted(CONTENTS))
@pytest.mark.parametrize("what", ["missing", "shorter"])
def test_a_file_that_did_not_arrive(described: Path, name: str, what: str) -> None:
    if what == "missing":
        (described / name).unlink()
    else:
        (described / name).write_bytes(CONTENTS[name][:-1])
    assert changed_files(described) == (name,)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"files": []}', '{"files": {"a": {"bytes": "x", "sha256": ""}}}'])
def test_a_damaged_manifest(described: Path, text: str) -> None:
    (described / names.MANIFEST_FILE).write_text(text)
    assert changed_files(described) == (names.MANIFEST_FILE,)


def test_a_manifest_that_leads_elsewhere(described: Path) -> None:
    """Nothing outside the directory is read."""
    inner = described / names.BEST_DIR
    (inner / names.MANIFEST_FILE).write_text(
        (described / names.MANIFEST_FILE).read_text().replace(f'"{RECORD_FILE}"', f'"../{RECORD_FILE}"')
    )
    assert f"../{RECORD_FILE}" in changed_files(inner)
