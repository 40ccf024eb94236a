"""What the entries of a sweep take, and by what each is known again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mlflow

from ansor_mlflow import tracking
from ansor_mlflow.commands.plan import plan_tuning
from ansor_mlflow.commands.sweep.declaration import Entry
from ansor_mlflow.device import Device, DeviceFingerprint, attributes_of
from ansor_mlflow.errors import AnsorMlflowError
from ansor_mlflow.files import sha256_of_file
from ansor_mlflow.foreign import Report, Reported, Table
from ansor_mlflow.lowering import LOWERING_VERSION
from ansor_mlflow.parameters import PlanOptions, load_options
from ansor_mlflow.processes import WorkerPool

_TIMEOUT_S = 1800.0
_DIGEST_CHARS = 16


@dataclass(frozen=True, kw_only=True)
class EntryPlan:
    """What tuning an entry takes, and what it is known by; an error says why it cannot be tuned."""

    digest: str = ""
    """Digest of the network, the parameters, the device and the lowering: what has the same was tuned already."""
    device: str = ""
    """Name of the fingerprint of the device."""
    target: str = ""
    workloads: frozenset[str] = frozenset()
    """Structural hashes of the tasks: entries that share some need not measure those twice."""
    num_layers: int = 0
    """Kernels of the network, each of which needs a trial; there may be several tasks for one."""
    num_trials: int = 0
    expected_minutes: float = 0.0
    error: str = ""
    waits: bool = False
    """Whether there is no node for it yet, as the error says."""


@dataclass(frozen=True, kw_only=True)
class SweepPlan(Reported):
    """What a sweep would do."""

    name: str
    entries: tuple[Entry, ...]
    plans: tuple[EntryPlan, ...]

    def report(self) -> Report:
        rows = [
            [
                entry.name,
                plan.target,
                str(len(plan.workloads)),
                str(plan.num_trials),
                f"{plan.expected_minutes:.1f}",
                plan.error,
            ]
            for entry, plan in zip(self.entries, self.plans, strict=True)
        ]
        headers = ["entry", "target", ">tasks", ">trials", ">min", "~error"]
        trials, minutes = sum(plan.num_trials for plan in self.plans), sum(plan.expected_minutes for plan in self.plans)
        total = f"{len(rows)} entries, {trials} trials, about {minutes:.0f} min on 2 cores"
        return Report(f"Sweep {self.name}", [Table(rows, headers), total])


def plan_entries(entries: Sequence[tuple[Entry, DeviceFingerprint]]) -> list[EntryPlan]:
    """Plans entries, each for its device, in a process that may die of one."""
    if not entries:
        return []
    pool = WorkerPool(1)
    try:
        store = mlflow.get_tracking_uri()
        outcomes = pool.map(_plan, [(entry, device, store) for entry, device in entries], _TIMEOUT_S)
    finally:
        pool.close()
    return [outcome.value or EntryPlan(error=outcome.error or str(outcome.failure)) for outcome in outcomes]


def _plan(work: tuple[Entry, DeviceFingerprint, str]) -> EntryPlan:
    entry, device, store = work
    options = entry.options
    mlflow.set_tracking_uri(store)
    try:
        changed = options.changed()
        given = {key: text for key, text in changed.items() if key in PlanOptions.model_fields}
        given["target"] = json.dumps(attributes_of(Device.elsewhere(device).target))
        given["num_threads"] = str(device.num_threads)
        plan, network = plan_tuning(load_options(PlanOptions, given)), tracking.network_of(options)
    except AnsorMlflowError as err:
        return EntryPlan(error=str(err))
    asked = options.trials if options.trials != "auto" else plan.num_trials
    known = [
        network.sha256,
        {key: text for key, text in changed.items() if key not in ("network", "data")},
        sha256_of_file(Path(options.data)) if options.data else "",
        device.name,
        LOWERING_VERSION,
        *([entry.device] if entry.device else []),
    ]
    return EntryPlan(
        digest=hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:_DIGEST_CHARS],
        device=device.name,
        target=plan.target,
        workloads=frozenset(task.info.workload_hash for task in plan.tasks),
        num_layers=len({task.info.layer_hash for task in plan.tasks}),
        num_trials=min(plan.num_trials, asked),
        expected_minutes=plan.expected_minutes,
    )
