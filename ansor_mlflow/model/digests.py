"""Checks a model directory against the digests in its manifest, before anything in it is used."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from ansor_mlflow.device import available_cpus
from ansor_mlflow.errors import ModelError
from ansor_mlflow.files import path_below
from ansor_mlflow.model.manifest import Manifest, library_path
from ansor_mlflow.names import NETWORK_FILE

_CHUNK_BYTES = 1 << 18
"""A few of them fit into the cache of a CPU: a larger buffer is no faster, and its pages take time to make."""


def verify_package(directory: Path, manifest: Manifest) -> None:
    """Checks every file of a model against its digest.

    Raises:
        ModelError: A file is missing or was changed, has no digest, or a path leads out of the directory.
    """
    root = directory.resolve()
    _check_paths(directory, manifest)
    unlisted = _files_to_check(root, manifest) - manifest.files.keys()
    if unlisted:
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
        return dict(zip(largest_first, threads.map(lambda name: _sha256(root / name), largest_first), strict=True))


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
            if part.runs_in == "onnxruntime" and beside.as_posix() not in manifest.files:
                raise ModelError(
                    f"model {directory}: {part.name!r} is not a file of the library {entry.path}; it was tampered with"
                )
        expected = library_path(entry.fingerprint)
        if entry.path != expected:
            raise ModelError(
                f"model {directory}: the library {entry.path!r} is not that of its device, {expected!r}; it was "
                "tampered with"
            )


def _files_to_check(root: Path, manifest: Manifest) -> set[str]:
    """What a model uses: the network, its libraries, and whatever lies beside these and the records."""
    beside = [path for folder in ("libraries", "records") for path in (root / folder).rglob("*")]
    beside += root.glob(f"{NETWORK_FILE}*")
    found = {path.relative_to(root).as_posix() for path in beside if path.is_symlink() or not path.is_dir()}
    return {NETWORK_FILE, *(entry.path for entry in manifest.libraries), *found}


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(buffer[:size])
    return digest.hexdigest()
