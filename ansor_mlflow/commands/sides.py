"""What `diff` reads of each tuning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import mlflow
from mlflow.entities import Run

from ansor_mlflow import names
from ansor_mlflow.commands.trial_table import TaskRow
from ansor_mlflow.device import DeviceFingerprint
from ansor_mlflow.errors import RecordsError, UserInputError
from ansor_mlflow.parameters import is_uri
from ansor_mlflow.records import FAILED_RUN_S, find_records, open_database, read_fingerprint
from ansor_mlflow.steps.fetching import fetch_run, tuning_of
from ansor_mlflow.tracking import pinned_uri, read_artifact, translated_errors

_EARLIER_TAG = "ansor.distrust"
"""What earlier versions call `ansor.unreliable`."""
_SINGLE_ERROR = 0.03
"""Relative standard error of a time that was measured once: repeated measurements differ by 3 to 5 %."""


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
    unreliable: str = ""
    """Why its times cannot be trusted; empty where they can."""


@dataclass(frozen=True)
class _Environment:
    """What is read of `environment.json`."""

    python: str
    packages: dict[str, str | None]


@dataclass(frozen=True)
class SideTask:
    """A task with a record."""

    name: str
    weight: int
    run_s: float
    error: float
    """Relative standard error of `run_s`."""


@dataclass(frozen=True)
class Side:
    """One of the two tunings, as it is compared."""

    given: str
    run: Run
    """The tuning run."""
    latency_ms: float | None
    tasks: Mapping[str, SideTask]
    """Tasks with a record, by the structural hash of their layer: of several algorithms the fastest."""
    device: DeviceFingerprint
    versions: Mapping[str, str | None]
    unreliable: str

    @property
    def params(self) -> Mapping[str, str]:
        """The parameters, with the values that were used."""
        return {name: value for name, value in self.run.data.params.items() if not name.endswith("_used")} | {
            name.removesuffix("_used"): value for name, value in self.run.data.params.items() if name.endswith("_used")
        }

    @property
    def total_s(self) -> float:
        """Seconds of the network, estimated."""
        return sum(task.weight * task.run_s for task in self.tasks.values())

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


def load_side(given: str, scratch: Path) -> Side:
    """Reads a tuning, or that of a model."""
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
    return Side(
        given=given,
        run=tune_run,
        latency_ms=run.data.metrics.get(names.LATENCY_MS),
        tasks=_tasks(rows, records, device),
        device=device,
        versions={"python": environment.python, **environment.packages},
        unreliable="; ".join(_reasons(tune_run, run)),
    )


def _reasons(*runs: Run) -> list[str]:
    """Why what was measured in some runs cannot be trusted; one of the pipeline repeats those of its steps."""
    tags = [run.data.tags.get(names.TAG_UNRELIABLE, run.data.tags.get(_EARLIER_TAG, "")) for run in runs]
    return list(dict.fromkeys(reason for tag in tags for reason in tag.split("; ") if reason))


def _run_of(given: str) -> Run:
    """The run that is given, or that logged the model that is given."""
    if not is_uri(given):
        return mlflow.get_run(given)
    if given.startswith("runs:/"):
        return mlflow.get_run(given.removeprefix("runs:/").split("/")[0])
    return mlflow.get_run(mlflow.models.get_model_info(pinned_uri(given, "run")).run_id)


def _tasks(rows: list[TaskRow], records: Path, device: DeviceFingerprint) -> dict[str, SideTask]:
    """The tasks that have a record for the device, with the time of the one that would be applied."""
    database = open_database(find_records(records))
    best_s: dict[str, float] = {}
    for workload, lines in database.by_workload(device.target).items():
        best_s[str(database.hashes[workload])] = min(line.run_s for line in lines)
    found: dict[str, SideTask] = {}
    for row in rows:
        run_s, layer = best_s.get(row.workload_hash, FAILED_RUN_S), row.layer or row.workload_hash
        if run_s < FAILED_RUN_S and (layer not in found or run_s < found[layer].run_s):
            found[layer] = SideTask(
                name=row.task, weight=row.weight, run_s=run_s, error=row.confirmed_error or _SINGLE_ERROR
            )
    return found
