"""The command `diff`: which tasks of two tunings differ by more than the noise, and what else differs."""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import mlflow
from mlflow.entities import Run

from ansor_mlflow import names
from ansor_mlflow.commands.trial_table import TaskRow
from ansor_mlflow.device import DeviceFingerprint
from ansor_mlflow.errors import RecordsError, SlowerError, UserInputError
from ansor_mlflow.files import scratch_directory
from ansor_mlflow.foreign import Mark, Report, Reported, Table, duration, microseconds
from ansor_mlflow.parameters import DiffOptions, TuneOptions, is_uri
from ansor_mlflow.records import FAILED_RUN_S, find_records, open_database, read_fingerprint
from ansor_mlflow.steps.fetching import fetch_run, tuning_of
from ansor_mlflow.tracking import logged_params, params_used, pinned_uri, read_artifact, translated_errors

_log = logging.getLogger("ansor_mlflow")
_NUM_ERRORS = 2.0
"""Standard errors by which a difference exceeds the noise."""
_SINGLE_ERROR = 0.03
"""Relative standard error of a time that was measured once: repeated measurements differ by 3 to 5 %."""
_EARLIER_TAG = "ansor.distrust"
"""What earlier versions call `ansor.unreliable`."""
_HEADERS = ("~task", ">calls", ">share", ">A µs", ">B µs", ">B/A", ">noise", "B is")

TaskVerdict = Literal["faster", "slower", "same", "only_first", "only_second"]
_MARKS: dict[str, Mark] = {"faster": "green", "slower": "red", "only_first": "yellow", "only_second": "yellow"}
_WORDS = {"same": "", "only_first": "only A", "only_second": "only B"}
Differing = dict[str, tuple[str | None, str | None]]
"""What differs, by its name, with both values."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One of the two tunings."""

    given: str
    run_id: str
    name: str
    device: str
    estimated_ms: float
    """Σ weight × time over the tasks that both have."""
    latency_ms: float | None
    unreliable: str = ""


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

    @property
    def ratio(self) -> float | None:
        return self.second_s / self.first_s if self.first_s and self.second_s else None


@dataclass(frozen=True, kw_only=True)
class TuningDifference(Reported):
    """What differs between two tunings."""

    first: Compared
    second: Compared
    tasks: tuple[TaskDifference, ...]
    params: Differing
    device: Differing
    """Entries of the fingerprints."""
    versions: Differing

    def report(self) -> Report:
        sides = (("A", self.first), ("B", self.second))
        others = {
            "parameters that differ": self.params,
            "device entries that differ": self.device,
            "versions that differ": self.versions,
        }
        return Report(
            "Two tunings compared",
            [
                Table([(letter, f"{side.name}  ({side.device}, run {side.run_id})") for letter, side in sides]),
                Table([_cells(t) for t in self.tasks], _HEADERS, marks=[_MARKS.get(t.verdict, "") for t in self.tasks]),
                *self._summary(),
                *(
                    Table([(name, a or "", b or "") for name, (a, b) in entries.items()], ("~", "~A", "~B"), title)
                    for title, entries in others.items()
                    if entries
                ),
            ],
        )

    def _summary(self) -> list[str]:
        counts = Counter(task.verdict for task in self.tasks)
        lines = [
            f"B against A: {counts['faster']} tasks faster, {counts['slower']} slower, {counts['same']} the same "
            f"within the noise, {counts['only_first']} only in A, {counts['only_second']} only in B"
        ]
        pairs = {
            "estimated, tasks of both": (self.first.estimated_ms, self.second.estimated_ms),
            "measured end to end": (self.first.latency_ms, self.second.latency_ms),
        }
        for label, (first, second) in pairs.items():
            if first and second:
                lines.append(f"{label}: {duration(first / 1e3)}, {duration(second / 1e3)} ({second / first - 1:+.1%})")
        return [*lines, f"the times cannot be trusted: {self.unreliable}"] if self.unreliable else lines

    @property
    def ratio(self) -> float | None:
        """The second latency over the first, measured end to end, or else estimated over the common tasks."""
        if self.first.latency_ms and self.second.latency_ms:
            return self.second.latency_ms / self.first.latency_ms
        return self.second.estimated_ms / self.first.estimated_ms if self.first.estimated_ms else None

    @property
    def unreliable(self) -> str:
        """Why the times cannot be compared; empty where they can."""
        sides = (self.first, self.second) if self.first.run_id != self.second.run_id else (self.first,)
        return "; ".join(f"{side.given}: {side.unreliable}" for side in sides if side.unreliable)

    def require_not_slower(self, tolerance: float, *, force: bool = False) -> None:
        """Raises a SlowerError if the second is slower by more than this share, or lacks tasks that the first has.

        Times that cannot be trusted are a warning, unless `force` is given.
        """
        lost = [task for task in self.tasks if task.verdict == "only_first"]
        if lost:
            raise SlowerError(
                f"{self.second.given} has no record of {len(lost)} tasks that {self.first.given} has, such as "
                f"{lost[0].task}; tune it with as many trials"
            )
        if self.ratio is None or self.ratio <= 1 + tolerance:
            return
        if self.unreliable and not force:
            _log.warning(
                "%s is %.1f%% slower than %s, which is no error because the times cannot be trusted (%s); tune or "
                "evaluate again, or give force",
                *(self.second.given, (self.ratio - 1) * 100, self.first.given, self.unreliable),
            )
            return
        slower = next((task.task for task in self.tasks if task.verdict == "slower"), None)
        raise SlowerError(
            f"{self.second.given} is {self.ratio - 1:.1%} slower than {self.first.given}, allowed are {tolerance:.1%}"
            + (f"; look at {slower} first" if slower else "; no single task is, look at the device and the versions")
        )


