"""The description of a tuned model: its libraries, and the SHA-256 of every file. MLflow keeps it in `MLmodel`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from ansor_mlflow.device import DeviceFingerprint, device_kind
from ansor_mlflow.errors import ModelError
from ansor_mlflow.model.parts import PartEntry
from ansor_mlflow.names import FLAVOR_NAME, MODEL_FILE
from ansor_mlflow.tensors import NetworkShapes, TensorSpec

LIBRARY_FILE = "model.so"
FORMAT_VERSION = 2
_READ_VERSIONS = (1, 2)
"""Version 1 knows neither parts nor sizes."""
_SAFE_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""YAML loader of LibYAML, if PyYAML was built with it: MLflow's `Model.load` takes several times as long."""


def library_path(device: DeviceFingerprint) -> str:
    """Where a model has the library for a device."""
    return f"libraries/{device.name}/{LIBRARY_FILE}"


def records_path(device: DeviceFingerprint) -> str:
    """Where a model has the records that the library for a device was compiled with."""
    return f"records/{device.name}"


def _damaged(err: Exception) -> ModelError:
    """The error that says that a model's description cannot be read."""
    return ModelError(f"the model's MLmodel file is damaged ({err!r}); log the model again")


@dataclass(frozen=True, kw_only=True)
class LibraryEntry:
    """A library of a model and the device it is for."""

    path: str
    fingerprint: DeviceFingerprint
    coverage: dict[str, Any]
    provenance: dict[str, Any]
    parts: tuple[PartEntry, ...] = ()
    """In the order in which they run; empty where TVM computes all of the network."""

    @staticmethod
    def from_dict(entry: dict[str, Any]) -> LibraryEntry:
        """Reads the fields as JSON keeps them.

        Raises:
            KeyError, TypeError, ValueError: They are not those of a library.
        """
        read = {
            "fingerprint": DeviceFingerprint.from_dict(entry["fingerprint"]),
            "parts": tuple(map(PartEntry.from_dict, entry.get("parts", ()))),
        }
        return LibraryEntry(**{**entry, **read})


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
            with (directory / MODEL_FILE).open("rb") as file:
                entry = yaml.load(file, Loader=_SAFE_LOADER)["flavors"][FLAVOR_NAME]  # noqa: S506 - a safe one
        except (OSError, KeyError) as err:
            raise ModelError(
                f"model {directory}: it has no flavor {FLAVOR_NAME!r}; give a model that compile logged"
            ) from err
        except (yaml.YAMLError, UnicodeDecodeError, AttributeError, TypeError, ValueError) as err:
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
            _check_types(entry)
            return Manifest(
                network=entry["network"],
                inputs=tuple(TensorSpec.from_dict(spec) for spec in entry["inputs"]),
                outputs=tuple(TensorSpec.from_dict(spec) for spec in entry["outputs"]),
                libraries=tuple(map(LibraryEntry.from_dict, entry["libraries"])),
                files=dict(entry["files"]),
                sizes=tuple(map(NetworkShapes.from_dict, entry.get("sizes", ()))),
                pad=dict(entry.get("pad", {})),
                rows=str(entry.get("rows", "")),
            )
        except (KeyError, TypeError, ValueError) as err:
            raise _damaged(err) from err


def _check_types(entry: dict[str, Any]) -> None:
    for library in entry["libraries"]:
        if not isinstance(library["fingerprint"]["target"]["kind"], str):
            raise TypeError("a kind of target is no text")
    files = dict(entry["files"])
    for text in (*files, *files.values(), *(library["path"] for library in entry["libraries"])):
        if not isinstance(text, str) or "\0" in text:
            raise TypeError(f"{text!r} is no path and no digest")
