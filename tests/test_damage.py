"""One rule for every command that reads records: what is damaged is left out, and said once with what mends it."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import mlflow
import pytest
from helpers.commands import RunCommand, flags
from helpers.finished import FinishedWork
from helpers.runs_here import QUICK, artifacts_of, newest_run

from ansor_mlflow import names
from ansor_mlflow.commands.trial_table import load_trials
from ansor_mlflow.device import available_cpus, fingerprint
from ansor_mlflow.errors import RecordsError
from ansor_mlflow.records import check_copy, check_records, write_manifest
from ansor_mlflow.records.store import RECORD_FILE, WORKLOAD_FILE

if TYPE_CHECKING:
    from tvm.target import Target

MEND = "what is whole is used; `ansor-mlflow records verify records --repair` mends it"
NOT_AS_DESCRIBED = f"it is not the file whose SHA-256 is in {names.MANIFEST_FILE}"


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def tear(records: Path) -> str:
    """Cuts the last record off within its line; returns what is said of it."""
    lines = lines_of(records / RECORD_FILE)
    (records / RECORD_FILE).write_bytes(b"".join([*lines[:-1], lines[-1][:-30]]))
    return f"records/{RECORD_FILE}: line {len(lines)} is damaged, and {NOT_AS_DESCRIBED}"


def garble(records: Path) -> str:
    """Breaks the schedules of two records in the middle, which their ends do not show."""
    lines = lines_of(records / RECORD_FILE)
    for number in (0, 2):
        lines[number] = lines[number][:200] + b"\x00\xff" + lines[number][202:]
    (records / RECORD_FILE).write_bytes(b"".join(lines))
    return f"records/{RECORD_FILE}: lines 1, 3 are damaged, and {NOT_AS_DESCRIBED}"


def garble_workload(records: Path) -> str:
    """Breaks the function of a workload, whose records mean nothing then."""
    lines = lines_of(records / WORKLOAD_FILE)
    lines[1] = lines[1][:100] + b"\xff" + lines[1][101:]
    (records / WORKLOAD_FILE).write_bytes(b"".join(lines))
    lost = [number for number, line in enumerate(lines_of(records / RECORD_FILE), 1) if line.startswith(b"[1,")]
    return (
        f"records/{WORKLOAD_FILE}: line 2 is damaged, and {NOT_AS_DESCRIBED}; "
        f"records/{RECORD_FILE}: lines {', '.join(map(str, lost))} are damaged"
    )


DAMAGES = pytest.mark.parametrize("damage", [tear, garble, garble_workload])
Damaging = Callable[[Path], str]


@pytest.fixture
def records(
    tuned_records: Path, small_onnx: Path, host_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Records as a tuning of the small network leaves them, in `records` of the working directory."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(small_onnx, "small.onnx")
    copy = Path(shutil.copytree(tuned_records, "records", ignore=shutil.ignore_patterns("best", "*.lock", ".*")))
    (copy / names.FINGERPRINT_FILE).write_text(fingerprint(host_target, available_cpus()).to_json())
    write_manifest(copy, copy / names.MANIFEST_FILE)
    return copy


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What was warned of since the last call."""

    def take() -> list[str]:
        messages = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        caplog.clear()
        return messages

    return take


@DAMAGES
@pytest.mark.parametrize(
    "command",
    [
        "records show records",
        f"records show records/{RECORD_FILE}",
        "records merge records --output new",
        "records distill records --output new",
        pytest.param("records verify records --network small.onnx", marks=pytest.mark.nightly),
    ],
)
def test_a_command_leaves_damage_out_and_says_so_once(
    records: Path, damage: Damaging, command: str, run_here: RunCommand, warnings: Callable[[], list[str]]
) -> None:
    expected = damage(records)
    before = {path: path.read_bytes() for path in records.iterdir()}
    assert run_here(*command.split()) == 0
    mend = MEND.replace("records --", f"records/{RECORD_FILE} --") if command.endswith(RECORD_FILE) else MEND
    assert warnings() == [f"{expected}; {mend}"]
    assert {path: path.read_bytes() for path in records.iterdir()} == before


@pytest.mark.system
@pytest.mark.parametrize(
    "command",
    [
        ["compile", "--network", "small.onnx", "--records", "records"],
        ["explain", "records", "--network", "small.onnx"],
        ["tune", *flags({**QUICK, "network": "small.onnx", "trials": 6, "warm_start": "records"})],
    ],
    ids=["compile", "explain", "tune"],
)
@pytest.mark.usefixtures("new_experiment")
def test_a_step_leaves_damage_out_and_says_so_once(
    records: Path, command: list[str], run_here: RunCommand, warnings: Callable[[], list[str]]
) -> None:
    expected = garble(records)
    assert run_here(*command) == 0
    assert [text for text in warnings() if "damaged" in text] == [f"{expected}; {MEND}"]


