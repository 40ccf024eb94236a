"""The step `promote` with `rollback`: takes back the last promotion."""

from __future__ import annotations

from dataclasses import dataclass

from ansor_mlflow import names
from ansor_mlflow.errors import UserInputError
from ansor_mlflow.options import PromoteOptions
from ansor_mlflow.tracking import step_run, tag_version, undo_moves

_ROLLED_BACK = "rolled_back"


@dataclass(frozen=True, kw_only=True)
class Rollback:
    """What was taken back."""

    run_id: str
    model: str
    """Name of the registered model."""
    aliases: dict[str, tuple[str, str]]
    """The version that each alias pointed to, and the one that it points to now; empty where it was removed."""


def roll_back(options: PromoteOptions) -> Rollback:
    """Lets the aliases that the last promotion moved point to where they pointed before. Nothing is measured.

    Can be done again, for the promotion before that one.

    Raises:
        UserInputError: No promotion moved the alias, or it was the first one; or what only a comparison takes is given.
        MachineError: A server is away.
    """
    if options.dry_run or options.candidate:
        given = "dry_run=true" if options.dry_run else f"candidate={options.candidate}"
        raise UserInputError(
            f"rollback=true and {given}: a rollback takes the aliases back to where they pointed before, and measures "
            "nothing; leave one of them out"
        )
    with step_run("promote", options, f"roll back {options.model}") as run:
        moves = undo_moves(options.model, options.alias)
        aliases = {alias: (move.after, move.before) for alias, move in moves.items()}
        tags = {names.TAG_PROMOTION: _ROLLED_BACK, names.TAG_PROMOTION_ALIASES: " ".join(aliases)}
        run.log_tags({**tags, "mlflow.runName": f"promote {options.model} · {_ROLLED_BACK}"})
        for version in {after for after, _ in aliases.values()}:
            tag_version(options.model, version, {**tags, names.TAG_PROMOTION_RUN: run.run_id})
        return Rollback(run_id=run.run_id, model=options.model, aliases=aliases)
