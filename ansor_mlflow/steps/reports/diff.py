"""The command `diff`: which tasks of two tunings differ by more than the noise, and what else differs."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import mlflow
from mlflow.entities import Run

from ansor_mlflow import names
from ansor_mlflow.device import DeviceFingerprint
from ansor_mlflow.errors import RecordsError, SlowerError, UserInputError
from ansor_mlflow.files import scratch_directory
from ansor_mlflow.options import DiffOptions, is_uri
from ansor_mlflow.records import FAILED_RUN_S, find_records, open_database, read_fingerprint
from ansor_mlflow.steps.records import fetch_run, tuning_of
from ansor_mlflow.steps.reports.trials import TaskRow
from ansor_mlflow.tracking import html_table, pinned_uri, read_artifact, translated_errors

_log = logging.getLogger("ansor_mlflow")
_SINGLE_ERROR = 0.03
"""Relative standard error of a time that was measured once: repeated measurements differ by 3 to 5 %."""
_NUM_ERRORS = 2.0
"""Standard errors by which a difference exceeds the noise."""

TaskVerdict = Literal["faster", "slower", "same", "only_first", "only_second"]


@dataclass(frozen=True, kw_only=True)
class TaskDifference:
    """A task of either tuning; times are seconds per call."""

    task: str
    workload_hash: str
    weight: int
    """Calls of the task in the network, in the first tuning that has it."""
    first_s: float | None
    """Time of the record that would be applied in the first tuning; None where there is none."""
    second_s: float | None
    share: float
    """Share of the network's time in the first tuning that has the task, from 0 to 1."""
    noise: float
    """Relative difference that the noise of the two measurements explains."""
    verdict: TaskVerdict
    """What the second tuning is, compared with the first."""

    @property
    def ratio(self) -> float | None:
        """The second time over the first."""
        return self.second_s / self.first_s if self.first_s and self.second_s else None


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One of the two."""

    given: str
    run_id: str
    """ID of the tuning run."""
    name: str
    device: str
    """Short description of the device, such as "llvm znver4 ×2"."""
    estimated_ms: float
    """Σ weight × time over the tasks that both have."""
    latency_ms: float | None
    """Latency as measured end to end; None for a tuning without an evaluation."""
    distrust: str = ""
    """Why its times cannot be trusted; empty where they can."""


@dataclass(frozen=True, kw_only=True)
class TuningDifference:
    """What differs between two tunings."""

    first: Compared
    second: Compared
    tasks: tuple[TaskDifference, ...]
    """Tasks of both tunings, those that cost most first."""
    params: dict[str, tuple[str | None, str | None]]
    """Parameters that differ, with both values."""
    device: dict[str, tuple[str | None, str | None]]
    """Entries of the fingerprints that differ, with both values."""
    versions: dict[str, tuple[str | None, str | None]]
    """Packages whose versions differ, with both versions."""

    def _repr_html_(self) -> str:
        rows = [
            (task.task, f"{task.share:.1%}", f"{task.ratio:.3f}" if task.ratio else "", task.verdict)
            for task in self.tasks
        ]
        title = f"{self.second.name} against {self.first.name}"
        return html_table(title, rows, ("task", "share", "second / first", "the second is"))

    @property
    def ratio(self) -> float | None:
        """The second latency over the first: measured end to end, or else estimated over the common tasks."""
        if self.first.latency_ms and self.second.latency_ms:
            return self.second.latency_ms / self.first.latency_ms
        return self.second.estimated_ms / self.first.estimated_ms if self.first.estimated_ms else None

    @property
    def distrust(self) -> str:
        """Why the times cannot be compared; empty where they can."""
        sides = (self.first, self.second) if self.first.run_id != self.second.run_id else (self.first,)
        return "; ".join(f"{side.given}: {side.distrust}" for side in sides if side.distrust)

    def require_not_slower(self, tolerance: float, *, force: bool = False) -> None:
        """Checks the second against the first. Times that cannot be trusted are a warning.

        Args:
            tolerance: Share by which it may be slower.
            force: Whether times that cannot be trusted are checked, too.

        Raises:
            SlowerError: It is slower by more than the tolerance, or lacks tasks that the first has.
        """
        lost = [task for task in self.tasks if task.verdict == "only_first"]
        if lost:
            raise SlowerError(
                f"{self.second.given} has no record of {len(lost)} tasks that {self.first.given} has, such as "
                f"{lost[0].task}; tune it with as many trials"
            )
        if self.ratio is None or self.ratio <= 1 + tolerance:
            return
        if self.distrust and not force:
            _log.warning(
                "%s is %.1f%% slower than %s, which is no error because the times cannot be trusted (%s); tune or "
                "evaluate again, or give force",
                *(self.second.given, (self.ratio - 1) * 100, self.first.given, self.distrust),
            )
            return
        slower = next((task.task for task in self.tasks if task.verdict == "slower"), None)
        raise SlowerError(
            f"{self.second.given} is {self.ratio - 1:.1%} slower than {self.first.given}, allowed are {tolerance:.1%}"
            + (f"; look at {slower} first" if slower else "; no single task is, look at the device and the versions")
        )


def diff_runs(options: DiffOptions) -> TuningDifference:
    """Compares two tunings task by task.

    Raises:
        UserInputError: There is no such run or model version, or it comes from no tuning.
        RecordsError: The records of one are damaged, or the tuning did not end.
        MachineError: A server is away.
    """
    with scratch_directory() as scratch:
        first, second = (_load(given, Path(scratch, name)) for name, given in zip("ab", options.runs, strict=True))
    common = first.tasks.keys() & second.tasks.keys()
    found = TuningDifference(
        first=first.compared(common),
        second=second.compared(common),
        tasks=tuple(_task_differences(first, second)),
        params=_differing(first.params, second.params),
        device=_differing(_flat(first.device), _flat(second.device)),
        versions=_differing(first.versions, second.versions),
    )
    if found.distrust:
        _log.warning("the times cannot be trusted: %s", found.distrust)
    return found


# -- what is read ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Environment:
    """What is read of `environment.json`."""

    python: str
    packages: dict[str, str | None]


@dataclass(frozen=True)
class _Task:
    name: str
    weight: int
    run_s: float
    error: float
    """Relative standard error of `run_s`."""


@dataclass(frozen=True)
class _Side:
    given: str
    run: Run
    """The tuning run."""
    latency_ms: float | None
    tasks: Mapping[str, _Task]
    """Tasks with a record, by the structural hash of their layer: of several ways the fastest."""
    device: DeviceFingerprint
    versions: Mapping[str, str | None]
    distrust: str

    @property
    def params(self) -> Mapping[str, str]:
        return {name: value for name, value in self.run.data.params.items() if not name.endswith("_used")} | {
            name.removesuffix("_used"): value for name, value in self.run.data.params.items() if name.endswith("_used")
        }

    @property
    def total_s(self) -> float:
        return sum(task.weight * task.run_s for task in self.tasks.values())

    def compared(self, common: set[str]) -> Compared:
        return Compared(
            given=self.given,
            run_id=self.run.info.run_id,
            name=self.run.info.run_name or "",
            device=self.device.description,
            estimated_ms=sum(self.tasks[hash_].weight * self.tasks[hash_].run_s for hash_ in common) * 1e3,
            latency_ms=self.latency_ms,
            distrust=self.distrust,
        )


def _load(given: str, scratch: Path) -> _Side:
    with translated_errors(f"read {given}"):
        run = _run_of(given)
        run_id = tuning_of(run)
        if not run_id:
            raise UserInputError(f"{given}: it comes from no tuning run; give one of tune, compile, evaluate or main")
        tune_run = mlflow.get_run(run_id)
        scratch.mkdir()
        files = {file.path for file in mlflow.MlflowClient().list_artifacts(run_id)}
        if names.TASKS_FILE not in files:
            raise RecordsError(f"{given}: the tuning run {run_id} did not end; let it go on with resume_run={run_id}")
        rows = read_artifact(run_id, names.TASKS_FILE, list[TaskRow])
        environment = read_artifact(run_id, names.ENVIRONMENT_FILE, _Environment)
    records = fetch_run(run_id, scratch)
    device = read_fingerprint(records)
    if device is None:
        raise RecordsError(f"{given}: the records of run {run_id} do not say for which device they are; tune again")
    return _Side(
        given=given,
        run=tune_run,
        latency_ms=run.data.metrics.get(names.LATENCY_MS),
        tasks=_tasks(rows, records, device),
        device=device,
        versions={"python": environment.python, **environment.packages},
        distrust="; ".join(_reasons(tune_run, run)),
    )


def _reasons(*runs: Run) -> list[str]:
    """Why what was measured in some runs cannot be trusted; one of the pipeline repeats those of its steps."""
    found = (reason for run in runs for reason in run.data.tags.get(names.TAG_DISTRUST, "").split("; ") if reason)
    return list(dict.fromkeys(found))


def _run_of(given: str) -> Run:
    """The run that is given, or that logged the model that is given."""
    if not is_uri(given):
        return mlflow.get_run(given)
    if given.startswith("runs:/"):
        return mlflow.get_run(given.removeprefix("runs:/").split("/")[0])
    return mlflow.get_run(mlflow.models.get_model_info(pinned_uri(given, "run")).run_id)


def _tasks(rows: list[TaskRow], records: Path, device: DeviceFingerprint) -> dict[str, _Task]:
    """The tasks that have a record for the device, with the time of the one that would be applied."""
    database = open_database(find_records(records))
    best_s: dict[str, float] = {}
    for workload, lines in database.by_workload(device.target).items():
        best_s[str(database.hashes[workload])] = min(line.run_s for line in lines)
    found: dict[str, _Task] = {}
    for row in rows:
        run_s, layer = best_s.get(row.workload_hash, FAILED_RUN_S), row.layer or row.workload_hash
        if run_s < FAILED_RUN_S and (layer not in found or run_s < found[layer].run_s):
            found[layer] = _Task(
                name=row.task,
                weight=row.weight,
                run_s=run_s,
                error=row.confirmed_error or _SINGLE_ERROR,
            )
    return found


# -- what differs ------------------------------------------------------------------------------------------------------


def _task_differences(first: _Side, second: _Side) -> list[TaskDifference]:
    differences = []
    for hash_ in dict.fromkeys([*first.tasks, *second.tasks]):
        ours, theirs = first.tasks.get(hash_), second.tasks.get(hash_)
        known, side = (ours, first) if ours else (theirs, second)
        assert known is not None  # it is in one of them
        noise = _NUM_ERRORS * math.hypot(*(task.error for task in (ours, theirs) if task))
        differences.append(
            TaskDifference(
                task=f"{ours.name} → {theirs.name}" if ours and theirs and ours.name != theirs.name else known.name,
                workload_hash=hash_,
                weight=known.weight,
                first_s=ours.run_s if ours else None,
                second_s=theirs.run_s if theirs else None,
                share=known.weight * known.run_s / side.total_s,
                noise=noise,
                verdict=_verdict(ours, theirs, noise),
            )
        )
    return sorted(differences, key=lambda task: -task.share)


def _verdict(first: _Task | None, second: _Task | None, noise: float) -> TaskVerdict:
    if second is None:
        return "only_first"
    if first is None:
        return "only_second"
    change = math.log(second.run_s / first.run_s)
    if abs(change) <= noise:
        return "same"
    return "slower" if change > 0 else "faster"


def _differing(
    first: Mapping[str, str | None], second: Mapping[str, str | None]
) -> dict[str, tuple[str | None, str | None]]:
    return {
        name: (first.get(name), second.get(name))
        for name in dict.fromkeys([*first, *second])
        if first.get(name) != second.get(name)
    }


def _flat(device: DeviceFingerprint) -> dict[str, str]:
    return {
        **{f"target.{name}": json.dumps(value) for name, value in device.target.items()},
        "machine": device.machine,
        "cpu_model": device.cpu_model,
        "features": ",".join(device.features),
        "num_threads": str(device.num_threads),
    }
