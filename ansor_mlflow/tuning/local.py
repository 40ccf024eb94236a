"""Tunes a lowered network on this host: the engine with its worker processes and its database."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ansor_mlflow import names
from ansor_mlflow.lowering import LoweredNetwork
from ansor_mlflow.options import TuneOptions
from ansor_mlflow.targets import fingerprint
from ansor_mlflow.trials import TuningObserver, TuningPlan, TuningResult
from ansor_mlflow.tuning.builder import LocalBuilder
from ansor_mlflow.tuning.engine import Tuner, resolve_num_trials
from ansor_mlflow.tuning.runner import LocalRunner, MeasureSettings

if TYPE_CHECKING:
    from tvm.target import Target


@dataclass(frozen=True, kw_only=True)
class TuningJob:
    """What is tuned, for what, and where its records go."""

    network: str
    lowered: LoweredNetwork
    target: Target
    num_threads: int
    records: Path
    """Directory of the database; every trial is in it as soon as its round has ended."""


def tune_locally(job: TuningJob, options: TuneOptions, observers: Sequence[TuningObserver] = ()) -> TuningResult:
    """Tunes a network with builds and measurements on this host.

    The records directory also gets the trained cost model, in XGBoost's own format.

    Raises:
        UserInputError: The budget is smaller than the number of tasks.
        MachineError: The cost model's package is missing.
    """
    from tvm.s_tir.meta_schedule.database import JSONDatabase

    job.records.mkdir(parents=True, exist_ok=True)
    num_trials = resolve_num_trials(options, len(job.lowered.tasks))
    builder = LocalBuilder(job.target, max_workers=job.num_threads, timeout_s=options.measure_timeout_s)
    runner = LocalRunner(_measure_settings(options, job.num_threads))
    with contextlib.closing(builder), contextlib.closing(runner):
        tuner = Tuner(
            job.lowered.tasks,
            target=job.target,
            options=options,
            num_trials=num_trials,
            search_threads=job.num_threads if options.search_threads == "auto" else options.search_threads,
            database=JSONDatabase(work_dir=str(job.records)),
            builder=builder,
            runner=runner,
            observers=observers,
        )
        plan = TuningPlan(
            network=job.network,
            target=fingerprint(job.target, job.num_threads).description,
            tasks=tuple(task.info for task in job.lowered.tasks),
            num_trials=num_trials,
        )
        try:
            return tuner.tune(plan)
        finally:
            tuner.save_cost_model(job.records / names.COST_MODEL_FILE)


def _measure_settings(options: TuneOptions, num_threads: int) -> MeasureSettings:
    return MeasureSettings(
        number=options.number,
        repeat=options.repeat,
        min_repeat_ms=options.min_repeat_ms,
        cache_flush=options.cache_flush,
        num_threads=num_threads,
        timeout_s=options.measure_timeout_s,
    )
