"""Aliases move only from where they were seen, and every promotion can be taken back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import mlflow
import pytest

from ansor_mlflow import names
from ansor_mlflow.errors import MachineError, UndecidedError, UserInputError
from ansor_mlflow.tracking import registry

NAME = "resnet"
CHAMPION, OF_TARGET = "champion", "champion-llvm-znver4-x2-0123456789"


@pytest.fixture
def client(tmp_path: Path, experiment_id: str) -> Iterator[mlflow.MlflowClient]:
    """A registered model with five versions and no alias."""
    client = mlflow.MlflowClient()
    client.create_registered_model(NAME)
    for _ in range(5):
        client.create_model_version(NAME, source=tmp_path.as_uri())
    yield client
    client.delete_registered_model(NAME)


def promote(version: str, *aliases: str, run_id: str = "") -> None:
    now = registry.aliases_of(NAME)
    run_id = run_id or f"run{version}"
    registry.move_aliases(NAME, version, {alias: now.get(alias, "") for alias in aliases}, run_id)


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        ("1", "2", "pointed to version 1 when the comparison began and points to version 2 now; nothing was moved"),
        ("", "1", "pointed to no version when .* points to version 1 now"),
        ("1", "", "pointed to version 1 when .* points to no version now"),
    ],
    ids=["moved", "made", "deleted"],
)
def test_an_alias_that_changed_meanwhile_stays(
    client: mlflow.MlflowClient, before: str, now: str, message: str
) -> None:
    if now:
        client.set_registered_model_alias(NAME, CHAMPION, now)
    with pytest.raises(UndecidedError, match=f"champion of resnet {message}"):
        registry.move_aliases(NAME, "3", {OF_TARGET: "", CHAMPION: before}, "run3")
    assert registry.aliases_of(NAME) == ({CHAMPION: now} if now else {})


def test_promotions_are_taken_back_one_after_the_other(client: mlflow.MlflowClient) -> None:
    for version in ("1", "3", "2", "3"):
        promote(version, CHAMPION, run_id=f"run{version}")
    for before in ("2", "3", "1"):
        assert registry.undo_moves(NAME, CHAMPION)[CHAMPION].before == before
        assert registry.aliases_of(NAME) == {CHAMPION: before}
    with pytest.raises(UserInputError, match="alias=champion: no version of resnet had it before version 1, so"):
        registry.undo_moves(NAME, CHAMPION)
    assert registry.aliases_of(NAME) == {CHAMPION: "1"}


def test_a_promotion_is_taken_back_as_a_whole(client: mlflow.MlflowClient) -> None:
    promote("1", CHAMPION)
    promote("2", CHAMPION, OF_TARGET)
    undone = registry.undo_moves(NAME, CHAMPION)
    assert {alias: move.before for alias, move in undone.items()} == {CHAMPION: "1", OF_TARGET: ""}
    assert registry.aliases_of(NAME) == {CHAMPION: "1"}


def test_what_another_promotion_moved_stays(client: mlflow.MlflowClient) -> None:
    promote("1", CHAMPION, OF_TARGET)
    promote("2", CHAMPION, OF_TARGET)
    promote("3", OF_TARGET)
    registry.undo_moves(NAME, CHAMPION)
    assert registry.aliases_of(NAME) == {CHAMPION: "1", OF_TARGET: "3"}


def test_without_an_alias_there_must_be_one_last_promotion(client: mlflow.MlflowClient) -> None:
    promote("1", CHAMPION, OF_TARGET)
    promote("2", CHAMPION, OF_TARGET)
    registry.undo_moves(NAME, "")
    assert registry.aliases_of(NAME) == {CHAMPION: "1", OF_TARGET: "1"}
    promote("3", OF_TARGET)
    with pytest.raises(UserInputError, match=rf"promotions moved {CHAMPION}, {OF_TARGET}; give one of them"):
        registry.undo_moves(NAME, "")


@pytest.mark.parametrize("alias", [CHAMPION, ""])
def test_there_is_nothing_before_the_first_promotion(client: mlflow.MlflowClient, alias: str) -> None:
    promote("1", CHAMPION, OF_TARGET)
    with pytest.raises(UserInputError, match="before version 1, so there is none to go back to; nothing was moved"):
        registry.undo_moves(NAME, alias)
    assert registry.aliases_of(NAME) == {CHAMPION: "1", OF_TARGET: "1"}


def test_an_alias_that_was_set_by_hand_is_not_taken_back(client: mlflow.MlflowClient) -> None:
    promote("1", CHAMPION)
    promote("2", CHAMPION)
    client.set_registered_model_alias(NAME, CHAMPION, "5")
    with pytest.raises(UserInputError, match="alias='champion': no promotion moved an alias of resnet to where it"):
        registry.undo_moves(NAME, CHAMPION)
    client.set_registered_model_alias(NAME, CHAMPION, "2")
    registry.undo_moves(NAME, CHAMPION)
    assert registry.aliases_of(NAME) == {CHAMPION: "1"}


def test_a_move_that_was_noted_but_not_made_does_no_harm(client: mlflow.MlflowClient) -> None:
    promote("1", CHAMPION)
    promote("2", CHAMPION)
    key = f"{names.MOVES_PREFIX}{CHAMPION}"
    noted = client.get_registered_model(NAME).tags[key]
    client.set_registered_model_tag(NAME, key, f"{noted} {registry.Move('2', '3', 'run3')}")
    registry.undo_moves(NAME, CHAMPION)
    assert registry.aliases_of(NAME) == {CHAMPION: "1"}


def test_a_version_that_was_deleted_takes_no_alias_back(client: mlflow.MlflowClient) -> None:
    promote("1", CHAMPION)
    promote("2", CHAMPION)
    client.delete_model_version(NAME, "1")
    with pytest.raises(UserInputError, match=r"go back to version 1 of resnet, which champion pointed to before: "):
        registry.undo_moves(NAME, CHAMPION)
    assert registry.aliases_of(NAME) == {CHAMPION: "2"}


def test_an_alias_that_the_version_has_already_does_not_move(client: mlflow.MlflowClient) -> None:
    promote("1", CHAMPION, OF_TARGET)
    promote("2", OF_TARGET)
    promote("2", CHAMPION, OF_TARGET, run_id="again")
    undone = registry.undo_moves(NAME, CHAMPION)
    assert undone == {CHAMPION: registry.Move("1", "2", "again")}
    assert registry.aliases_of(NAME) == {CHAMPION: "1", OF_TARGET: "2"}
    registry.undo_moves(NAME, OF_TARGET)
    assert registry.aliases_of(NAME) == {CHAMPION: "1", OF_TARGET: "1"}


def test_a_noted_move_from_a_version_to_itself_is_none(client: mlflow.MlflowClient) -> None:
    promote("1", CHAMPION)
    promote("2", CHAMPION)
    key = f"{names.MOVES_PREFIX}{CHAMPION}"
    noted = client.get_registered_model(NAME).tags[key]
    client.set_registered_model_tag(NAME, key, f"{noted} {registry.Move('2', '2', 'again')}")
    assert registry.undo_moves(NAME, CHAMPION) == {CHAMPION: registry.Move("1", "2", "run2")}
    assert registry.aliases_of(NAME) == {CHAMPION: "1"}


def test_moves_that_an_earlier_version_of_this_package_noted_are_known(client: mlflow.MlflowClient) -> None:
    promote("1", CHAMPION)
    promote("2", CHAMPION)
    key, old = f"{names.MOVES_PREFIX}{CHAMPION}", f"ansor.moves.{CHAMPION}"
    client.set_registered_model_tag(NAME, old, client.get_registered_model(NAME).tags[key])
    client.delete_registered_model_tag(NAME, key)
    promote("3", CHAMPION)
    assert old not in client.get_registered_model(NAME).tags
    for version in ("2", "1"):
        registry.undo_moves(NAME, CHAMPION)
        assert registry.aliases_of(NAME) == {CHAMPION: version}


def test_the_memory_of_an_alias_has_an_end(client: mlflow.MlflowClient) -> None:
    key = f"{names.MOVES_PREFIX}{CHAMPION}"
    moves = [registry.Move("1", "2", f"{turn:032x}") for turn in range(50)]
    client.set_registered_model_tag(NAME, key, " ".join(map(str, moves)))
    client.set_registered_model_alias(NAME, CHAMPION, "2")
    promote("3", CHAMPION)
    assert client.get_registered_model(NAME).tags[key].split() == [*map(str, moves[1:]), "2>3@run3"]
    assert len(" ".join(map(str, moves))) < 5000


@pytest.mark.parametrize("given", ["4", "challenger"])
def test_a_version_is_found_by_number_and_by_alias(client: mlflow.MlflowClient, given: str) -> None:
    client.set_registered_model_alias(NAME, "challenger", "4")
    assert registry.find_version(NAME, given) == "4"


@pytest.mark.parametrize("version", ["../x", "/etc", "2\n", "", "²", None])
def test_what_a_server_calls_a_version_is_a_number(
    client: mlflow.MlflowClient, monkeypatch: pytest.MonkeyPatch, version: object
) -> None:
    """It names a directory, into which the version is downloaded."""
    told = SimpleNamespace(version=version, aliases={CHAMPION: version})
    with monkeypatch.context() as lying:
        for name in ("get_model_version", "get_registered_model"):
            lying.setattr(mlflow.MlflowClient, name, lambda *_: told)
        for read in (lambda: registry.find_version(NAME, "1"), lambda: registry.aliases_of(NAME)):
            with pytest.raises(MachineError, match=r"the model registry calls a version .*; ask who runs that server"):
                read()


@pytest.mark.parametrize(
    ("name", "given"), [(NAME, "9"), (NAME, "challenger"), ("nothing", "1"), ("nothing", "challenger")]
)
def test_a_version_that_there_is_not(client: mlflow.MlflowClient, name: str, given: str) -> None:
    with pytest.raises(UserInputError, match=f"cannot read candidate={given} of the registered model {name}: "):
        registry.find_version(name, given)
