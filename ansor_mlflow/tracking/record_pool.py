"""The record pool: a team's shared records under an artifact URI. `records.PoolObject` is what it holds."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeVar

import tenacity
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

from ansor_mlflow import names
from ansor_mlflow.device import DeviceFingerprint
from ansor_mlflow.errors import MachineError, UserInputError
from ansor_mlflow.files import path_below, scratch_directory
from ansor_mlflow.foreign import read_json, without_credentials
from ansor_mlflow.options import is_uri
from ansor_mlflow.records import ObjectName, PoolObject, what_is_new, workload_hash
from ansor_mlflow.tracking.error_translation import translated_errors
from ansor_mlflow.tracking.sources import pinned_uri

_NUM_CONNECTIONS = 8
_log = logging.getLogger("ansor_mlflow")
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class PoolDevice:
    """What a pool has for one device."""

    fingerprint: DeviceFingerprint
    num_kernels: int
    num_objects: int


@dataclass(frozen=True, kw_only=True)
class PushedRecords:
    """What a push changed."""

    num_workloads: int
    """Workloads of a device that the pool knows more of than before."""
    num_added: int
    """Records that were not in the pool; they are now."""
    num_there: int
    """Records that were in the pool already."""

    def __str__(self) -> str:
        added = f"{self.num_added} records of {self.num_workloads} workloads are added to the pool"
        return f"{added}, {self.num_there} were there already"


class RecordPool:
    """The pool under a URI. Safe for use from several processes and machines at once.

    Args:
        uri: A path, or a URI that MLflow keeps artifacts under, such as s3://bucket/prefix.

    Raises:
        UserInputError: MLflow knows no such URIs, or the path is that of a file.
    """

    def __init__(self, uri: str) -> None:
        self._called = without_credentials(uri)
        if Path(uri).is_file():
            raise UserInputError(f"record_pool={self._called} is a file; give a directory, or an artifact URI")
        uri = pinned_uri(uri, "record_pool") if is_uri(uri) else str(Path(uri).resolve())
        with self._translated_errors():
            self._repository = get_artifact_repository(uri)

    def devices(self) -> list[PoolDevice]:
        """What the pool has, device by device. See `pull` for what it raises."""
        found = []
        for folder in self._list(""):
            paths = self._list(folder)
            if f"{folder}/{names.FINGERPRINT_FILE}" not in paths:
                continue
            try:
                fingerprint = DeviceFingerprint.from_dict(read_json(self._get(f"{folder}/{names.FINGERPRINT_FILE}")))
            except ValueError as err:
                _log.warning("%s of the record pool %s is damaged and left out: %s", folder, self._called, err)
                continue
            workloads = Counter(name.workload_hash for path in paths if (name := _object_name(path)))
            found.append(
                PoolDevice(
                    fingerprint=fingerprint,
                    num_kernels=len(workloads),
                    num_objects=workloads.total(),
                )
            )
        return found

    def pull(self, device: DeviceFingerprint, hashes: Collection[str] | None = None) -> list[PoolObject]:
        """The objects for a device; damaged ones are left out, with a warning.

        Args:
            device: The device.
            hashes: Workloads that are wanted, by structural hash in hexadecimal digits; None for all.

        Raises:
            MachineError: The pool cannot be reached.
        """
        paths = [
            path
            for path in self._list(device.name)
            if (name := _object_name(path)) and (hashes is None or name.workload_hash in hashes)
        ]
        return [found for found in _concurrently(self._get_object, paths) if found is not None]

    def push(
        self, device: DeviceFingerprint, objects: Iterable[PoolObject], *, max_retry_s: float = 0.0
    ) -> PushedRecords:
        """Adds what the pool does not have; what is in it stays.

        Two that push the same records at the same time may both say that they added them.

        Args:
            device: The device they are for.
            objects: What is added.
            max_retry_s: How long a server that is away is waited for.

        Raises:
            MachineError: The pool cannot be reached.
        """
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(MachineError),
            wait=tenacity.wait_exponential(multiplier=0.5, max=10),
            stop=tenacity.stop_after_delay(max_retry_s),
            reraise=True,
        )
        given = list(objects)
        hashes = {workload_hash(found.workload) for found in given}
        new = what_is_new(given, retrying(self.pull, device, hashes) if given else [])
        packed = [(found, found.pack()) for found in new]
        files = {str(ObjectName.of(content, found.workload)): content for found, content in packed}
        if files:
            files[names.FINGERPRINT_FILE] = device.to_json().encode()
        _concurrently(lambda item: retrying(self._put, device.name, *item), list(files.items()))
        num_added = sum(len(found.records) for found in new)
        return PushedRecords(
            num_workloads=len({workload_hash(found.workload) for found in new}),
            num_added=num_added,
            num_there=len({(found.workload, record) for found in given for record in found.records}) - num_added,
        )

    def has_device(self, device: DeviceFingerprint) -> bool:
        """Whether there is an object for a device. See `pull` for what it raises."""
        return any(_object_name(path) for path in self._list(device.name))

    def _get_object(self, path: str) -> PoolObject | None:
        content, name = self._get(path), _object_name(path)
        try:
            if name is None or not name.is_of(content):
                raise ValueError("its content is not what its name says")
            found = PoolObject.unpack(content)
            found.require_records()
        except ValueError as err:
            _log.warning("%s of the record pool %s is damaged and left out: %s", path, self._called, err)
            return None
        return found

    def _list(self, folder: str) -> list[str]:
        with self._translated_errors():
            paths = [str(file.path) for file in self._repository.list_artifacts(folder or None)]
        return [path for path in paths if _is_plain(path)]

    def _get(self, path: str) -> bytes:
        with scratch_directory() as scratch, self._translated_errors():
            return Path(self._repository.download_artifacts(path, scratch)).read_bytes()

    def _put(self, folder: str, name: str, content: bytes) -> None:
        with scratch_directory() as scratch:
            path = Path(scratch, name)
            path.write_bytes(content)
            with self._translated_errors():
                self._repository.log_artifact(str(path), folder)

    def _translated_errors(self) -> AbstractContextManager[None]:
        return translated_errors(f"reach the record pool {self._called}")


def _is_plain(path: str) -> bool:
    """Whether a path that a server lists may be one here, too."""
    with contextlib.suppress(ValueError):
        return bool(path_below(Path(), path))
    return False


def _object_name(path: str) -> ObjectName | None:
    return ObjectName.parse(PurePosixPath(path).name)


def _concurrently(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    with ThreadPoolExecutor(_NUM_CONNECTIONS, thread_name_prefix="pool") as executor:
        return list(executor.map(function, items))
