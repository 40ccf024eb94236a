"""What a promotion decided, and on which evidence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import pydantic_core

from ansor_mlflow import names
from ansor_mlflow.errors import CorrectnessError, ModelError, NotFasterError, UndecidedError
from ansor_mlflow.measuring import Deviation
from ansor_mlflow.steps.promotion.contest import Contest
from ansor_mlflow.tracking import html_table, render_page


class PromotionOutcome(str, Enum):
    """How a promotion ended."""

    PROMOTED = "promoted"
    """The candidate is faster than the champion by as much as was asked for."""
    NO_CHAMPION = "no_champion"
    """There was no champion; the candidate's outputs are right, and it is the champion now."""
    ALREADY_CHAMPION = "already_champion"
    """The candidate is the champion; nothing was measured."""
    LOST = "lost"
    """The candidate is not faster by as much as was asked for."""
    INCONCLUSIVE = "inconclusive"
    """The turns were used up before it was clear."""
    WRONG = "wrong"
    """The candidate's outputs are not those of ONNX Runtime."""
    NOT_MEASURABLE = "not_measurable"
    """The champion cannot be loaded on this host."""
    OVERTAKEN = "overtaken"
    """The champion changed while this was measured."""


_ERRORS = {
    PromotionOutcome.LOST: NotFasterError,
    PromotionOutcome.INCONCLUSIVE: UndecidedError,
    PromotionOutcome.WRONG: CorrectnessError,
    PromotionOutcome.NOT_MEASURABLE: ModelError,
    PromotionOutcome.OVERTAKEN: UndecidedError,
}


@dataclass(frozen=True, kw_only=True)
class Promotion:
    """A decision with its evidence."""

    run_id: str
    model: str
    """Name of the registered model."""
    candidate: str
    """The candidate's version."""
    target: str
    """Short description of this host with the candidate's threads, such as "llvm znver4 ×2"."""
    outcome: PromotionOutcome
    reason: str
    """Why it ended so, in one sentence, with what to do next where there is something to do."""
    aliases: dict[str, str]
    """The aliases that were to be moved, with the versions that they pointed to; empty for a new one."""
    dry_run: bool
    confidence: float
    tolerance: float | None
    """Largest relative error that passes; None where nothing was checked."""
    errors: dict[str, Deviation]
    """How far outputs are from ONNX Runtime's, by version or rival; the reference is the candidate's network."""
    contests: tuple[Contest, ...]
    """The measurements against each champion; usually there is one."""

    @property
    def is_won(self) -> bool:
        """Whether the candidate is, or with `dry_run` would be, the new champion."""
        return self.outcome in (PromotionOutcome.PROMOTED, PromotionOutcome.NO_CHAMPION)

    @property
    def headline(self) -> str:
        """What became of the candidate."""
        to = f"version {self.candidate} of {self.model}"
        if self.is_won:
            return f"{to} {'would be' if self.dry_run else 'is now'} {' and '.join(self.aliases)}"
        is_it = set(self.aliases.values()) == {self.candidate}
        return f"{to} is {'' if is_it else 'not '}{' and '.join(self.aliases)}"

    @property
    def distrust(self) -> str:
        """Why the times cannot be trusted; empty where they can."""
        return "; ".join(contest.distrust for contest in self.contests if contest.distrust)

    def require_won(self) -> None:
        """Checks that the candidate is the champion.

        Raises:
            AnsorMlflowError: It is not; the exit code tells the outcomes apart.
        """
        kind = _ERRORS.get(self.outcome)
        if kind is not None:
            raise kind(f"{self.headline} ({self.outcome.value}): {self.reason}")

    def metrics(self) -> dict[str, float]:
        """What the run shows: of several contests the one that was closest."""
        found = {}
        if self.candidate in self.errors:
            difference = self.errors[self.candidate]
            found = {names.MAX_ABS_ERROR: difference.max_abs_error, names.MAX_REL_ERROR: difference.max_rel_error}
        if self.contests:
            closest = max(self.contests, key=lambda contest: contest.ratio.estimate)
            latency_ms, champion_ms = closest.medians_ms
            found |= {
                names.LATENCY_MS: latency_ms,
                names.CHAMPION_LATENCY_MS: champion_ms,
                names.LATENCY_RATIO: closest.ratio.estimate,
                names.LATENCY_RATIO_LOWER: closest.ratio.lower,
                names.LATENCY_RATIO_UPPER: closest.ratio.upper,
                names.NUM_TURNS: closest.ratio.num_turns,
                names.PROBE_SPREAD: closest.probe_spread,
            }
            if closest.champion in self.errors:
                found[names.CHAMPION_MAX_REL_ERROR] = self.errors[closest.champion].max_rel_error
        return found

    def tags(self) -> dict[str, str]:
        """What is said about the decision on the run and on the version."""
        tags = {names.TAG_PROMOTION: self.outcome.value, names.TAG_PROMOTION_ALIASES: " ".join(self.aliases)}
        if self.contests:
            ratios = (f"{c.ratio.estimate:.4f} [{c.ratio.lower:.4f}, {c.ratio.upper:.4f}]" for c in self.contests)
            tags[names.TAG_PROMOTION_RATIO] = "; ".join(ratios)
            tags[names.TAG_PROMOTION_CHAMPION] = " ".join(contest.champion for contest in self.contests)
        if self.distrust:
            tags[names.TAG_PROMOTION_DISTRUST] = self.distrust
        return tags

    def to_json(self) -> str:
        """All of it; JSON has no infinite numbers, and has null in their place."""
        return pydantic_core.to_json(self, indent=1, inf_nan_mode="null").decode()

    def to_html(self, commands: Sequence[str]) -> str:
        """A page that needs no network.

        Args:
            commands: Command lines that do it again.
        """
        return render_page(
            "promotion.html",
            title=self.headline[:1].upper() + self.headline[1:],
            subtitle=f"{self.target} · run {self.run_id}",
            promotion=self,
            summary=[self.reason, *self._notes()],
            contests=[_contest_rows(contest) for contest in self.contests],
            commands=commands,
        )

    def _repr_html_(self) -> str:
        rows = [
            (f"against {contest.opponent}", f"{contest.medians_ms[0]:.4g} ms, {contest.text}")
            for contest in self.contests
        ]
        return html_table(f"{self.outcome.value}: {self.headline}: {self.reason}", [*rows, ("run", self.run_id)])

    def _notes(self) -> list[str]:
        notes = ["This was a dry run: no alias was moved."] if self.dry_run else []
        if self.distrust:
            notes.append(f"The times cannot be trusted: {self.distrust}.")
        for contest in self.contests:
            error = self.errors.get(contest.champion)
            if not contest.same_network:
                notes.append(f"Version {contest.champion} is another network: speed was compared, not accuracy.")
            elif error and self.tolerance and not error.max_rel_error <= self.tolerance:
                notes.append(f"The outputs of {contest.opponent} are not those of the reference.")
        return notes


def _contest_rows(contest: Contest) -> dict[str, Any]:
    turns = zip(contest.candidate_ms, contest.champion_ms, strict=True)
    return {
        "contest": contest,
        "turns": [(turn, mine, theirs, mine / theirs) for turn, (mine, theirs) in enumerate(turns, 1)],
    }
