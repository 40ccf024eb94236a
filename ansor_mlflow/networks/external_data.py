"""Weights in files beside an ONNX file ("external data": docs/ExternalData.md of ONNX): where they may be, and reading.

Versions of ONNX and of ONNX Runtime differ in which links they follow. ONNX is asked to read no such file, and ONNX
Runtime only those that were found here, under names without links.
"""

from __future__ import annotations

from pathlib import Path

from onnx import StringStringEntryProto, TensorProto

from ansor_mlflow.files import path_below


def data_root(directory: Path) -> Path:
    """The folder in which the external data of an ONNX file in `directory` has to be.

    In Hugging Face's cache it is the whole repository, whose snapshots are links to its blobs.
    """
    directory = directory.resolve()
    for root in directory.parents:
        parts = directory.relative_to(root).parts
        if parts[0] == "snapshots" and len(parts) > 1 and (root / "blobs").is_dir():
            return root
    return directory


def data_path(directory: Path, location: str) -> Path:
    """The file at a location that a model in `directory` names.

    Raises:
        ValueError: It is outside of `data_root`.
    """
    root = data_root(directory)
    return path_below(root, str(directory.resolve().relative_to(root) / location)).resolve()


def location_of(tensor: TensorProto) -> str:
    """Where a model says that the external data of a tensor is; of several entries the last counts, as in ONNX."""
    return next((entry.value for entry in reversed(tensor.external_data) if entry.key == "location"), "")


def find_data(tensor: TensorProto, directory: Path) -> None:
    """Names the file of a tensor's external data relative to `data_root`, and without links; see `data_path`."""
    path = data_path(directory, location_of(tensor)).relative_to(data_root(directory))
    kept = [entry for entry in tensor.external_data if entry.key != "location"]
    del tensor.external_data[:]
    tensor.external_data.extend([StringStringEntryProto(key="location", value=path.as_posix()), *kept])


def read_data(tensor: TensorProto, directory: Path, num_bytes: int) -> bytes:
    """The external data of a tensor that takes `num_bytes`; of more that is there, one byte more is read.

    Raises:
        ValueError: The file is not in the folder, is none, or ends too early.
    """
    entries = {entry.key: entry.value for entry in tensor.external_data}
    path = data_path(directory, entries.get("location", ""))
    if not path.is_file():  # a pipe would be waited for
        raise ValueError(f"there is no file {entries.get('location', '')!r:.100}")
    stat, offset = path.stat(), int(entries.get("offset", 0))
    if stat.st_nlink > 1:  # of a file that may be anywhere
        raise ValueError(f"{path.name!r:.100} is a hard link, which may be to any file; copy the file")
    length = int(entries.get("length", stat.st_size - offset))
    if offset < 0 or length < 0 or offset + length > stat.st_size:
        raise ValueError(f"{path.name!r:.100} has {stat.st_size} bytes, and {tensor.name!r:.100} is not within them")
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(min(length, num_bytes + 1))
