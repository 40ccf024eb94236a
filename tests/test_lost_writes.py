"""Whatever step of writing fails, or kills the program: the old is there or the new, and the next command goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import mlflow
import pytest
from helpers.faulty_disk import FAULTS, Fault, FaultyDisk, KilledError

from ansor_mlflow import names
from ansor_mlflow.cli.command import write_output
from ansor_mlflow.commands.databases import distill_records, merge_records
from ansor_mlflow.errors import MachineError
from ansor_mlflow.files import append, end_last_line, replace_directory, translated_disk_errors, write_text
from ansor_mlflow.parameters import DistillRecordsOptions, MergeRecordsOptions, PromoteOptions
from ansor_mlflow.records import RECORD_FILE, WORKLOAD_FILE, PartWriter
from ansor_mlflow.steps.promotion import roll_back
from ansor_mlflow.tracking import registry
from ansor_mlflow.tracking.killed import OUTBOX_DIR
from ansor_mlflow.tracking.outbox import Message, _left, _read, _write, leave_message, whole_records

TARGET = {"kind": "llvm", "keys": ["cpu"]}
Write = Callable[[Path], object]


def texts(folder: Path) -> dict[str, str]:
    found = {path.relative_to(folder): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {str(name): path.read_text() for name, path in found.items() if not any(p[0] == "." for p in name.parts)}


def make_records(folder: Path, *seconds: float) -> None:
    folder.mkdir(parents=True)
    (folder / WORKLOAD_FILE).write_text('["291", "b25l"]\n')
    lines = [json.dumps([0, [[[], []], [second], TARGET, []]]) for second in seconds]
    (folder / RECORD_FILE).write_text("".join(f"{line}\n" for line in lines))


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for the real disk: what a flush that fails does is what counts here."""
    monkeypatch.setattr("os.fsync", lambda _: None)


def prepare_file(root: Path) -> None:
    (root / "seen").mkdir()
    (root / "seen" / "out.json").write_text("old")


def write_file(root: Path) -> None:
    write_output("json_file", str(root / "seen" / "out.json"), "new" * 100)


def prepare_sources(root: Path) -> None:
    make_records(root / "a", 0.1, 0.2)
    make_records(root / "b", 0.3)


def prepare_database(root: Path) -> None:
    prepare_sources(root)
    merge_records(MergeRecordsOptions(sources=(str(root / "a"),), output=str(root / "seen")))


def merge_both(root: Path) -> None:
    merge_records(MergeRecordsOptions(sources=(str(root / "a"), str(root / "b")), output=str(root / "seen")))


def distill_both(root: Path) -> None:
    sources = (str(root / "b"), str(root / "a"))
    distill_records(DistillRecordsOptions(sources=sources, output=str(root / "seen"), keep=2))


def prepare_winners(root: Path) -> None:
    make_records(root / "seen" / "best", 0.5)


def write_winners(root: Path) -> None:
    new = root / "seen" / ".best.new"
    new.mkdir(exist_ok=True)
    for name in (WORKLOAD_FILE, RECORD_FILE):
        write_text(new / name, "new\n")
    replace_directory(new, root / "seen" / "best")


def prepare_message(root: Path) -> None:
    (root / "seen" / OUTBOX_DIR).mkdir(parents=True)
    _write(root / "seen" / OUTBOX_DIR / "000001.json", Message(tags={"first": "1"}, time_ms=1))


def write_message(root: Path) -> None:
    leave_message(root / "seen", Message(tags={"second": "2"}, time_ms=2))


def prepare_mirror(root: Path) -> None:
    make_records(root / "records", 0.1, 0.2)
    (root / "seen").mkdir()


def write_part(root: Path) -> None:
    writer = PartWriter(root / "records", root / "seen")
    writer._sizes = dict.fromkeys(writer._sizes, 0)
    writer.write()


def prepare_manifest(root: Path) -> None:
    make_records(root / "seen" / names.RECORDS_DIR, 0.1)
    whole_records(root / "seen")
    (root / "seen" / names.RECORDS_DIR / RECORD_FILE).write_text("")


WRITES: dict[str, tuple[Write, Write]] = {
    "a JSON file": (prepare_file, write_file),
    "a database": (prepare_database, merge_both),
    "the best of a database": (prepare_database, distill_both),
    "winners": (prepare_winners, write_winners),
    "a new database": (prepare_sources, merge_both),
    "a message": (prepare_message, write_message),
    "a part": (prepare_mirror, write_part),
    "a manifest": (prepare_manifest, lambda root: whole_records(root / "seen")),
}
SLOW_WRITES = ("a database", "the best of a database")
"""A new database is written as they are."""


