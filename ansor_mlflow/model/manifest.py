"""Checks a model directory against the digests in its manifest, before anything in it is used."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from ansor_mlflow.device import CPU, DeviceFingerprint, Platform, available_cpus
from ansor_mlflow.errors import ModelError
from ansor_mlflow.files import path_below, sha256_of_file
from ansor_mlflow.foreign import read_yaml, typed
from ansor_mlflow.model.parts import PartEntry, has_library
from ansor_mlflow.names import FLAVOR_NAME, MODEL_FILE, NETWORK_FILE
from ansor_mlflow.tensors import OPEN, NetworkShapes, TensorSpec


def verify_package(directory: Path, manifest: Manifest) -> None:
    """Checks every file of a model against its digest; what it uses are the network, its libraries, and whatever lies
    beside these and the records.
    """
    root = directory.resolve()
    _check_paths(directory, manifest)
    beside = [path for folder in ("libraries", "records") for path in (root / folder).rglob("*")]
    beside += root.glob(f"{NETWORK_FILE}*")
    used = {path.relative_to(root).as_posix() for path in beside if path.is_symlink() or not path.is_dir()}
    used |= {NETWORK_FILE, *(entry.path for entry in manifest.libraries)}
    if unlisted := used - manifest.files.keys():
        raise ModelError(f"model {directory}: {min(unlisted)} has no SHA-256 in MLmodel; log the model again")
    for name in manifest.files:
        if not (root / name).is_file():
            raise ModelError(f"model {directory}: {name} is missing; log or download the model again")
    for name, digest in sha256_of(root, manifest.files).items():
        if digest != manifest.files[name]:
            raise ModelError(
                f"model {directory}: {name} does not match the SHA-256 in MLmodel, it was changed after it was logged; "
                "download the model again, or log it anew from a run that you trust"
            )


def verified_manifest(directory: Path) -> Manifest:
    """The description of a model whose files were checked; see `Manifest.read` and `verify_package`."""
    manifest = Manifest.read(directory)
    verify_package(directory, manifest)
    return manifest


def sha256_of(root: Path, names: Iterable[str]) -> dict[str, str]:
    """The SHA-256 of files by their path below `root`, computed on all CPUs."""
    largest_first = sorted(names, key=lambda name: (root / name).stat().st_size, reverse=True)
    with ThreadPoolExecutor(available_cpus()) as threads:
        return dict(
            zip(largest_first, threads.map(lambda name: sha256_of_file(root / name), largest_first), strict=True)
        )


def _check_paths(directory: Path, manifest: Manifest) -> None:
    """Refuses what is not in the model, and a library that is not where those for its device are."""
    for name in [*manifest.files, *(entry.path for entry in manifest.libraries)]:
        try:
            path_below(directory, name)
        except ValueError as err:
            raise ModelError(
                f"model {directory}: the path {name!r:.200} leads out of the model; it was tampered with"
            ) from err
    for entry in manifest.libraries:
        for part in entry.parts:
            beside = PurePosixPath(entry.path).parent / part.name
            if part.runs_in != "tvm" and beside.as_posix() not in manifest.files:
                raise ModelError(
                    f"model {directory}: {part.name!r} is not a file of the library {entry.path}; it was tampered with"
                )
        expected = library_path(entry.fingerprint, entry.parts)
        if entry.path != expected:
            raise ModelError(
                f"model {directory}: the library {entry.path!r} is not that of its device, {expected!r}; it was "
                "tampered with"
            )


LIBRARY_FILE = "model.so"
FORMAT_VERSION = 2
_READ_VERSIONS = (1, 2)  # version 1 knows neither parts nor sizes
_DTYPE = re.compile(r"bool|u?int\d+|b?float\d+\w*")
_MAX_SIZE = 2**31
_DAMAGED = "the model's MLmodel file is damaged ({}); log the model again"


def library_path(device: DeviceFingerprint, parts: Sequence[PartEntry] = ()) -> str:
    """Where a model has the library for a device; without one, the first of the files that other runtimes compute."""
    return f"libraries/{device.name}/{LIBRARY_FILE if has_library(parts) else parts[0].name}"


def records_path(device: DeviceFingerprint) -> str:
    """Where a model has the records that the library for a device was compiled with."""
    return f"records/{device.name}"


@dataclass(frozen=True, kw_only=True)
class LibraryEntry:
    """A library of a model and the device it is for."""

    path: str  # see `library_path`
    fingerprint: DeviceFingerprint
    coverage: dict[str, Any]
    provenance: dict[str, Any]
    parts: tuple[PartEntry, ...] = ()  # in the order in which they run; empty where TVM computes all of the network


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Describes a model directory; all paths are relative to it."""

    network: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    libraries: tuple[LibraryEntry, ...]
    files: dict[str, str]  # SHA-256 of every file by its path
    sizes: tuple[NetworkShapes, ...] = ()  # what every library was compiled for; empty where the network has one size
    pad: dict[str, float] = field(default_factory=dict)
    """The value that an input is padded with to the next larger size, by its name."""
    rows: str = ""  # whether rows of a batch are "independent" or "dependent"; empty where the network does not tell

    @property
    def platform(self) -> Platform:
        """The kind of device that the model is measured on: a CPU, unless it has libraries for one other kind alone."""
        first, *others = [entry.fingerprint.platform for entry in self.libraries] or [CPU]
        return CPU if any(other != first for other in others) else first

    def to_dict(self) -> dict[str, Any]:
        entry: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return {"format_version": FORMAT_VERSION, **entry}

    @staticmethod
    def read(directory: Path) -> Manifest:
        """The description of the model in a directory."""
        try:
            entry = read_yaml((directory / MODEL_FILE).read_bytes())["flavors"][FLAVOR_NAME]
        except (OSError, KeyError) as err:
            raise ModelError(
                f"model {directory}: it has no flavor {FLAVOR_NAME!r}; give a model that compile logged"
            ) from err
        except (TypeError, IndexError, ValueError) as err:
            raise ModelError(_DAMAGED.format(err)) from err
        return Manifest.from_dict(entry)

    @staticmethod
    def from_dict(entry: dict[str, Any]) -> Manifest:
        """Reads what `to_dict` wrote."""
        if not isinstance(entry, dict):
            raise ModelError(_DAMAGED.format(f"the flavor is a {type(entry).__name__}"))
        version = entry.get("format_version")
        if version not in _READ_VERSIONS:
            raise ModelError(f"the model has format version {version}, this package reads {FORMAT_VERSION}; update it")
        try:
            manifest = typed(Manifest, entry)
            _check_values(manifest)
        except ValueError as err:
            raise ModelError(_DAMAGED.format(err)) from err
        return manifest


def _check_values(manifest: Manifest) -> None:
    """Raises a ValueError for what types allow and `compile` never writes."""
    shapes = [NetworkShapes(manifest.inputs, manifest.outputs), *manifest.sizes]
    if not manifest.outputs:
        raise ValueError("the network has no outputs")
    for spec in (spec for size in shapes for spec in (*size.inputs, *size.outputs)):
        if not _DTYPE.fullmatch(spec.dtype) or not all(OPEN <= dim < _MAX_SIZE for dim in spec.shape):
            raise ValueError(f"{spec.name!r} is {spec.dtype} {spec.shape}")
    if len({tuple((s.name, s.dtype, len(s.shape)) for s in (*size.inputs, *size.outputs)) for size in shapes}) > 1:
        raise ValueError("its sizes have other inputs or outputs")
    for library in manifest.libraries:
        if any(not 0 <= part.size < len(shapes) for part in library.parts):
            raise ValueError("a part is of a size that the network does not have")
