"""The figures of each side, and the ratios between them. A ratio is ours over stock."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from pydantic import BaseModel, ConfigDict

from ansor_mlflow.trials import TrialStatus
from throughput.job import Outcome
from throughput.latency import EndToEnd
from throughput.process import MemoryUse
from throughput.timeline import Sample, estimate_at, final_estimate, time_to

_FIRST_MINUTE = 3
"""From this minute on the two sides are compared at equal wall-clock time."""
RATIOS = ("ratio_trials_per_minute", "ratio_time_to_stock_estimate", "ratio_first_trial", "ratio_latency")


class SideReport(BaseModel):
    """One tuning in figures. Times of day are seconds since its process was started."""

    model_config = ConfigDict(frozen=True)

    num_tasks: int
    trials: int
    """Candidates tried, failed ones included."""
    trials_ok: int
    trials_by_status: dict[str, int]
    tuning_s: float
    wall_s: float
    trials_per_minute: float
    """`trials` over `tuning_s`."""
    seconds_per_trial: dict[str, float]
    """By search, build, run and other; "other" is what is left of `tuning_s`, never below zero."""
    first_trial_s: float | None
    peak_memory_bytes: int
    estimated_latency_ms: float | None
    end_to_end_latency_ms: float | None
    """None where no trial worked."""
    end_to_end_turns_ms: list[float]
    coverage: dict[str, Any] | None
    details: dict[str, Any]
    timeline: list[Sample]
    memory: list[tuple[float, int]]
    """Seconds and bytes."""


class Minute(BaseModel):
    """What both sides had reached at the same time after their start."""

    model_config = ConfigDict(frozen=True)

    minute: int
    stock_ms: float | None
    ours_ms: float | None
    ours_better: bool


class Comparison(BaseModel):
    """Ours beside stock, for one seed."""

    model_config = ConfigDict(frozen=True)

    ratio_trials_per_minute: float
    ratio_time_to_stock_estimate: float | None
    """Time until ours has the estimate that stock ends with, over stock's `wall_s`; None if it never gets there."""
    ratio_first_trial: float | None
    ratio_latency: float | None
    """Median over the turns: a disturbance that lasts for a turn hits both libraries."""
    time_to_stock_final_estimate_s: float | None
    equal_time: list[Minute]
    ours_better_at_all_minutes: bool | None
    """None where both were over before the first minute that counts."""


def side_report(outcome: Outcome, memory: MemoryUse, end_to_end: EndToEnd | None) -> SideReport:
    """Puts the figures of a side together."""
    trials = sum(outcome.trials_by_status.values())
    parts = {"search": outcome.search_s, "build": outcome.build_s, "run": outcome.run_s}
    parts["other"] = max(0.0, outcome.tuning_s - sum(parts.values()))
    return SideReport(
        num_tasks=outcome.num_tasks,
        trials=trials,
        trials_ok=outcome.trials_by_status.get(TrialStatus.OK.value, 0),
        trials_by_status=outcome.trials_by_status,
        tuning_s=outcome.tuning_s,
        wall_s=outcome.wall_s,
        trials_per_minute=trials / outcome.tuning_s * 60,
        seconds_per_trial={name: seconds / max(trials, 1) for name, seconds in parts.items()},
        first_trial_s=outcome.first_trial_s,
        peak_memory_bytes=memory.peak_bytes,
        estimated_latency_ms=final_estimate(outcome.timeline),
        end_to_end_latency_ms=end_to_end.latency_ms if end_to_end else None,
        end_to_end_turns_ms=end_to_end.turns_ms if end_to_end else [],
        coverage=end_to_end.coverage if end_to_end else None,
        details=outcome.details,
        timeline=outcome.timeline,
        memory=memory.series,
    )


def compare(stock: SideReport, ours: SideReport) -> Comparison:
    """Compares the sides of one seed."""
    reached_s = time_to(ours.timeline, stock.estimated_latency_ms)
    minutes = _equal_time(stock, ours)
    return Comparison(
        ratio_trials_per_minute=ours.trials_per_minute / stock.trials_per_minute,
        ratio_time_to_stock_estimate=_ratio(reached_s, stock.wall_s),
        ratio_first_trial=_ratio(ours.first_trial_s, stock.first_trial_s),
        ratio_latency=_ratio_in_turns(ours.end_to_end_turns_ms, stock.end_to_end_turns_ms),
        time_to_stock_final_estimate_s=reached_s,
        equal_time=minutes,
        ours_better_at_all_minutes=all(minute.ours_better for minute in minutes) if minutes else None,
    )


def medians(comparisons: Sequence[Comparison]) -> dict[str, float | None]:
    """The median of each ratio over the seeds that have it."""
    found: dict[str, float | None] = {}
    for name in RATIOS:
        values = [value for comparison in comparisons if (value := getattr(comparison, name)) is not None]
        found[name] = median(values) if values else None
    return found


def _equal_time(stock: SideReport, ours: SideReport) -> list[Minute]:
    """Both estimates at each whole minute until the longer run is over."""
    rows = []
    for minute in range(_FIRST_MINUTE, int(max(stock.wall_s, ours.wall_s) // 60) + 1):
        stock_ms, ours_ms = (estimate_at(side.timeline, minute * 60) for side in (stock, ours))
        better = ours_ms is not None and (stock_ms is None or ours_ms < stock_ms)
        rows.append(Minute(minute=minute, stock_ms=stock_ms, ours_ms=ours_ms, ours_better=better))
    return rows


def _ratio_in_turns(ours_ms: Sequence[float], stock_ms: Sequence[float]) -> float | None:
    ratios = [ours / stock for ours, stock in zip(ours_ms, stock_ms, strict=False)]
    return median(ratios) if ratios else None


def _ratio(ours: float | None, stock: float | None) -> float | None:
    return ours / stock if ours is not None and stock else None
