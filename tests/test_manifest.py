"""A manifest notices every change of a tuning's files, except that its log grows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansor_mlflow import names
from ansor_mlflow.records.pieces import PARTS_DIR, changed_files, write_manifest
from ansor_mlflow.records.store import JOURNAL_FILE, RECORD_FILE, WORKLOAD_FILE

CONTENTS = {
    WORKLOAD_FILE: b"workloads",
    RECORD_FILE: b"records",
    JOURNAL_FILE: b"trials",
    names.FINGERPRINT_FILE: b"{}",
    f"{names.BEST_DIR}/{RECORD_FILE}": b"winners",
    f"{names.SIMILAR_DIR}/{RECORD_FILE}": b"of others",
}


@pytest.fixture
def records(tmp_path: Path) -> Path:
    fill(tmp_path)
    return tmp_path


def fill(directory: Path) -> None:
    for name, content in CONTENTS.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(content)
    write_manifest(directory, directory / names.MANIFEST_FILE)


def test_files_as_they_were_written(records: Path) -> None:
    assert changed_files(records) == ()
    assert set(json.loads((records / names.MANIFEST_FILE).read_text())["files"]) == set(CONTENTS)


def test_without_a_manifest_nothing_is_checked(records: Path) -> None:
    (records / names.MANIFEST_FILE).unlink()
    (records / RECORD_FILE).unlink()
    assert changed_files(records) == ()


@pytest.mark.parametrize("name", [WORKLOAD_FILE, RECORD_FILE, JOURNAL_FILE])
def test_a_log_may_have_grown(records: Path, name: str) -> None:
    with (records / name).open("ab") as file:
        file.write(b"more")
    assert changed_files(records) == ()


def test_what_changes_while_a_tuning_runs_is_not_described(records: Path) -> None:
    (records / PARTS_DIR).mkdir()
    (records / PARTS_DIR / "1.part").write_bytes(b"a part")
    (records / ".lock").touch()
    write_manifest(records, records / names.MANIFEST_FILE)
    assert set(json.loads((records / names.MANIFEST_FILE).read_text())["files"]) == set(CONTENTS)


@given(name=st.sampled_from(sorted(CONTENTS)), data=st.data())
def test_every_flipped_bit_is_noticed(tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject) -> None:
    records = tmp_path_factory.mktemp("records")
    fill(records)
    content = bytearray(CONTENTS[name])
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    (records / name).write_bytes(content)
    assert changed_files(records) == (name,)


@pytest.mark.parametrize("name", sorted(CONTENTS))
@pytest.mark.parametrize("what", ["missing", "shorter"])
def test_a_file_that_did_not_arrive(records: Path, name: str, what: str) -> None:
    if what == "missing":
        (records / name).unlink()
    else:
        (records / name).write_bytes(CONTENTS[name][:-1])
    assert changed_files(records) == (name,)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"files": []}', '{"files": {"a": {"bytes": "x", "sha256": ""}}}'])
def test_a_damaged_manifest(records: Path, text: str) -> None:
    (records / names.MANIFEST_FILE).write_text(text)
    assert changed_files(records) == (names.MANIFEST_FILE,)


def test_a_manifest_that_leads_elsewhere(records: Path) -> None:
    """Nothing outside the directory is read."""
    inner = records / names.BEST_DIR
    (inner / names.MANIFEST_FILE).write_text(
        (records / names.MANIFEST_FILE).read_text().replace(f'"{RECORD_FILE}"', f'"../{RECORD_FILE}"')
    )
    assert f"../{RECORD_FILE}" in changed_files(inner)
