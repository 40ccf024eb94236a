"""The commands `pool push`, `pull` and `list`, and what a tuning takes of a pool and gives to it."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ansor_mlflow.device import Device, DeviceFingerprint
from ansor_mlflow.errors import MachineError, RecordsError, UserInputError
from ansor_mlflow.files import scratch_directory
from ansor_mlflow.foreign import Report, Reported, Table
from ansor_mlflow.options import ListPoolOptions, PullPoolOptions, PushPoolOptions
from ansor_mlflow.records import FAILED_RUN_S, PoolObject, find_records, objects_of, workload_hash, write_objects
from ansor_mlflow.sketches import ANNOTATION
from ansor_mlflow.steps.records.fetching import fetch_databases
from ansor_mlflow.tracking import PoolDevice, PushedRecords, RecordPool

_MAX_RETRY_S = 60.0
"""How long a pool that cannot be reached is waited for at the end of a tuning."""
_log = logging.getLogger("ansor_mlflow")


@dataclass(frozen=True, kw_only=True)
class PoolContents(Reported):
    """What a pool has."""

    devices: tuple[PoolDevice, ...]

    def report(self) -> Report:
        """A row for each device."""
        if not self.devices:
            return Report("the pool is empty, or not there yet: the first push makes it")
        rows = [
            (d.fingerprint.description, f"{d.fingerprint.cpu_model} ({d.fingerprint.machine})", str(d.num_kernels))
            for d in self.devices
        ]
        return Report("what the pool has", [Table(rows, ("device", "CPU", ">workloads"))])


@dataclass(frozen=True, kw_only=True)
class PulledRecords:
    """A database with what a pool has for a device."""

    output: Path
    device: str
    """Short description of the device."""
    num_workloads: int
    num_records: int


def list_pool(options: ListPoolOptions) -> PoolContents:
    """What a pool has, device by device.

    Raises:
        MachineError: The pool cannot be reached.
    """
    return PoolContents(devices=tuple(RecordPool(options.pool).devices()))


def push_records(options: PushPoolOptions) -> PushedRecords:
    """Pushes what tunings found out to a pool.

    Raises:
        UserInputError: There is no such source.
        RecordsError: A source has no records of its own, or does not say which device they are for.
        MachineError: A server is away.
    """
    pool = RecordPool(options.pool)
    by_device: dict[str, tuple[DeviceFingerprint, list[PoolObject]]] = {}
    with scratch_directory() as scratch:
        for source in options.sources:
            copy = Path(tempfile.mkdtemp(dir=scratch))
            for path in fetch_databases(source, copy):
                device, objects = objects_of(find_records(path, prefer_winners=False).records.parent)
                by_device.setdefault(device.name, (device, []))[1].extend(objects)
    if not any(objects for _, objects in by_device.values()):
        raise RecordsError(
            f"{', '.join(options.sources)}: there is nothing to push, for no record in it is "
            "its own; push the tunings that measured them"
        )
    pushed = [pool.push(device, objects) for device, objects in by_device.values()]
    return PushedRecords(
        num_workloads=sum(one.num_workloads for one in pushed),
        num_added=sum(one.num_added for one in pushed),
        num_there=sum(one.num_there for one in pushed),
    )


def pull_records(options: PullPoolOptions) -> PulledRecords:
    """Writes what a pool has for a device to a new database.

    Raises:
        UserInputError: The target is unknown, or the output is not free.
        RecordsError: The pool has nothing for the device.
        MachineError: The pool cannot be reached.
    """
    output = Path(options.output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserInputError(f"output={options.output}: there is something already; give a new directory")
    device = Device.resolve(options.target, options.num_threads).fingerprint
    objects = RecordPool(options.pool).pull(device)
    if not objects:
        raise RecordsError(
            f"{options.pool}: the pool has no records for {device.description} on "
            f"{device.cpu_model}; `ansor-mlflow pool list` shows for which devices it has some"
        )
    write_objects(objects, device, output)
    return PulledRecords(
        output=output,
        device=device.description,
        num_workloads=len({workload_hash(found.workload) for found in objects}),
        num_records=len({record for found in objects for record in found.records}),
    )


def known_workloads(
    objects: Sequence[PoolObject], trials_per_task: float, sketched: frozenset[str] = frozenset()
) -> frozenset[str]:
    """Structural hashes, in hexadecimal digits, of the workloads that were tuned enough before.

    Args:
        objects: What the pool has.
        trials_per_task: Trials that a tuning would give a task, on average: one that was ready to give as many is
            enough, if there is a valid program.
        sketched: Hashes of workloads of which the programs of a sketch must have been among what was tuned: hundreds of
            others may be slower than the first of these.
    """
    enough = [found for found in objects if found.trials_per_task >= trials_per_task]
    searched = {
        hash_ for found in enough if (hash_ := workload_hash(found.workload)) not in sketched or _is_of_sketch(found)
    }
    return frozenset(searched & {workload_hash(found.workload) for found in objects if _has_valid_record(found)})


def _is_of_sketch(found: PoolObject) -> bool:
    return any(ANNOTATION in text for text in (found.winner, *found.records))


def _has_valid_record(found: PoolObject) -> bool:
    return any(
        sum(times := json.loads(text)[1]) / len(times) < FAILED_RUN_S for text in (found.winner, *found.records) if text
    )


def give_to_pool(uri: str, records: Path, run_id: str) -> None:
    """Pushes what a tuning found out and the pool does not have; a server that is away is waited for.

    Raises:
        MachineError: The pool cannot be reached.
    """
    try:
        pushed = RecordPool(uri).push(*objects_of(records), max_retry_s=_MAX_RETRY_S)
    except MachineError as err:
        raise MachineError(
            f"{err}; the records are in the run {run_id}: push them with `ansor-mlflow pool push`, the pool and that ID"
        ) from err
    _log.info("%s", pushed)
