"""Models in MLflow: tuned ones in its Models tab, with what they are worth and the runs that made and took them; and
the registry, whose versions have the evidence for their speed as tags, with the aliases that promotions move.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import mlflow
from mlflow.entities import LoggedModelInput, LoggedModelOutput
from mlflow.exceptions import MlflowException
from mlflow.models.model import MLMODEL_FILE_NAME
from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST, ErrorCode

from ansor_mlflow import names
from ansor_mlflow.errors import MachineError, UndecidedError, UserInputError, one_line
from ansor_mlflow.foreign import read_yaml, typed, without_credentials
from ansor_mlflow.tracking.environment import translated_errors
from ansor_mlflow.tracking.report.note import note_tags

_MAX_NAME_CHARS = 200
_MAX_MOVES = 50  # moves of an alias that are remembered; the tag of a registered model has 5000 characters
_MAX_CHARS = 5000  # length of a description that MLflow's tables have room for
_UNDO = "undo"
_MOVE = re.compile(r"(?P<before>\d*)>(?P<after>\d+)@(?P<run_id>\w+)")
_log = logging.getLogger("ansor_mlflow")


def model_name(network: str, devices: str) -> str:
    """Names a model after its network and what it is compiled for: in URIs, so of letters, digits, _ and - alone."""
    return re.sub(r"[^\w-]+", "-", f"{network} {devices}".replace("×", "x"), flags=re.ASCII).strip("-")[
        :_MAX_NAME_CHARS
    ]


def logged_model_of(directory: Path) -> str:
    """ID of the LoggedModel that a downloaded model is; empty where this tracking server has none.

    Raises:
        MachineError: The server does not answer.
    """
    path = directory / MLMODEL_FILE_NAME
    try:
        model_id = typed(str, typed(dict[str, object], read_yaml(path.read_bytes())).get("model_id") or "")
    except (OSError, ValueError):
        return ""  # it was saved, and not logged
    return known_model(model_id)


def known_model(model_id: str) -> str:
    """The ID of a LoggedModel that this tracking server has, or else an empty one; the same for an empty one."""
    if not model_id:
        return ""
    with translated_errors("read the logged model"):
        try:
            return str(mlflow.get_logged_model(model_id).model_id)
        except MlflowException as err:
            if err.error_code != ErrorCode.Name(RESOURCE_DOES_NOT_EXIST):
                raise
            _log.info("nothing is known here of the model %s: %s", model_id, one_line(err))
            return ""


def take_model(run_id: str, model_id: str) -> None:
    """Links a run with the model that it looks at; an empty ID does nothing."""
    if model_id:
        with translated_errors("link the run and its model"):
            mlflow.MlflowClient().log_inputs(run_id, models=[LoggedModelInput(model_id)])


def make_model(run_id: str, model_id: str) -> None:
    """Links a run with the model that one of its steps made."""
    with translated_errors("link the run and its model"):
        mlflow.MlflowClient().log_outputs(run_id, [LoggedModelOutput(model_id, step=0)])


def describe_model(model_id: str, tags: Mapping[str, str], note: str) -> None:
    """Sets tags of a model, and takes away those that are empty now, and describes it, as Markdown, unless a user has;
    an empty ID does nothing.
    """
    if not model_id:
        return
    with translated_errors("set tags of the model"):
        client = mlflow.MlflowClient()
        known = client.get_logged_model(model_id).tags
        tags = {**tags, **note_tags(known, note)}
        client.set_logged_model_tags(model_id, {name: without_credentials(text) for name, text in tags.items() if text})
        for name in [name for name, text in tags.items() if not text and name in known]:
            client.delete_logged_model_tag(model_id, name)


class Move(NamedTuple):
    """What a promotion did to an alias."""

    before: str  # version that the alias pointed to; empty where there was no such alias
    after: str
    run_id: str  # ID of the promotion's run

    def __str__(self) -> str:
        return f"{self.before}>{self.after}@{self.run_id}"


def register(model_uri: str, name: str, tags: Mapping[str, str], description: str) -> str:
    """Registers a logged model under a name, with tags and a description of the new version, whose number is returned.

    A registered model without a description gets that of its first version: what a person sees in the list.
    """
    with translated_errors(f"register the model as {name}"):
        client, safe = mlflow.MlflowClient(), without_credentials(description)[:_MAX_CHARS]
        version = str(mlflow.register_model(model_uri, name, tags=dict(tags)).version)
        client.update_model_version(name, version, safe)
        if not client.get_registered_model(name).description:
            client.update_registered_model(name, safe)
        return version


def find_version(name: str, given: str) -> str:
    """The number of a version, which is given as a number or an alias."""
    with translated_errors(f"read candidate={given} of the registered model {name}"):
        client = mlflow.MlflowClient()
        found = client.get_model_version if given.isdigit() else client.get_model_version_by_alias
        return _number(found(name, given).version)


def tag_version(name: str, version: str, tags: Mapping[str, str]) -> None:
    """Sets tags of a version; one without a value is removed."""
    client = mlflow.MlflowClient()
    with translated_errors(f"tag version {version} of {name}"):
        for key, value in tags.items():
            if value:
                client.set_model_version_tag(name, version, key, value)
            else:
                client.delete_model_version_tag(name, version, key)


def tags_of_version(name: str, version: str) -> dict[str, str]:
    """The tags of a version."""
    with translated_errors(f"read version {version} of {name}"):
        return dict(mlflow.MlflowClient().get_model_version(name, version).tags)


def aliases_of(name: str) -> dict[str, str]:
    """The versions of a registered model that have an alias, by alias."""
    with translated_errors(f"read the registered model {name}"):
        aliases = mlflow.MlflowClient().get_registered_model(name).aliases
    return {alias: _number(version) for alias, version in aliases.items()}


def _number(version: object) -> str:
    """Checks the number of a version that a server gave: it names a directory, too."""
    if not re.fullmatch("[0-9]+", str(version)):
        raise MachineError(f"the model registry calls a version {version!r:.100}; ask who runs that server")
    return str(version)


def move_aliases(name: str, version: str, seen: Mapping[str, str], run_id: str) -> None:
    """Lets aliases point to a version, and remembers where those that move pointed to. None moves, and it is an
    `UndecidedError`, where one points elsewhere than it was seen to; empty stands for an alias that there was not.

    The registry cannot compare and set: another promotion may come in between reading and setting, which takes
    milliseconds, but not while the models are measured, which takes minutes.
    """
    now = aliases_of(name)
    for alias, before in seen.items():
        if now.get(alias, "") != before:
            then, here = (f"version {number}" if number else "no version" for number in (before, now.get(alias, "")))
            raise UndecidedError(
                f"{alias} of {name} pointed to {then} when the comparison began and points to {here} now; nothing was "
                "moved, promote again"
            )
    moving = {alias: Move(before, version, run_id) for alias, before in seen.items() if before != version}
    _carry_out(name, moving, is_undone=False)


def finish_moves(name: str) -> dict[str, Move]:
    """Ends what a promotion or a rollback had begun to do to aliases when it was killed, and says so; returns what is
    taken back now, if it was a rollback. An alias that somebody moved elsewhere meanwhile stays there.
    """
    words = _tags(name).get(names.TAG_MOVING, "").split()
    begun = {}
    for alias, _, move in (word.rpartition("=") for word in words):
        if match := _MOVE.fullmatch(move):
            begun[alias] = Move(**match.groupdict())
    is_undone = words[:1] == [_UNDO]
    if moved := _carry_out(name, begun, is_undone=is_undone):
        _log.warning("a promotion or rollback of %s was killed; %s moved now, as it had begun", name, ", ".join(moved))
    if not (begun and is_undone):
        return {}
    now = aliases_of(name)
    return {alias: move for alias, move in begun.items() if now.get(alias, "") == move.before}


def _carry_out(name: str, moving: Mapping[str, Move], *, is_undone: bool) -> list[str]:
    """Moves aliases, or takes their last moves back, and remembers it; returns those that moved.

    What is to be done is written down first: it can be ended later, whenever the process is killed.
    """
    if not moving:
        return []
    moved = []
    words = ([_UNDO] if is_undone else []) + [f"{alias}={move}" for alias, move in moving.items()]
    with translated_errors(f"move aliases of {name}"):
        client = mlflow.MlflowClient()
        client.set_registered_model_tag(name, names.TAG_MOVING, " ".join(words))
        now, moves = aliases_of(name), _moves(name, moving)
        for alias, move in moving.items():
            start, end = (move.after, move.before) if is_undone else (move.before, move.after)
            known = moves[alias]
            if not is_undone and known[-1:] != [move]:  # before the alias moves, so that it can be undone
                _remember(name, alias, [*known, move])
            if now.get(alias, "") == start:
                if end:
                    client.set_registered_model_alias(name, alias, end)
                else:
                    client.delete_registered_model_alias(name, alias)
                moved.append(alias)
            if is_undone and move in known:
                _remember(name, alias, known[: len(known) - 1 - known[::-1].index(move)])
        client.delete_registered_model_tag(name, names.TAG_MOVING)
    return moved


def undo_moves(name: str, alias: str) -> dict[str, Move]:
    """Takes back the promotion that moved an alias last, with the other aliases that it moved; returns what was taken
    back. The alias may be empty if one promotion moved all of them last.
    """
    undone = undoable_moves(name, alias)
    _carry_out(name, undone, is_undone=True)
    return undone


def undoable_moves(name: str, alias: str) -> dict[str, Move]:
    """What `undo_moves` would take back. It is a `UserInputError` if no promotion moved the alias where it points to,
    there was no such alias before, or the version that it pointed to is deleted.
    """
    now = aliases_of(name)
    last = {}
    for moved, moves in _moves(name, now).items():
        # what came after the last move to this version was taken back by hand, or did not happen
        if here := [move for move in moves if move.after == now[moved]]:
            last[moved] = here[-1]
    if not alias:
        if len({move.run_id for move in last.values()}) > 1:
            raise UserInputError(f"alias='': promotions moved {', '.join(sorted(last))}; give one of them")
        alias = next((moved for moved, move in last.items() if move.before), next(iter(last), ""))
    if alias not in last:
        raise UserInputError(
            f"alias={alias!r}: no promotion moved an alias of {name} to where it points now; set it with "
            "MlflowClient().set_registered_model_alias"
        )
    if not last[alias].before:
        raise UserInputError(
            f"alias={alias}: no version of {name} had it before version {last[alias].after}, so there is none to go "
            "back to; nothing was moved"
        )
    undone = {moved: move for moved, move in last.items() if move.run_id == last[alias].run_id}
    for moved, move in undone.items():
        if move.before:
            with translated_errors(f"go back to version {move.before} of {name}, which {moved} pointed to before"):
                mlflow.MlflowClient().get_model_version(name, move.before)  # it may be deleted
    return undone


def _tags(name: str) -> dict[str, str]:
    with translated_errors(f"read the registered model {name}"):
        return dict(mlflow.MlflowClient().get_registered_model(name).tags)


def _moves(name: str, aliases: Iterable[str]) -> dict[str, list[Move]]:
    """The moves of aliases that are remembered. A tag may hold some from a version to itself, which are none."""
    tags = _tags(name)
    old = {alias: tags.get(f"{names.OLD_MOVES_PREFIX}{alias}", "") for alias in aliases}
    texts = {alias: tags.get(f"{names.MOVES_PREFIX}{alias}", old[alias]) for alias in old}
    moves = {alias: [Move(**match.groupdict()) for match in _MOVE.finditer(text)] for alias, text in texts.items()}
    return {alias: [move for move in found if move.before != move.after] for alias, found in moves.items()}


def _remember(name: str, alias: str, moves: list[Move]) -> None:
    key, old = f"{names.MOVES_PREFIX}{alias}", f"{names.OLD_MOVES_PREFIX}{alias}"
    client = mlflow.MlflowClient()
    if moves:
        client.set_registered_model_tag(name, key, " ".join(map(str, moves[-_MAX_MOVES:])))
    if old in _tags(name):  # not before the new one is there, and before there is none at all
        client.delete_registered_model_tag(name, old)
    if not moves:
        client.delete_registered_model_tag(name, key)
