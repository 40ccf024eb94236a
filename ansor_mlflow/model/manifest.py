"""The description of a tuned model: its libraries, and the SHA-256 of every file. MLflow keeps it in `MLmodel`."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from ansor_mlflow.device import DeviceFingerprint, device_kind
from ansor_mlflow.errors import ModelError
from ansor_mlflow.foreign import read_yaml, typed
from ansor_mlflow.model.parts import PartEntry
from ansor_mlflow.names import FLAVOR_NAME, MODEL_FILE
from ansor_mlflow.tensors import OPEN, NetworkShapes, TensorSpec

LIBRARY_FILE = "model.so"
FORMAT_VERSION = 2
_READ_VERSIONS = (1, 2)
"""Version 1 knows neither parts nor sizes."""
_DTYPE = re.compile(r"bool|u?int\d+|b?float\d+\w*")
_MAX_SIZE = 2**31


def library_path(device: DeviceFingerprint) -> str:
    """Where a model has the library for a device."""
    return f"libraries/{device.name}/{LIBRARY_FILE}"


def records_path(device: DeviceFingerprint) -> str:
    """Where a model has the records that the library for a device was compiled with."""
    return f"records/{device.name}"


def _damaged(err: Exception) -> ModelError:
    return ModelError(f"the model's MLmodel file is damaged ({err}); log the model again")


@dataclass(frozen=True, kw_only=True)
class LibraryEntry:
    """A library of a model and the device it is for."""

    path: str
    fingerprint: DeviceFingerprint
    coverage: dict[str, Any]
    provenance: dict[str, Any]
    parts: tuple[PartEntry, ...] = ()
    """In the order in which they run; empty where TVM computes all of the network."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Describes a model directory; all paths are relative to it."""

    network: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    libraries: tuple[LibraryEntry, ...]
    files: dict[str, str]
    """SHA-256 of every file by its path."""
    sizes: tuple[NetworkShapes, ...] = ()
    """What every library was compiled for; empty where the network has one size."""
    pad: dict[str, float] = field(default_factory=dict)
    """The value that an input is padded with to the next larger size, by its name."""
    rows: str = ""
    """Whether rows of a batch are "independent" or "dependent"; empty where the network does not tell."""

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """Kind of device that the model is measured on: cuda where it has libraries for nothing else."""
        kinds = {device_kind(entry.fingerprint.target) for entry in self.libraries}
        return "cuda" if kinds == {"cuda"} else "cpu"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, for the file `MLmodel`."""
        entry: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return {"format_version": FORMAT_VERSION, **entry}

    @staticmethod
    def read(directory: Path) -> Manifest:
        """The description of the model in a directory.

        Raises:
            ModelError: The model is not of this flavor, or its description is damaged.
        """
        try:
            entry = read_yaml((directory / MODEL_FILE).read_bytes())["flavors"][FLAVOR_NAME]
        except (OSError, KeyError) as err:
            raise ModelError(
                f"model {directory}: it has no flavor {FLAVOR_NAME!r}; give a model that compile logged"
            ) from err
        except (TypeError, IndexError, ValueError) as err:
            raise _damaged(err) from err
        return Manifest.from_dict(entry)

    @staticmethod
    def from_dict(entry: dict[str, Any]) -> Manifest:
        """Reads what `to_dict` wrote.

        Raises:
            ModelError: Entries are missing, or a newer version wrote them.
        """
        if not isinstance(entry, dict):
            raise _damaged(TypeError(f"the flavor is a {type(entry).__name__}"))
        version = entry.get("format_version")
        if version not in _READ_VERSIONS:
            raise ModelError(f"the model has format version {version}, this package reads {FORMAT_VERSION}; update it")
        try:
            manifest = typed(Manifest, entry)
            _check_values(manifest)
        except ValueError as err:
            raise _damaged(err) from err
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
