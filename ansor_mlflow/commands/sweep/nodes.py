"""The machines that pipelines of a sweep run on: this one, or the nodes of a Ray cluster."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import mlflow

from ansor_mlflow.commands.pipeline import run_pipeline
from ansor_mlflow.commands.sweep.declaration import Entry
from ansor_mlflow.device import Device, DeviceFingerprint
from ansor_mlflow.errors import AnsorMlflowError, MachineError, UserInputError, one_line
from ansor_mlflow.files import scratch_directory, translated_disk_errors
from ansor_mlflow.parameters import PipelineOptions, is_uri, load_options
from ansor_mlflow.processes import in_child_process
from ansor_mlflow.settings import set_defaults_of_clients
from ansor_mlflow.tracking import pinned_uri, translated_errors

_log = logging.getLogger("ansor_mlflow")
_JOB_LIMIT_S = 7 * 24 * 3600.0
_LEAST_MINUTES = 0.001
_CONTEXT = "MLFLOW_RUN_CONTEXT"
"""Variable with tags, as JSON, that MLflow gives the runs of a process."""


@dataclass(frozen=True, kw_only=True)
class SweepJob:
    """A pipeline of an entry, which another process takes, on this host or another."""

    name: str
    options: PipelineOptions
    tags: Mapping[str, str]
    store: str
    """Tracking server, or store, that it logs to."""
    since_s: float | None
    """When the minutes of its options began to pass, in seconds since the epoch, for it may wait on a node that another
    sweep has; None where the sweep has no such limit."""
    on_node: bool
    """Whether it runs on a node of a cluster, which has a directory of its own for what is not delivered yet."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a pipeline ended: with a run, or with an error."""

    run_id: str = ""
    error: str = ""
    may_be_repeated: bool = False
    """Whether the error is of the machine, and not of what was given."""
    is_lost: bool = False
    """Whether its node is no more, so that it goes on elsewhere."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """A machine that takes one pipeline at a time, with all of its CPUs."""

    id: str
    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    resources: Mapping[str, float] = field(default_factory=dict)
    """Those of Ray: the number of CPUs, of GPUs, and custom ones."""
    devices: Mapping[tuple[str, str], DeviceFingerprint] = field(default_factory=dict)
    """What a target and a number of threads mean there; without those that it cannot measure."""

    def has(self, device: str) -> bool:
        """Whether it has a label (`name=value`) or a custom resource; every node has an empty one."""
        name, is_label, value = device.partition("=")
        return self.labels.get(name) == value if is_label else not device or bool(self.resources.get(device))


class Nodes(Protocol):
    """Machines that run pipelines of entries; they may come and go."""

    def look(self) -> bool:
        """Finds which nodes there are; whether there is one that was not there before."""

    def device_of(self, entry: Entry) -> DeviceFingerprint:
        """The device that an entry is tuned for.

        Raises:
            UserInputError: There are several.
            MachineError: There is none, yet.
        """

    @property
    def known(self) -> Sequence[Node]:
        """The nodes that there are."""

    def suits(self, node: Node, entry: Entry, device: str) -> bool:
        """Whether a node is one for an entry, whose device has this name."""

    def request(self, entries: Sequence[tuple[Entry, str]]) -> None:
        """Asks for as many nodes as there are entries, each with the name of its device, or an empty one."""

    def start(self, number: int, node: Node, job: SweepJob) -> None:
        """Starts a pipeline, which is known by a number."""

    def wait(self, limit_s: float) -> list[tuple[int, Ended]]:
        """Pipelines that have ended, as soon as one has; none where the time was over before."""

    def close(self) -> None:
        """Ends all pipelines."""


def device_key(entry: Entry) -> tuple[str, str]:
    """The target and the number of threads of an entry, as given."""
    return entry.options.target, str(entry.options.num_threads)


def tracking_store() -> str:
    """The tracking server, or a store of this host by its absolute path, for a process in another directory."""
    store = str(mlflow.get_tracking_uri())
    scheme, is_uri_, path = store.partition(":")
    if not is_uri_:
        return str(Path(store).resolve())
    return f"sqlite:///{Path(path.removeprefix('///')).resolve()}" if scheme == "sqlite" else store


class ThisMachine:
    """This machine, which takes one pipeline after the other, each in a process that ends with this one."""

    def __init__(self) -> None:
        self._here, self._job = Node(id="", name=""), list[tuple[int, SweepJob]]()

    def look(self) -> bool:
        return False

    def device_of(self, entry: Entry) -> DeviceFingerprint:
        if entry.device:
            raise UserInputError(
                f"device={entry.device}: this machine has no such names; leave it out, or give --on ray"
            )
        return Device.resolve(entry.options.target, entry.options.num_threads).fingerprint

    @property
    def known(self) -> Sequence[Node]:
        return [self._here]

    def suits(self, node: Node, entry: Entry, device: str) -> bool:
        del entry, device
        return node is self._here

    def request(self, entries: Sequence[tuple[Entry, str]]) -> None:
        """There is this one."""

    def start(self, number: int, node: Node, job: SweepJob) -> None:
        del node
        self._job.append((number, job))

    def wait(self, limit_s: float) -> list[tuple[int, Ended]]:
        if not self._job:
            time.sleep(limit_s)
            return []
        number, job = self._job.pop()
        return [(number, run_in_process(job))]

    def close(self) -> None:
        """A pipeline has ended before `wait` returns or raises."""


def run_in_process(job: SweepJob) -> Ended:
    """Runs a pipeline in a process of its own, and says how that ended."""
    try:
        return Ended(
            run_id=in_child_process(
                _run, job, work=f"tunes {job.name}", advice="see its run", is_quiet=True, limit_s=_JOB_LIMIT_S
            )
        )
    except MachineError as err:
        return Ended(error=str(err), may_be_repeated=True)
    except MemoryError:
        return Ended(error="there is not enough memory", may_be_repeated=True)
    except Exception as err:  # noqa: BLE001 - whatever ends one entry leaves the others
        return Ended(error=str(err) if isinstance(err, AnsorMlflowError) else f"{type(err).__name__}: {one_line(err)}")


def _run(job: SweepJob) -> str:
    """The process: returns the ID of the run."""
    if job.on_node:
        os.chdir(_node_directory())
    os.environ.pop("MLFLOW_RUN_ID", None)  # of the sweep itself, where `mlflow run` made it
    os.environ[_CONTEXT] = json.dumps(dict(job.tags))
    set_defaults_of_clients()
    mlflow.set_tracking_uri(job.store)
    changed = job.options.changed()
    if job.since_s is not None and job.options.max_minutes is not None:
        late_minutes = (time.time() - job.since_s) / 60
        changed["max_minutes"] = f"{max(job.options.max_minutes - late_minutes, _LEAST_MINUTES):.3g}"
    with translated_disk_errors(), scratch_directory() as scratch:
        if is_uri(job.options.data):  # of the host that gave it the node has no files
            with translated_errors("fetch the data"):
                uri = pinned_uri(job.options.data, "data")
                changed["data"] = mlflow.artifacts.download_artifacts(artifact_uri=uri, dst_path=scratch)
        return run_pipeline(load_options(PipelineOptions, changed)).run_id


def _node_directory() -> Path:
    """Where a node's user has what a step keeps until the tracking server has it: Ray's workers start anywhere."""
    directory = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "ansor_mlflow", "sweep")
    directory.mkdir(parents=True, exist_ok=True)
    return directory