@DAMAGES
def test_the_command_that_is_named_mends(
    records: Path,
    damage: Damaging,
    run_here: RunCommand,
    warnings: Callable[[], list[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    num_lines = len(lines_of(records / RECORD_FILE))
    damage(records)
    assert run_here("records", "show", "records", "--json", "-") == 0
    left = json.loads(capsys.readouterr().out)
    (warning,) = warnings()
    (command,) = re.findall("`(.*)`", warning)
    assert run_here(*command.split()[1:]) == 0
    out = capsys.readouterr().out
    assert out.startswith("every line that is left is whole\n")
    assert re.search(r"(?m)^\d+ damaged lines are in records/\S+\.quarantine", out)
    assert f"changed after {names.MANIFEST_FILE} was written, which is removed" in out
    warnings()
    assert run_here("records", "show", "records", "--json", "-") == 0
    assert warnings() == []
    shown = json.loads(capsys.readouterr().out)
    assert shown["targets"] == left["targets"]
    assert sum(w["num_records"] for t in shown["targets"] for w in t["workloads"]) == len(
        lines_of(records / RECORD_FILE)
    )
    assert len(lines_of(records / RECORD_FILE)) < num_lines
    assert run_here(*command.split()[1:]) == 0
    assert capsys.readouterr().out == "every line that is left is whole\n"


@pytest.mark.usefixtures("new_experiment")
def test_a_mended_database_without_winners_has_all_its_records(
    records: Path, run_here: RunCommand, warnings: Callable[[], list[str]]
) -> None:
    best = records / names.BEST_DIR
    best.mkdir()
    shutil.copy(records / WORKLOAD_FILE, best)
    (best / RECORD_FILE).write_bytes(lines_of(records / RECORD_FILE)[0][:-30])
    check_records(records)
    assert warnings() == [f"records/best/{RECORD_FILE}: line 1 is damaged; {MEND}"]
    assert run_here("records", "verify", "records", "--repair") == 0
    assert run_here("compile", "--network", "small.onnx", "--records", "records") == 0
    assert newest_run().data.metrics[names.COVERAGE_TASKS] == 1


@pytest.mark.parametrize("kind", ["an edited time", "a cut between lines", "another device", "a damaged manifest"])
def test_a_change_that_no_line_shows(
    records: Path,
    kind: str,
    run_here: RunCommand,
    warnings: Callable[[], list[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = records / RECORD_FILE
    if kind == "an edited time":
        path.write_text(re.sub(r"\de-0", lambda found: f"{9 - int(found[0][0])}e-0", path.read_text(), count=1))
    elif kind == "a cut between lines":
        path.write_bytes(b"".join(lines_of(path)[:-1]))
    elif kind == "another device":
        path = records / names.FINGERPRINT_FILE
        path.write_text(path.read_text() + " ")
    else:
        path = records / names.MANIFEST_FILE
        path.write_text("{")
    expected = "it is damaged" if kind == "a damaged manifest" else NOT_AS_DESCRIBED
    assert run_here("records", "show", "records") == 0
    assert warnings() == [f"{path}: {expected}; {MEND}"]
    capsys.readouterr()
    assert run_here("records", "verify", "records", "--repair") == 0
    assert capsys.readouterr().out == (
        "every line that is left is whole\n"
        f"{path.name} changed after {names.MANIFEST_FILE} was written, which is removed\n"
    )
    assert run_here("records", "show", "records") == 0
    assert warnings() == []


def test_what_is_whole_is_not_spoken_of(records: Path, warnings: Callable[[], list[str]]) -> None:
    with (records / RECORD_FILE).open("ab") as file:
        file.write(lines_of(records / RECORD_FILE)[0])  # a tuning goes on
    for path in (records, records / RECORD_FILE, records.parent, records / "nothing"):
        check_records(path)
    check_copy(records, "run 1", "get it")
    assert warnings() == []


@pytest.mark.system
def test_damage_in_a_run(
    finished_work: FinishedWork,
    run_here: RunCommand,
    warnings: Callable[[], list[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What the tuning logged so is left out; what was changed since is refused, until the user takes it as it is."""
    run_id = finished_work.tuned
    logged = artifacts_of(run_id) / names.RECORDS_DIR
    garble(logged)
    write_manifest(logged, logged / names.MANIFEST_FILE)
    mend = f"`mlflow artifacts download --run-id {run_id} --artifact-path records --dst-path .`, then `ansor-mlflow rec"
    warnings()
    for command in (["records", "show", run_id], ["compile", "--tune-run", run_id], ["diff", run_id, run_id]):
        assert run_here(*command) == 0
        said = [text for text in warnings() if "damaged" in text]
        assert len(said) == 1 + (command[0] == "diff")  # both sides of it
        assert said[0].startswith(f"{RECORD_FILE} of run {run_id}: lines 1, 3 are damaged; what is whole is used")
        assert mend in said[0]
    assert run_here("compile", "--tune-run", run_id, "--allow-missing") == 0
    assert [text for text in warnings() if "damaged" in text] == said[:1]

    tear(logged)
    last = len(lines_of(logged / RECORD_FILE))
    capsys.readouterr()
    for command in (["records", "show", run_id], ["tune", "--resume-run", run_id]):
        assert run_here(*command) == 5
        (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("Error: ")]
        assert f"{RECORD_FILE} of run {run_id}: lines 1, 3, {last} are damaged, and {NOT_AS_DESCRIBED}" in error
    download, repair = re.findall("`(.*?)`", error)
    assert mlflow.artifacts.download_artifacts(run_id=run_id, artifact_path="records", dst_path=".")
    assert download.split()[:3] == ["mlflow", "artifacts", "download"]
    assert run_here(*repair.split()[1:]) == 0
    warnings()
    assert run_here("compile", "--network", "small.onnx", "--records", "records") == 0
    assert [text for text in warnings() if "damaged" in text] == []
    (artifacts_of(run_id) / names.TRIALS_TABLE).unlink()  # as of a run that was killed
    with pytest.raises(RecordsError, match=NOT_AS_DESCRIBED):
        load_trials(run_id)
