"""Is a model slower than in an earlier sweep: both are compared with a rival that was measured beside each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlflow
import numpy as np
from mlflow.entities import Run

from ansor_mlflow import names
from ansor_mlflow.errors import UserInputError
from ansor_mlflow.measuring import Ratio
from ansor_mlflow.tracking import read_artifact, translated_errors

_TUNED = "tuned"
_CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Change:
    """The latency of a model over that in an earlier sweep; or why they cannot be compared."""

    ratio: Ratio | None = None
    rival: str = ""
    """Rival by whose latency both are divided; empty where none was measured beside both."""
    reason: str = ""

    def is_slower(self, limit: float) -> bool:
        """Whether it is slower by more than a share, beyond the noise."""
        return self.ratio is not None and self.ratio.lower > 1 + limit

    def __str__(self) -> str:
        if self.ratio is None:
            return self.reason
        low, high = self.ratio.lower - 1, self.ratio.upper - 1
        return f"{self.ratio.estimate - 1:+.1%} ({low:+.1%} to {high:+.1%})"


def ratio_of_runs(now: Sequence[float], before: Sequence[float]) -> Ratio:
    """The ratio of what two runs measured, in two turns each at least, with the interval that it lies in.

    Welch's t-test on logarithms, as neither the turns of two runs are pairs nor their noise is the same (Welch,
    Biometrika 34, 1947).
    """
    from scipy import stats

    logs = [np.log(np.asarray(values)) for values in (now, before)]
    difference = float(logs[0].mean() - logs[1].mean())
    parts = [float(values.var(ddof=1)) / len(values) for values in logs]
    variance = sum(parts)
    half = 0.0
    if variance:
        degrees = variance**2 / sum(part**2 / (len(values) - 1) for part, values in zip(parts, logs, strict=True))
        half = float(stats.t.ppf((1 + _CONFIDENCE) / 2, degrees)) * math.sqrt(variance)
    return Ratio(
        estimate=math.exp(difference),
        lower=math.exp(difference - half),
        upper=math.exp(difference + half),
        num_turns=min(len(now), len(before)),
    )


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What an evaluation measured."""

    turns_ms: Mapping[str, Sequence[float]]
    """Medians of the turns of the model and of each rival."""
    versions: Mapping[str, str]
    """Versions of the rivals."""
    best_rival: str


def compare(now: Measured, before: Measured) -> Change:
    """Compares two evaluations of a network."""
    same = [
        name
        for name in now.turns_ms.keys() & before.turns_ms.keys() - {_TUNED}
        if now.versions.get(name) == before.versions.get(name)
    ]
    rival = before.best_rival if before.best_rival in same else min(same, default="")
    if any(len(found.turns_ms.get(_TUNED, ())) < 2 for found in (now, before)):
        return Change(reason="fewer than two turns")
    return Change(ratio=ratio_of_runs(_relative(now, rival), _relative(before, rival)), rival=rival)


def _relative(measured: Measured, rival: str) -> list[float]:
    """The model's latency in each turn, over that of the rival."""
    tuned = measured.turns_ms[_TUNED]
    return [own / other for own, other in zip(tuned, measured.turns_ms.get(rival) or [1.0] * len(tuned), strict=True)]


def pipelines_of(sweep_run: str) -> dict[str, str]:
    """IDs of the last pipelines of a sweep that ended well, by the names of their entries."""
    with translated_errors("read the earlier sweep"):
        found = mlflow.get_run(sweep_run)
        if found.data.tags.get(names.TAG_STEP) != "sweep":
            raise UserInputError(f"against={sweep_run}: it is not the run of a sweep; give the ID of one")
        return read_artifact(sweep_run, names.SWEEP_FILE, dict[str, str])


def measured_of(pipeline: str) -> Measured:
    """What the evaluation of a pipeline measured."""
    with translated_errors("read an evaluation"):
        (evaluated, *_) = reversed(_below(mlflow.get_run(pipeline), f"tags.`{names.TAG_STEP}` = 'evaluate'"))
        run_id = str(evaluated.info.run_id)
        rivals = read_artifact(run_id, names.RIVALS_FILE, list[dict[str, Any]])
        return Measured(
            turns_ms=read_artifact(run_id, names.TURNS_FILE, dict[str, list[float]]),
            versions={str(rival["rival"]): str(rival.get("version")) for rival in rivals},
            best_rival=evaluated.data.tags.get(names.TAG_BEST_RIVAL, ""),
        )


def _below(run: Run, condition: str) -> list[Run]:
    """Runs below another one, oldest first."""
    return list(
        mlflow.search_runs(
            [run.info.experiment_id],
            filter_string=f"tags.mlflow.parentRunId = '{run.info.run_id}' and {condition}",
            order_by=["attributes.start_time ASC"],
            output_format="list",
        )
    )
