"""Which pipeline an entry gets next, and which entry comes first."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ansor_mlflow.commands.sweep.results import EntryResult

_NUM_PARTS = 4
"""Parts in which an entry gets its trials where a budget may end before all have theirs."""
_SHORT_MINUTES = 1.0
"""Minutes of trials up to which an entry gets no model without them first, as that takes no less."""

_NO_LIMIT_MINUTES = 7 * 24 * 60


@dataclass(frozen=True, kw_only=True)
class Allowance:
    """What a sweep may still spend; infinite where nothing was said of it."""

    trials: float
    minutes: float

    @property
    def is_limited(self) -> bool:
        """Whether not all entries may get all of their trials."""
        return math.isfinite(self.trials) or math.isfinite(self.minutes)


def next_pipeline(entry: EntryResult, left: Allowance) -> dict[str, str] | None:
    """The parameters that the next pipeline of an entry is given; None where it gets none."""
    num_trials = _next_trials(entry, left)
    is_long = entry.plan.expected_minutes > _SHORT_MINUTES and not entry.num_measured
    if not entry.run_id and (num_trials is None or is_long):
        return {"trials": "0"}  # so that none is without a model when the budget ends
    if num_trials is None:
        return None
    given = {"trials": str(num_trials)}
    if entry.tune_run:
        given["resume_run"] = entry.tune_run
    own = entry.entry.options.max_minutes
    if math.isfinite(left.minutes):  # the tuner counts those that it has had
        given["max_minutes"] = f"{min(left.minutes + entry.tuned_minutes, own or math.inf):.3g}"
    elif entry.tune_run:  # which keeps its limit otherwise
        given["max_minutes"] = f"{own or _NO_LIMIT_MINUTES:.5g}"
    return given


def _next_trials(entry: EntryResult, left: Allowance) -> int | None:
    """Trials that the tuning of an entry is to have after its next part; None where there is no such part."""
    may_measure = entry.num_left and left.minutes > 0 and left.trials > 0
    if not may_measure:
        return max(entry.num_begun, entry.plan.num_layers) if entry.is_behind else None
    part = math.ceil(entry.plan.num_trials / _NUM_PARTS) if left.is_limited else entry.num_left
    part = min(entry.num_left, max(part, entry.plan.num_layers))
    num_trials = entry.num_begun + int(min(left.trials, part))
    return num_trials if num_trials >= entry.plan.num_layers else None  # each task needs one


def rank(entry: EntryResult, left: Allowance, *, is_shared: bool) -> tuple[bool, bool, float]:
    """What of several entries that may run is the largest for the one that is next.

    Those without a model come first. An entry that shares tasks with one that is being tuned (`is_shared`) waits for
    its records, while there are others. Where all get all of their trials, the longest is first, so that no node is
    left with it at the end; else that of which the next trials are expected to gain most.
    """
    is_new = not entry.run_id
    worth = entry.expected_gain if left.is_limited and not is_new else entry.plan.expected_minutes
    return is_new, not is_shared, worth
