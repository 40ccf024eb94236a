"""The stock side: MetaSchedule's own `tune_relax` with its defaults.

Its builder and its runner are wrapped, so that the time of each trial is known, though MetaSchedule looks at results
much later: it joins none before every task was picked once.
"""

from __future__ import annotations

import importlib
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.utils import cpu_count

from ansor_mlflow import names
from ansor_mlflow.lowering import LoweredNetwork, lower
from ansor_mlflow.networks import load_network
from ansor_mlflow.parameters import TuneOptions
from ansor_mlflow.settings import LoweringSettings
from ansor_mlflow.trials import StopReason, TaskInfo, TaskState, Trial, TrialStatus, estimated_latency_s
from throughput.job import Job, Outcome
from throughput.target import target_of
from throughput.timeline import Sample

_DEFAULT_TRIALS_PER_ROUND = 64
_SEARCH_SCOPES = ("InitializeTask", "EvoSearch/", "MeasureCallback/UpdateCostModel")
"""Scopes of MetaSchedule's profiler whose time is the search's; training the cost model is a part of it, as in ours."""


def trials_per_round(trials: int, num_tasks: int) -> int:
    """The largest round, up to MetaSchedule's default of 64, with which the budget reaches every task."""
    return min(_DEFAULT_TRIALS_PER_ROUND, max(1, trials // num_tasks))


@dataclass(frozen=True)
class MeasuredTrial:
    """A trial and when it was known how it ended, in seconds since the process was started."""

    finished_s: float
    trial: Trial


class TrialLog:
    """What the wrapped builder and runner, and a callback, see of one tuning."""

    def __init__(self, job: Job) -> None:
        self.elapsed_s = job.elapsed_s
        self.build_s = 0.0
        self.run_s = 0.0
        self.trials: list[MeasuredTrial] = []
        self._built_s: dict[Any, float] = {}
        self._measured_s: dict[str, float] = {}

    def built(self, results: Sequence[Any], started_s: float) -> None:
        """Takes note of a round of builds that has just ended."""
        now_s = self.elapsed_s()
        self.build_s += now_s - started_s
        self._built_s |= dict.fromkeys(results, now_s)  # MetaSchedule's objects are hashed by identity

    def measured(self, artifact: str, started_s: float) -> None:
        """Takes note of a measurement that has just ended."""
        now_s = self.elapsed_s()
        self.run_s += now_s - started_s
        self._measured_s[artifact] = now_s

    def joined(self, task: str, built: Any, result: Any) -> None:
        """Takes the result of a trial, which was measured before."""
        step = len(self.trials) + 1
        if built.error_msg is not None:
            finished_s = self._built_s[built]
            trial = _failed_trial(step, task, TrialStatus.BUILD_FAILED, built.error_msg)
        elif result.error_msg is not None:
            finished_s = self._measured_s[str(built.artifact_path)]
            trial = _failed_trial(step, task, TrialStatus.RUN_FAILED, result.error_msg)
        else:
            finished_s = self._measured_s[str(built.artifact_path)]
            run_s = tuple(float(seconds) for seconds in result.run_secs)
            trial = Trial(step=step, task=task, status=TrialStatus.OK, run_s=run_s)
        self.trials.append(MeasuredTrial(finished_s, trial))


def _failed_trial(step: int, task: str, status: TrialStatus, message: Any) -> Trial:
    error = str(message)
    timed_out = ": Timeout, killed after" in error
    return Trial(step=step, task=task, status=TrialStatus.TIMED_OUT if timed_out else status, error=error)


@derived_object
class _TimedBuilder(ms.builder.PyBuilder):  # type: ignore[misc]
    """A builder that notes how long another one takes."""

    def __init__(self, builder: Any, log: TrialLog) -> None:
        super().__init__()
        self._builder = builder
        self._log = log

    def build(self, build_inputs: list[Any]) -> list[Any]:
        started_s = self._log.elapsed_s()
        results = list(self._builder.build(build_inputs))
        self._log.built(results, started_s)
        return results


@derived_object
class _TimedRunner(ms.runner.PyRunner):  # type: ignore[misc]
    """A runner that notes when each measurement of another one ends.

    It hands the inputs on one by one, as `LocalRunner.run`, which returns when all are measured, does inside.
    """

    def __init__(self, runner: Any, log: TrialLog) -> None:
        super().__init__()
        self._runner = runner
        self._log = log

    def run(self, runner_inputs: list[Any]) -> list[Any]:
        futures = []
        for runner_input in runner_inputs:
            started_s = self._log.elapsed_s()
            futures += self._runner.run([runner_input])
            self._log.measured(str(runner_input.artifact_path), started_s)
        return futures


@derived_object
class _TrialCallback(ms.measure_callback.PyMeasureCallback):  # type: ignore[misc]
    """Tells the log which task a trial belongs to and how it ended."""

    def __init__(self, log: TrialLog) -> None:
        super().__init__()
        self._log = log

    def apply(
        self,
        task_scheduler: Any,
        task_id: int,
        measure_candidates: list[Any],
        builder_results: list[Any],
        runner_results: list[Any],
    ) -> None:
        task = str(task_scheduler.tasks_[task_id].ctx.task_name)
        for _, built, result in zip(measure_candidates, builder_results, runner_results, strict=True):
            self._log.joined(task, built, result)


def tune_stock(job: Job, directory: Path) -> Outcome:
    """Tunes a network as MetaSchedule does; its database goes to `directory/records`."""
    target = target_of(job)
    lowered = lower(load_network(job.network, seed=job.seed).model, target, LoweringSettings(algorithm="direct"))
    importlib.import_module("tvm.s_tir.tensor_intrin")  # tune_relax would import it, within the time that is taken
    log = TrialLog(job)
    round_size = job.stock_trials_per_round or trials_per_round(job.trials, len(lowered.tasks))
    tuning_s, profile_s = _tune(job, lowered, target, round_size, log, directory / names.RECORDS_DIR)
    wall_s = job.elapsed_s()
    return Outcome(
        num_tasks=len(lowered.tasks),
        trials_by_status=Counter(measured.trial.status.value for measured in log.trials),
        tuning_s=tuning_s,
        wall_s=wall_s,
        first_trial_s=min((m.finished_s for m in log.trials if m.trial.status is TrialStatus.OK), default=None),
        search_s=_search_s(profile_s),
        build_s=log.build_s,
        run_s=log.run_s,
        timeline=replay([task.info for task in lowered.tasks], log.trials),
        details={"trials_per_round": round_size, "search_threads": cpu_count(logical=False), "profile_s": profile_s},
    )


def _tune(
    job: Job, lowered: LoweredNetwork, target: Any, round_size: int, log: TrialLog, records: Path
) -> tuple[float, dict[str, float]]:
    """Tunes; returns the seconds that it took, and those of the profiler's scopes."""
    measure = TuneOptions()
    evaluator = ms.runner.EvaluatorConfig(
        number=measure.number,
        repeat=measure.repeat,
        min_repeat_ms=measure.min_repeat_ms,
        enable_cpu_cache_flush=measure.cache_flush,
    )
    builder = _TimedBuilder(ms.builder.LocalBuilder(max_workers=cpu_count(logical=False)), log)  # as tune_tasks does
    runner = _TimedRunner(ms.runner.LocalRunner(evaluator_config=evaluator), log)
    records.mkdir()
    np.random.seed(job.seed)  # the untrained XGBModel draws from NumPy's global generator
    started_s = time.monotonic()
    with ms.Profiler() as profiler:
        ms.relax_integration.tune_relax(
            lowered.mod,
            {},
            target,
            str(records),
            job.trials,
            num_trials_per_iter=round_size,
            builder=builder,
            runner=runner,
            measure_callbacks=[*ms.MeasureCallback.create("default"), _TrialCallback(log)],
            seed=job.seed,
        )
    tuning_s = time.monotonic() - started_s
    return tuning_s, {str(scope): float(seconds) for scope, seconds in profiler.get().items()}


def _search_s(profile_s: Mapping[str, float]) -> float:
    """Seconds of the search's scopes, those inside of another scope left out."""
    scopes = [scope for scope in profile_s if scope.startswith(_SEARCH_SCOPES)]
    outer = [scope for scope in scopes if not any(scope.startswith(f"{other}/") for other in scopes)]
    return sum(profile_s[scope] for scope in outer)


def replay(tasks: Sequence[TaskInfo], trials: Sequence[MeasuredTrial]) -> list[Sample]:
    """The timeline of trials in the order in which they were measured.

    A task that computes nothing and got no trial counts as having nothing to tune, as in ours.
    """
    tried = {measured.trial.task for measured in trials}
    states = {info.name: TaskState(info=info) for info in tasks}
    for state in states.values():
        if not state.info.flops and state.info.name not in tried:
            state.stop_reason = StopReason.NOTHING_TO_TUNE
    samples = []
    for number, measured in enumerate(sorted(trials, key=lambda measured: measured.finished_s), start=1):
        states[measured.trial.task].add(measured.trial)
        estimate_s = estimated_latency_s(tuple(states.values()))
        estimate_ms = None if estimate_s is None else estimate_s * 1e3
        samples.append(Sample(elapsed_s=measured.finished_s, trials=number, estimated_latency_ms=estimate_ms))
    return samples
