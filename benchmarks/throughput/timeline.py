"""How the estimated latency of a network falls while it is tuned."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict


class Sample(BaseModel):
    """What was known at one moment of a tuning."""

    model_config = ConfigDict(frozen=True)

    elapsed_s: float
    """Seconds since the process was started."""
    trials: int
    """Trials measured so far, failed ones included."""
    estimated_latency_ms: float | None
    """Σ weight × best time over the tasks; None while a task with work has no valid trial."""


def estimate_at(timeline: Sequence[Sample], elapsed_s: float) -> float | None:
    """The estimate in milliseconds that holds at a moment; a tuning that is over keeps its last one."""
    known = [sample.estimated_latency_ms for sample in timeline if sample.elapsed_s <= elapsed_s]
    return known[-1] if known else None


def final_estimate(timeline: Sequence[Sample]) -> float | None:
    """The estimate in milliseconds at the end."""
    return timeline[-1].estimated_latency_ms if timeline else None


def time_to(timeline: Sequence[Sample], estimate_ms: float | None) -> float | None:
    """Seconds until the estimate is as low as `estimate_ms`; None if it never is, or there is nothing to reach."""
    if estimate_ms is None:
        return None
    reached = (
        sample.elapsed_s
        for sample in timeline
        if sample.estimated_latency_ms is not None and sample.estimated_latency_ms <= estimate_ms
    )
    return next(reached, None)
