"""What the benchmark and its child processes tell each other, as JSON files in the directory of one tuning."""

from __future__ import annotations

import time
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from throughput.timeline import Sample

Side = Literal["stock", "ours"]

JOB_FILE = "job.json"
OUTCOME_FILE = "outcome.json"


class Job(BaseModel):
    """One tuning, to be done by a child process."""

    model_config = ConfigDict(frozen=True)

    side: Side
    network: str
    trials: int
    seed: int
    num_threads: int
    stock_trials_per_round: int | None
    """None lets the child choose: see `stock.trials_per_round`."""
    started_s: float
    """`time.monotonic()` when the child was started. On Linux that clock is the same in all processes."""

    def elapsed_s(self) -> float:
        """Seconds since the child was started."""
        return time.monotonic() - self.started_s


class Outcome(BaseModel):
    """How a tuning went. Times of day are seconds since the child was started."""

    model_config = ConfigDict(frozen=True)

    num_tasks: int
    trials_by_status: dict[str, int]
    """By the values of `ansor_mlflow.trials.TrialStatus`."""
    tuning_s: float
    """Without imports and lowering; see the benchmark's README."""
    wall_s: float
    """From the start of the process to the end of the tuning, imports and lowering included."""
    first_trial_s: float | None
    """When the first trial that worked was measured."""
    search_s: float
    build_s: float
    run_s: float
    timeline: list[Sample]
    details: dict[str, Any]
    """Figures that only one side has."""