def seen(root: Path) -> dict[str, str]:
    return texts(root / "seen") if (root / "seen").exists() else {}


def write_with_fault(root: Path, write: Write, fault: Fault, step: int) -> FaultyDisk:
    """Whatever the disk says, it is an error of the machine, or none at all where it was only about leftovers."""
    disk = FaultyDisk(root, fault, step)
    try:
        with disk.inserted(), translated_disk_errors():
            write(root)
    except MachineError as err:
        assert "killed" not in fault
        assert err.exit_code == 3  # noqa: PT017
    except KilledError:
        assert "killed" in fault
    return disk


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.nightly] * (kind in SLOW_WRITES)) for kind in WRITES]
)
def test_the_old_or_the_new_is_there(kind: str, fault: Fault, tmp_path: Path) -> None:
    prepare, write = WRITES[kind]

    def prepared(name: str) -> Path:
        root = tmp_path / name
        root.mkdir()
        prepare(root)
        return root

    whole = prepared("whole")
    old = seen(whole)
    num_steps = write_with_fault(whole, write, fault, 0).num_steps
    new = seen(whole)
    assert num_steps >= 4
    assert new != old or kind == "a manifest"
    for step in range(1, num_steps + 1):
        root = prepared(str(step))
        for _ in range(2):
            write_with_fault(root, write, fault, step)
            is_there = seen(root)
            without_paths = json.loads(json.dumps(is_there).replace(str(root), str(whole)))
            if kind == "a message":
                assert all(_read(path) for path in _left(root / "seen"))
            else:
                assert without_paths in (old, new), f"step {step}"
        write(root)
        last = json.loads(json.dumps(seen(root)).replace(str(root), str(whole)))
        assert last == new or kind == "a message"


def test_a_file_in_a_folder_that_may_not_be_written_is_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_file(tmp_path)
    before = (tmp_path / "seen" / "out.json").stat().st_ino
    monkeypatch.setattr("os.access", lambda path, mode: mode != os.W_OK or Path(path) != tmp_path / "seen")
    write_file(tmp_path)
    assert (tmp_path / "seen" / "out.json").read_text() == "new" * 100
    assert (tmp_path / "seen" / "out.json").stat().st_ino == before


@pytest.mark.parametrize("fault", FAULTS)
def test_a_line_is_appended_whole_or_ended_before_the_next(fault: Fault, tmp_path: Path) -> None:
    for step in range(1, 5):
        file = tmp_path / f"{step}.jsonl"
        file.write_text("[1]\n")
        write_with_fault(tmp_path, lambda _, file=file: append(file, b"[2, 2]\n"), fault, step)  # type: ignore[misc]
        end_last_line(file)
        append(file, b"[3]\n")
        first, *others, last = file.read_text().splitlines()
        assert (first, last) == ("[1]", "[3]")
        assert others in ([], ["[2, 2]"])


MODEL, ALIASES = "resnet", ("champion", "champion-llvm")
_CALLS = (
    "set_registered_model_tag",
    "set_registered_model_alias",
    "delete_registered_model_tag",
    "delete_registered_model_alias",
)


@pytest.fixture
def client(tmp_path: Path, experiment_id: str) -> Iterator[mlflow.MlflowClient]:
    client = mlflow.MlflowClient()
    client.create_registered_model(MODEL)
    for _ in range(2):
        client.create_model_version(MODEL, source=tmp_path.as_uri())
    yield client
    client.delete_registered_model(MODEL)


def killed_at(step: int, action: Callable[[], object]) -> bool:
    calls = 0

    def counted(call: Callable[..., object]) -> Callable[..., object]:
        def call_or_die(*args: object) -> object:
            nonlocal calls
            calls += 1
            if calls >= step:
                raise KilledError
            return call(*args)

        return call_or_die

    with pytest.MonkeyPatch.context() as patch:
        for name in _CALLS:
            patch.setattr(mlflow.MlflowClient, name, counted(getattr(mlflow.MlflowClient, name)))
        try:
            action()
        except KilledError:
            return True
    return False