def _cells(task: TaskDifference) -> tuple[str, ...]:
    return (
        task.task,
        str(task.weight),
        f"{task.share:.1%}",
        microseconds(task.first_s),
        microseconds(task.second_s),
        f"{task.ratio:.3f}" if task.ratio else "",
        f"± {task.noise:.1%}",
        _WORDS.get(task.verdict, task.verdict),
    )


def diff_runs(options: DiffOptions) -> TuningDifference:
    """Compares two tunings task by task."""
    with scratch_directory() as scratch:
        first, second = (_load_side(given, Path(scratch, name)) for name, given in zip("ab", options.runs, strict=True))
    common = first.tasks.keys() & second.tasks.keys()
    found = TuningDifference(
        first=first.compared(common),
        second=second.compared(common),
        tasks=tuple(_task_differences(first, second)),
        params=_differing(first.params, second.params),
        device=_differing(_flat(first.device), _flat(second.device)),
        versions=_differing(first.versions, second.versions),
    )
    if found.unreliable:
        _log.warning("the times cannot be trusted: %s", found.unreliable)
    return found


@dataclass(frozen=True)
class _Environment:
    """What is read of `environment.json`."""

    python: str
    packages: dict[str, str | None]


@dataclass(frozen=True)
class _Task:
    """A task with a record."""

    name: str
    weight: int
    run_s: float
    error: float
    """Relative standard error of `run_s`."""


@dataclass(frozen=True)
class _Side:
    """What is read of a tuning."""

    given: str
    run: Run
    latency_ms: float | None
    tasks: Mapping[str, _Task]
    """Tasks with a record, by the structural hash of their layer: of several algorithms the fastest."""
    device: DeviceFingerprint
    versions: Mapping[str, str | None]
    unreliable: str

    @property
    def params(self) -> dict[str, str]:
        return logged_params(self.run) | params_used(self.run, TuneOptions)

    def compared(self, common: set[str]) -> Compared:
        """What the result says of it, with the estimate over the tasks that both have."""
        return Compared(
            given=self.given,
            run_id=self.run.info.run_id,
            name=self.run.info.run_name or "",
            device=self.device.description,
            estimated_ms=sum(self.tasks[hash_].weight * self.tasks[hash_].run_s for hash_ in common) * 1e3,
            latency_ms=self.latency_ms,
            unreliable=self.unreliable,
        )


def _load_side(given: str, scratch: Path) -> _Side:
    with translated_errors(f"read {given}"):
        if is_uri(given) and not given.startswith("runs:/"):
            run = mlflow.get_run(mlflow.models.get_model_info(pinned_uri(given, "run")).run_id)
        else:
            run = mlflow.get_run(given.removeprefix("runs:/").split("/")[0])
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
    tags = [r.data.tags.get(names.TAG_UNRELIABLE, r.data.tags.get(_EARLIER_TAG, "")) for r in (tune_run, run)]
    reasons = dict.fromkeys(reason for tag in tags for reason in tag.split("; ") if reason)  # that of main repeats them
    return _Side(
        given=given,
        run=tune_run,
        latency_ms=run.data.metrics.get(names.LATENCY_MS),
        tasks=_tasks(rows, records, device),
        device=device,
        versions={"python": environment.python, **environment.packages},
        unreliable="; ".join(reasons),
    )


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
            found[layer] = _Task(row.task, row.weight, run_s, row.confirmed_error or _SINGLE_ERROR)
    return found


def _task_differences(first: _Side, second: _Side) -> list[TaskDifference]:
    total_s, other_s = (sum(task.weight * task.run_s for task in side.tasks.values()) for side in (first, second))
    differences = []
    for hash_ in dict.fromkeys([*first.tasks, *second.tasks]):
        ours, theirs = first.tasks.get(hash_), second.tasks.get(hash_)
        known = ours or theirs
        assert known is not None  # it is in one of them
        noise = _NUM_ERRORS * math.hypot(*(task.error for task in (ours, theirs) if task))
        verdict: TaskVerdict = "only_first" if ours else "only_second"
        if ours and theirs:
            change = math.log(theirs.run_s / ours.run_s)
            verdict = "same" if abs(change) <= noise else "slower" if change > 0 else "faster"
        differences.append(
            TaskDifference(
                task=f"{ours.name} → {theirs.name}" if ours and theirs and ours.name != theirs.name else known.name,
                workload_hash=hash_,
                weight=known.weight,
                first_s=ours.run_s if ours else None,
                second_s=theirs.run_s if theirs else None,
                share=known.weight * known.run_s / (total_s if ours else other_s),
                noise=noise,
                verdict=verdict,
            )
        )
    return sorted(differences, key=lambda task: -task.share)


def _differing(first: Mapping[str, str | None], second: Mapping[str, str | None]) -> Differing:
    found = {name: (first.get(name), second.get(name)) for name in [*first, *second]}
    return {name: (a, b) for name, (a, b) in found.items() if a != b}


def _flat(device: DeviceFingerprint) -> dict[str, str]:
    return {
        **{f"target.{name}": json.dumps(value) for name, value in device.target.items()},
        "machine": device.machine,
        "cpu_model": device.cpu_model,
        "features": ",".join(device.features),
        "num_threads": str(device.num_threads),
    }
