"""What a promotion decided, and on which evidence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import pydantic_core

from ansor_mlflow import names
from ansor_mlflow.errors import CorrectnessError, ModelError, NotFasterError, UndecidedError
from ansor_mlflow.foreign import Code, Part, Report, Reported, Table
from ansor_mlflow.measuring import Deviation
from ansor_mlflow.steps.promotion.contest import Contest
from ansor_mlflow.tracking import html_page


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
class Promotion(Reported):
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
    def unreliable(self) -> str:
        """Why the times cannot be trusted; empty where they can."""
        return "; ".join(contest.unreliable for contest in self.contests if contest.unreliable)

    def require_won(self) -> None:
        """Checks that the candidate is the champion."""
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
        if self.unreliable:
            tags[names.TAG_PROMOTION_UNRELIABLE] = self.unreliable
        return tags

    def to_json(self) -> str:
        """All of it; JSON has no infinite numbers, and has null in their place."""
        return pydantic_core.to_json(self, indent=1, inf_nan_mode="null").decode()

    def report(self) -> Report:
        """The decision, the medians and the aliases."""
        medians = [
            f"medians of all turns: version {self.candidate} {contest.medians_ms[0]:.4g} ms, "
            f"{contest.opponent} {contest.medians_ms[1]:.4g} ms"
            for contest in self.contests
        ]
        aliases = self.aliases if self.is_won and not self.dry_run else ()
        moved = [f"models:/{self.model}@{alias}" for alias in aliases]
        return Report(f"{self.outcome.value}: {self.headline}: {self.reason}", [*medians, *moved], {"run": self.run_id})

    def page(self, commands: Sequence[str]) -> str:
        """All of it as a page that needs no network, with the commands that do it again."""
        facts = {"outcome": self.outcome.value, "model": self.model, "candidate": f"version {self.candidate}"}
        aliases = [(alias, f"version {before}" if before else "–") for alias, before in self.aliases.items()]
        errors = [(v, f"{error.max_rel_error:.4g}", f"{error.max_abs_error:.4g}") for v, error in self.errors.items()]
        parts: list[Part] = [self.reason, *self._notes(), Table([*facts.items()])]
        parts.append(Table(aliases, ("alias", "before"), "Aliases"))
        if errors:
            limit = f"Relative to the largest reference value; at most {self.tolerance or 0:.4g} passes."
            headers = ("version", ">relative error", ">absolute error")
            parts += [Table(errors, headers, "Outputs, against ONNX Runtime with the candidate's network"), limit]
        for contest in self.contests:
            parts += _contest_tables(contest, self.candidate)
            share = f"{100 * (1 - self.confidence):.3g}"
            parts.append(f"Each bound is wrong in at most {share} % of such comparisons.")
        parts += [Code(command, "" if index else "Again") for index, command in enumerate(commands)]
        title = self.headline[:1].upper() + self.headline[1:]
        return html_page(Report(title, [f"{self.target} · run {self.run_id}", *parts]))

    def _notes(self) -> list[str]:
        notes = ["This was a dry run: no alias was moved."] if self.dry_run else []
        if self.unreliable:
            notes.append(f"The times cannot be trusted: {self.unreliable}.")
        for contest in self.contests:
            error = self.errors.get(contest.champion)
            if not contest.same_network:
                notes.append(f"Version {contest.champion} is another network: speed was compared, not accuracy.")
            elif error and self.tolerance and not error.max_rel_error <= self.tolerance:
                notes.append(f"The outputs of {contest.opponent} are not those of the reference.")
        return notes


def _contest_tables(contest: Contest, candidate: str) -> list[Table]:
    ratio = contest.ratio
    bounds = {"ratio": ratio.estimate, "at least": ratio.lower, "at most": ratio.upper, "must be below": contest.limit}
    turns = enumerate(zip(contest.candidate_ms, contest.champion_ms, strict=True), 1)
    rows = [(str(turn), f"{mine:.4g}", f"{theirs:.4g}", f"{mine / theirs:.3f}") for turn, (mine, theirs) in turns]
    title = f"Latency: version {candidate} against {contest.opponent}"
    return [
        Table([(label, f"{value:.3f}") for label, value in bounds.items()], title=title),
        Table(rows, (">turn", ">candidate (ms)", ">champion (ms)", ">ratio")),
    ]