@pytest.mark.parametrize("kind", ["promotion", "rollback"])
def test_aliases_move_together_whenever_a_process_is_killed(client: mlflow.MlflowClient, kind: str) -> None:
    first = dict.fromkeys(ALIASES, "")
    registry.move_aliases(MODEL, "1", first, "run1")

    def promote() -> None:
        now = registry.aliases_of(MODEL)
        registry.move_aliases(MODEL, "2", {alias: now[alias] for alias in ALIASES}, "run2")

    def roll_back() -> None:
        registry.undo_moves(MODEL, ALIASES[0])

    act, undo = (promote, roll_back) if kind == "promotion" else (roll_back, promote)
    if kind == "rollback":
        promote()
    step = 1
    while killed_at(step, act):
        killed_at(step, lambda: registry.finish_moves(MODEL))
        registry.finish_moves(MODEL)
        versions = set(registry.aliases_of(MODEL).values())
        assert len(versions) == 1, f"step {step}"
        began = (versions == {"2"}) == (kind == "promotion")
        assert began == (step > 1)
        if began:
            undo()  # takes back the whole
        assert set(registry.aliases_of(MODEL).values()) == {"1" if kind == "promotion" else "2"}
        assert names.TAG_MOVING not in client.get_registered_model(MODEL).tags
        step += 1
    assert step > 5


@pytest.mark.parametrize("alias", [ALIASES[0], pytest.param("", marks=pytest.mark.nightly)])
def test_a_rollback_that_was_killed_and_is_given_again_takes_back_one_promotion(
    client: mlflow.MlflowClient, own_directory: Path, alias: str
) -> None:
    client.create_model_version(MODEL, source="file:///nowhere")
    options = PromoteOptions(model=MODEL, alias=alias, rollback=True)

    def promote() -> None:
        now = registry.aliases_of(MODEL)
        registry.move_aliases(MODEL, "3", {alias: now[alias] for alias in ALIASES}, "run3")

    for version, before in (("1", ""), ("2", "1")):
        registry.move_aliases(MODEL, version, dict.fromkeys(ALIASES, before), f"run{version}")
    promote()
    step = 1
    while killed_at(step, lambda: roll_back(options)):
        assert roll_back(options).aliases == dict.fromkeys(ALIASES, ("3", "2")), f"step {step}"
        assert registry.aliases_of(MODEL) == dict.fromkeys(ALIASES, "2")
        promote()
        step += 1
    assert step > 5


def test_a_rollback_of_another_alias_is_none_that_was_killed(client: mlflow.MlflowClient, own_directory: Path) -> None:
    for number, alias in enumerate(ALIASES):
        for version, before in (("1", ""), ("2", "1")):
            registry.move_aliases(MODEL, version, {alias: before}, f"run{version}of{number}")
    assert killed_at(2, lambda: registry.undo_moves(MODEL, ALIASES[0]))
    rollback = roll_back(PromoteOptions(model=MODEL, alias=ALIASES[1], rollback=True))
    assert rollback.aliases == {ALIASES[1]: ("2", "1")}
    assert registry.aliases_of(MODEL) == dict.fromkeys(ALIASES, "1")


@pytest.mark.parametrize("alias", ["undo", "undo-test"])
def test_no_name_of_an_alias_makes_a_rollback_of_a_promotion(client: mlflow.MlflowClient, alias: str) -> None:
    registry.move_aliases(MODEL, "1", {alias: ""}, "run1")
    assert killed_at(2, lambda: registry.move_aliases(MODEL, "2", {alias: "1"}, "run2"))
    assert registry.finish_moves(MODEL) == {}
    assert registry.aliases_of(MODEL) == {alias: "2"}
    assert registry.undo_moves(MODEL, alias) == {alias: registry.Move("1", "2", "run2")}


def test_an_alias_that_somebody_moved_meanwhile_stays(client: mlflow.MlflowClient) -> None:
    registry.move_aliases(MODEL, "1", dict.fromkeys(ALIASES, ""), "run1")
    client.create_model_version(MODEL, source="file:///nowhere")
    assert killed_at(2, lambda: registry.move_aliases(MODEL, "2", dict.fromkeys(ALIASES, "1"), "run2"))
    client.set_registered_model_alias(MODEL, ALIASES[0], "3")
    assert registry.finish_moves(MODEL) == {}
    assert registry.aliases_of(MODEL) == {ALIASES[0]: "3", ALIASES[1]: "2"}
