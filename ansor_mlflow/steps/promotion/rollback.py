"""The step `promote` with `rollback`: takes back the last promotion."""

from __future__ import annotations

from dataclasses import dataclass

from ansor_mlflow import names
from ansor_mlflow.errors import UserInputError
from ansor_mlflow.foreign import Report, Reported
from ansor_mlflow.parameters import PromoteOptions
from ansor_mlflow.tracking import finish_moves, step_run, tag_version, tags_of_version, undo_moves, undoable_moves

_ROLLED_BACK = "rolled_back"


@dataclass(frozen=True, kw_only=True)
class Rollback(Reported):
    """What was taken back."""

    run_id: str
    model: str
    """Name of the registered model."""
    aliases: dict[str, tuple[str, str]]
    """The version that each alias pointed to, and the one that it points to now; empty where it was removed."""

    def report(self) -> Report:
        """Where each alias points now."""
        moved = {alias: f"points to version {now} again" for alias, (_, now) in self.aliases.items() if now}
        lines = [
            f"{alias} of {self.model} {moved.get(alias, 'is removed again')}, it pointed to version {before}"
            for alias, (before, _) in self.aliases.items()
        ]
        return Report("; ".join(lines), where={"run": self.run_id})


def roll_back(options: PromoteOptions) -> Rollback:
    """Lets the aliases that the last promotion moved point to where they pointed before. Nothing is measured.

    Can be done again, for the promotion before that one; after one that was killed it does the rest of that, no more.
    """
    if options.dry_run or options.candidate:
        given = "dry_run=true" if options.dry_run else f"candidate={options.candidate}"
        raise UserInputError(
            f"rollback=true and {given}: a rollback takes the aliases back to where they pointed before, and measures "
            "nothing; leave one of them out"
        )
    moves = finish_moves(options.model)
    is_done = bool(moves) and options.alias in ("", *moves)  # this is the rollback that was killed, given again
    if not is_done:
        undoable_moves(options.model, options.alias)  # before there is a run of what cannot be done
    with step_run("promote", options, f"roll back {options.model}") as run:
        if not is_done:
            moves = undo_moves(options.model, options.alias)
        aliases = {alias: (move.after, move.before) for alias, move in moves.items()}
        tags = {names.TAG_PROMOTION: _ROLLED_BACK, names.TAG_PROMOTION_ALIASES: " ".join(aliases)}
        run.log_tags({**tags, "mlflow.runName": f"promote {options.model} · {_ROLLED_BACK}"})
        for version in {before for before, _ in aliases.values()}:
            tag_version(options.model, version, {**tags, names.TAG_PROMOTION_RUN: run.run_id})
        for version in {now for _, now in aliases.values() if now}:
            _forget_rollback(options.model, version)
        return Rollback(run_id=run.run_id, model=options.model, aliases=aliases)


def _forget_rollback(model: str, version: str) -> None:
    """Removes what an earlier rollback said of a version that has an alias again."""
    if tags_of_version(model, version).get(names.TAG_PROMOTION) == _ROLLED_BACK:
        said = (names.TAG_PROMOTION, names.TAG_PROMOTION_ALIASES, names.TAG_PROMOTION_RUN)
        tag_version(model, version, dict.fromkeys(said, ""))
