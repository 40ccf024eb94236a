"""What the command `promote` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ansor_mlflow.steps.promotion import Promotion, Rollback


def print_promotion(promotion: Promotion) -> None:
    """Prints the decision, the evidence and the aliases."""
    print(f"{promotion.outcome.value}: {promotion.headline}: {promotion.reason}")
    for contest in promotion.contests:
        mine, theirs = contest.medians_ms
        versions = f"version {promotion.candidate} {mine:.4g} ms, {contest.opponent} {theirs:.4g} ms"
        print(f"medians of all turns: {versions}")
    for alias in promotion.aliases if promotion.is_won and not promotion.dry_run else ():
        print(f"models:/{promotion.model}@{alias}")
    print(f"run    {promotion.run_id}")


def print_rollback(rollback: Rollback) -> None:
    """Prints where each alias points now."""
    for alias, (before, now) in rollback.aliases.items():
        where = f"points to version {now} again" if now else "is removed again"
        print(f"{alias} of {rollback.model} {where}, it pointed to version {before}")
    print(f"run    {rollback.run_id}")
