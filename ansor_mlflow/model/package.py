"""Writes a tuned model as a directory, and takes one apart.

Layout::

    libraries/<fingerprint>/model.so     the compiled network, weights included
    libraries/<fingerprint>/part1.onnx   a part of the network that another runtime computes, if there is one
    records/<fingerprint>/               the record of each task that it was compiled with
    network.onnx                         what was compiled; weights beyond 2 GiB are in network.onnx.data

There is a library for each device. The manifest describes them and holds the SHA-256 of every file.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ansor_mlflow.device import DeviceFingerprint
from ansor_mlflow.errors import UserInputError
from ansor_mlflow.files import path_below
from ansor_mlflow.model.manifest import LibraryEntry, Manifest, library_path, records_path, sha256_of
from ansor_mlflow.model.parts import PartEntry, has_library
from ansor_mlflow.names import NETWORK_FILE
from ansor_mlflow.tensors import OPEN, NetworkShapes, TensorSpec


@dataclass(frozen=True, kw_only=True)
class CompiledNetwork:
    """What `compile` makes: a library with everything that explains it. Saved by `ansor_mlflow.flavor.save_model`."""

    name: str
    network: Path  # the ONNX file that was compiled
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    library: Path
    records: Path  # directory of the records that were applied
    fingerprint: DeviceFingerprint
    coverage: dict[str, Any]  # which tasks have a record, as `model.Coverage.to_dict` says it
    parts: tuple[PartEntry, ...] = ()
    """Parts of the network; the files of those that stay with ONNX Runtime are beside the library."""
    sizes: tuple[NetworkShapes, ...] = ()  # what it was compiled for; empty where the network has one size
    pad: dict[str, float] = field(default_factory=dict)
    """The value that an input is padded with to the next larger size, by its name."""
    provenance: dict[str, Any] = field(default_factory=dict)
    """Where the library comes from: versions, layout, tuning run, estimated latency."""

    @property
    def entry(self) -> LibraryEntry:
        return LibraryEntry(
            path=library_path(self.fingerprint, self.parts),
            fingerprint=self.fingerprint,
            coverage=self.coverage,
            provenance=self.provenance,
            parts=self.parts,
        )


def write_package(compiled: CompiledNetwork | Sequence[CompiledNetwork], directory: Path) -> Manifest:
    """Copies a compiled network into `directory` and describes it; of several, the first one's ONNX file is taken."""
    members = [compiled] if isinstance(compiled, CompiledNetwork) else list(compiled)
    first = members[0]
    _require_one_network(members)
    paths = _copy_network(first.network, directory)
    for member in members:
        library, records = directory / library_path(member.fingerprint), directory / records_path(member.fingerprint)
        library.parent.mkdir(parents=True)
        if has_library(member.parts):
            shutil.copyfile(member.library, library)
        for part in member.parts:
            if part.runs_in != "tvm":
                for file in member.library.parent.glob(f"{part.name}*"):  # weights beyond 2 GiB are in a second one
                    shutil.copyfile(file, library.parent / file.name)
        shutil.copytree(member.records, records)
        paths += [*library.parent.iterdir(), *records.iterdir()]
    return Manifest(
        network=first.name,
        inputs=first.inputs,
        outputs=first.outputs,
        libraries=tuple(member.entry for member in members),
        files=dict(sorted(sha256_of(directory, [path.relative_to(directory).as_posix() for path in paths]).items())),
        sizes=first.sizes,
        pad=first.pad,
        rows=_rows(directory / NETWORK_FILE, first),
    )


def _rows(network: Path, compiled: CompiledNetwork) -> str:
    """Whether rows of a batch depend on one another, in any of the network's sizes; see `graphs.rows_of`."""
    import onnx

    from ansor_mlflow.graphs import rows_of, simplify
    from ansor_mlflow.networks import models_of_sizes

    firsts = {spec.shape[:1] for spec in compiled.inputs}
    if len(firsts) != 1 or firsts & {(), (1,), (OPEN,)}:
        return ""  # there is no batch, or no row beside another
    try:
        models = models_of_sizes(onnx.load(network), compiled.name, compiled.sizes)
        found = [rows_of(simplify(model, compiled.name)) for model in models]
    except UserInputError:  # ONNX Runtime cannot load it
        return ""
    return next((rows for rows in ("dependent", "", "independent") if rows in found), "")


def read_package(directory: Path, manifest: Manifest) -> list[CompiledNetwork]:
    """The libraries of a model whose files were checked, each with what explains it."""
    return [
        CompiledNetwork(
            name=manifest.network,
            network=directory / NETWORK_FILE,
            inputs=manifest.inputs,
            outputs=manifest.outputs,
            library=directory / entry.path,
            records=directory / records_path(entry.fingerprint),
            fingerprint=entry.fingerprint,
            coverage=entry.coverage,
            parts=entry.parts,
            sizes=manifest.sizes,
            pad=manifest.pad,
            provenance=entry.provenance,
        )
        for entry in manifest.libraries
    ]


def with_libraries(members: Sequence[CompiledNetwork], added: Sequence[CompiledNetwork]) -> list[CompiledNetwork]:
    """A compiled network with libraries for other devices; of two for the same device the added one is taken."""
    from ansor_mlflow.networks import digest_of_file

    first = members[0]
    if digest_of_file(first.network) != digest_of_file(added[0].network):
        raise UserInputError(
            f"{added[0].name} cannot be added to {first.name}: the graph or the weights are others, and a model holds "
            "libraries of one network; compile the network of the model"
        )
    devices = {member.fingerprint.name for member in added}
    kept = [member for member in members if member.fingerprint.name not in devices]
    return [*kept, *(replace(member, name=first.name) for member in added)]


def _require_one_network(members: Sequence[CompiledNetwork]) -> None:
    first = members[0]
    for member in members:
        if (member.inputs, member.outputs, member.sizes) != (first.inputs, first.outputs, first.sizes):
            raise UserInputError(
                f"{first.name} and {member.name} have other inputs, outputs or sizes; a model holds libraries of one "
                "network"
            )
    (device, number), *_ = Counter(member.fingerprint.name for member in members).most_common(1)
    if number > 1:
        raise UserInputError(f"two libraries are for {device}; a model holds one for each device: give one of them")


def _copy_network(source: Path, directory: Path) -> list[Path]:
    """Copies an ONNX file and the files that hold its weights; returns the copies."""
    from ansor_mlflow.networks import external_files  # needs ONNX, which is not there where a model is served

    directory.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, directory / NETWORK_FILE)
    copies = [directory / NETWORK_FILE]
    for name in external_files(source, str(source)):
        copies.append(path_below(directory, name))
        copies[-1].parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source.parent / name, copies[-1])
    return copies
