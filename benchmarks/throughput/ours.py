"""Our side: the step `tune`, called as the command `ansor-mlflow tune` calls it."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import mlflow

from ansor_mlflow import names
from ansor_mlflow.parameters import TuneOptions
from ansor_mlflow.steps.tuning import tune
from ansor_mlflow.trials import TrialStatus, TuningPlan, TuningResult, TuningRound
from throughput.job import Job, Outcome
from throughput.timeline import Sample


class _RoundTimeline:
    """A `TuningObserver` that notes what was known after each round."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.timeline: list[Sample] = []
        self.first_trial_s: float | None = None
        self.started_s = math.inf
        """When the tuner began, by `time.monotonic()`."""
        self.num_tasks = 0
        self.result: TuningResult | None = None

    def tuning_started(self, plan: TuningPlan) -> None:
        """Takes the time."""
        self.started_s = time.monotonic()
        self.num_tasks = len(plan.tasks)

    def round_finished(self, round_: TuningRound) -> None:
        """Adds a sample."""
        self.started_s = min(self.started_s, time.monotonic() - round_.elapsed_s)  # other observers were told earlier
        now_s, estimate_s = self._job.elapsed_s(), round_.estimated_latency_s
        estimate_ms = None if estimate_s is None else estimate_s * 1e3
        self.timeline.append(
            Sample(elapsed_s=now_s, trials=round_.total_trials, estimated_latency_ms=estimate_ms),
        )
        if self.first_trial_s is None and any(trial.status is TrialStatus.OK for trial in round_.trials):
            self.first_trial_s = now_s

    def tuning_finished(self, result: TuningResult) -> None:
        """Keeps the result."""
        self.result = result


def tune_ours(job: Job, directory: Path) -> Outcome:
    """Tunes a network as we do; the records are taken from the MLflow run to `directory/records`."""
    _log_rounds()
    observer = _RoundTimeline(job)
    options = TuneOptions(network=job.network, trials=job.trials, seed=job.seed, num_threads=job.num_threads)
    run_id = tune(options, [observer]).run_id
    tuning_s, wall_s = time.monotonic() - observer.started_s, job.elapsed_s()
    result = observer.result
    if result is None:
        raise RuntimeError(f"the tuning run {run_id} ended without a result")
    mlflow.artifacts.download_artifacts(run_id=run_id, artifact_path=names.RECORDS_DIR, dst_path=str(directory))
    trials_by_status: Counter[str] = Counter()
    for task in result.tasks:
        trials_by_status.update({status.value: number for status, number in task.num_trials.items() if number})
    return Outcome(
        num_tasks=observer.num_tasks,
        trials_by_status=trials_by_status,
        tuning_s=tuning_s,
        wall_s=wall_s,
        first_trial_s=observer.first_trial_s,
        search_s=result.durations.search_s,
        build_s=result.durations.build_s,
        run_s=result.durations.run_s,
        timeline=observer.timeline,
        details={"durations": asdict(result.durations), "stop_reason": result.stop_reason, "tuner_s": result.elapsed_s},
    )


def _log_rounds() -> None:
    """Sends the package's log to standard error, as the command line does."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("ansor_mlflow").setLevel(logging.INFO)
