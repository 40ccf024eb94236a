"""Writes a tuned model as a directory, and checks such a directory before anything in it is used.

Layout::

    libraries/<fingerprint>/model.so     the compiled network, weights included
    records/<fingerprint>/               the record of each task that it was compiled with
    network.onnx                         what was compiled; weights beyond 2 GiB are in network.onnx.data

The manifest, which MLflow keeps in the file `MLmodel`, describes the libraries and holds the SHA-256 of every file.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ansor_mlflow.errors import ModelError
from ansor_mlflow.names import NETWORK_FILE
from ansor_mlflow.targets import DeviceFingerprint
from ansor_mlflow.tensors import TensorSpec

LIBRARY_FILE = "model.so"
FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class CompiledNetwork:
    """What `compile` makes: a library with everything that explains it. Saved by `ansor_mlflow.flavor.save_model`."""

    name: str
    network: Path
    """The ONNX file that was compiled."""
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    library: Path
    records: Path
    """Directory of the records that were applied."""
    fingerprint: DeviceFingerprint
    coverage: dict[str, Any]
    """See `compile.Coverage.to_dict`."""
    provenance: dict[str, Any] = field(default_factory=dict)
    """Where the library comes from: versions, layout, tuning run, estimated latency."""


@dataclass(frozen=True, kw_only=True)
class LibraryEntry:
    """A library of a model and the device it is for."""

    path: str
    fingerprint: DeviceFingerprint
    coverage: dict[str, Any]
    provenance: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Describes a model directory; all paths are relative to it."""

    network: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    libraries: tuple[LibraryEntry, ...]
    files: dict[str, str]
    """SHA-256 of every file by its path."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, for the file `MLmodel`."""
        entry: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return {"format_version": FORMAT_VERSION, **entry}

    @staticmethod
    def from_dict(entry: dict[str, Any]) -> Manifest:
        """Reads what `to_dict` wrote.

        Raises:
            ModelError: Entries are missing, or a newer version wrote them.
        """
        version = entry.get("format_version")
        if version != FORMAT_VERSION:
            raise ModelError(f"the model has format version {version}, this package reads {FORMAT_VERSION}; update it")
        try:
            return Manifest(
                network=entry["network"],
                inputs=tuple(TensorSpec.from_dict(spec) for spec in entry["inputs"]),
                outputs=tuple(TensorSpec.from_dict(spec) for spec in entry["outputs"]),
                libraries=tuple(
                    LibraryEntry(**{**library, "fingerprint": DeviceFingerprint.from_dict(library["fingerprint"])})
                    for library in entry["libraries"]
                ),
                files=dict(entry["files"]),
            )
        except (KeyError, TypeError, ValueError) as err:
            raise ModelError(f"the model's MLmodel file is damaged ({err!r}); log the model again") from err


def write_package(compiled: CompiledNetwork, directory: Path) -> Manifest:
    """Copies a compiled network into `directory` and describes it."""
    name = compiled.fingerprint.name
    library = Path("libraries", name, LIBRARY_FILE)
    records = Path("records", name)
    (directory / library).parent.mkdir(parents=True)
    network = _copy_network(compiled.network, directory)
    shutil.copyfile(compiled.library, directory / library)
    shutil.copytree(compiled.records, directory / records)
    paths = [*network, library, *sorted(p.relative_to(directory) for p in (directory / records).iterdir())]
    return Manifest(
        network=compiled.name,
        inputs=compiled.inputs,
        outputs=compiled.outputs,
        libraries=(
            LibraryEntry(
                path=library.as_posix(),
                fingerprint=compiled.fingerprint,
                coverage=compiled.coverage,
                provenance=compiled.provenance,
            ),
        ),
        files={path.as_posix(): _sha256(directory / path) for path in paths},
    )


def _copy_network(source: Path, directory: Path) -> list[Path]:
    """Copies an ONNX file and the files that hold its weights; returns their paths in the model."""
    from ansor_mlflow.networks.onnx_file import external_files  # needs ONNX, which is not there where a model is served

    shutil.copyfile(source, directory / NETWORK_FILE)
    weights = [Path(name) for name in external_files(source, str(source))]
    for path in weights:
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source.parent / path, directory / path)
    return [Path(NETWORK_FILE), *weights]


def verify_package(directory: Path, manifest: Manifest) -> None:
    """Checks every file of a model against its digest.

    Raises:
        ModelError: A file is missing or was changed, has no digest, or a path leads out of the directory.
    """
    root = directory.resolve()
    unlisted = _files_to_check(root, manifest) - manifest.files.keys()
    if unlisted:
        raise ModelError(f"model {directory}: {min(unlisted)} has no SHA-256 in MLmodel; log the model again")
    for name, digest in manifest.files.items():
        path = (root / name).resolve()
        if not path.is_relative_to(root):
            raise ModelError(f"model {directory}: the path {name!r} leads out of the model; it was tampered with")
        if not path.is_file():
            raise ModelError(f"model {directory}: {name} is missing; log or download the model again")
        if _sha256(path) != digest:
            raise ModelError(
                f"model {directory}: {name} does not match the SHA-256 in MLmodel, it was changed after it was logged; "
                "download the model again, or log it anew from a run that you trust"
            )


def _files_to_check(root: Path, manifest: Manifest) -> set[str]:
    """What a model uses: the network, its libraries, and whatever lies beside these and the records."""
    beside = [path for folder in ("libraries", "records") for path in (root / folder).rglob("*")]
    beside += root.glob(f"{NETWORK_FILE}*")
    found = {path.relative_to(root).as_posix() for path in beside if not path.is_dir()}
    return {NETWORK_FILE, *(entry.path for entry in manifest.libraries), *found}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
