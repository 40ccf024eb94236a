"""What the command `promote` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ansor_mlflow.cli.console import say

if TYPE_CHECKING:
    from ansor_mlflow.steps.promotion import Promotion, Rollback


def print_promotion(promotion: Promotion) -> None:
    """Prints the decision, the evidence and the aliases."""
    say(f"{promotion.outcome.value}: {promotion.headline}: {promotion.reason}")
    for contest in promotion.contests:
        mine, theirs = contest.medians_ms
        versions = f"version {promotion.candidate} {mine:.4g} ms, {contest.opponent} {theirs:.4g} ms"
        say(f"medians of all turns: {versions}")
    for alias in promotion.aliases if promotion.is_won and not promotion.dry_run else ():
        say(f"models:/{promotion.model}@{alias}")
    say(f"run    {promotion.run_id}")


def print_rollback(rollback: Rollback) -> None:
    """Prints where each alias points now."""
    for alias, (before, now) in rollback.aliases.items():
        where = f"points to version {now} again" if now else "is removed again"
        say(f"{alias} of {rollback.model} {where}, it pointed to version {before}")
    say(f"run    {rollback.run_id}")
