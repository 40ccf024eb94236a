"""Reads and writes ONNX files.

An ONNX model is a protobuf message, which holds at most 2 GiB; more weights are in files beside it ("external data":
docs/ExternalData.md of ONNX). In memory a model holds all its weights, but while its shapes are inferred the large ones
stay in their files, because both libraries that infer them take a message.

Versions of ONNX and of ONNX Runtime differ in which links to such files they follow. ONNX is asked to read none of
them, and ONNX Runtime only those that were found here, under names without links.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import StringStringEntryProto, TensorProto, external_data_helper, helper

from ansor_mlflow.errors import UserInputError, one_line
from ansor_mlflow.files import path_below
from ansor_mlflow.graphs import MAX_SHAPE_ELEMENTS, constants_of, tensors_of, with_weights
from ansor_mlflow.networks.checks import require_data, require_sound, require_tensor

_MAX_WEIGHT_BYTES = 2**31 - 2**26
"""Weights that one message can hold beside 64 MiB for the graph."""
_MIN_WEIGHT_BYTES = 1024
"""Smaller tensors always stay in the message; ONNX's own functions have the same limit."""


def read_onnx(path: Path, network: str) -> onnx.ModelProto:
    """Reads a model. Its large weights stay in their files, whose names are below `data_root`, until `load_weights`."""
    with _translated_read_errors(network):
        model = onnx.load(path, format="protobuf", load_external_data=False)
        for tensor in _external_tensors(model):
            if math.prod(tensor.dims) <= MAX_SHAPE_ELEMENTS:
                _load_tensor(tensor, path.parent, network)
            else:  # ONNX Runtime may read it before `load_weights` does
                location = _data_path(path.parent, _location_of(tensor)).relative_to(data_root(path.parent))
                kept = [entry for entry in tensor.external_data if entry.key != "location"]
                del tensor.external_data[:]
                tensor.external_data.extend([StringStringEntryProto(key="location", value=location.as_posix()), *kept])
    if not model.HasField("graph"):  # an empty file is a valid message without fields
        raise UserInputError(f"network={network}: the file holds no ONNX model; export the model again")
    if not model.graph.node:
        raise UserInputError(f"network={network}: the model has no nodes, so there is nothing to tune")
    return require_sound(model, network)


def load_weights(model: onnx.ModelProto, network: str, directory: Path) -> None:
    """Reads into `model` the weights that `read_onnx` left in the files of `directory`, its `data_root`."""
    with _translated_read_errors(network):
        for tensor in _external_tensors(model):
            _load_tensor(tensor, directory, network)
    require_data(model, network)


def read_whole(path: Path) -> onnx.ModelProto:
    """The model in an ONNX file that `write_onnx` wrote, with all its weights."""
    model = read_onnx(path, str(path))
    load_weights(model, str(path), path.parent)
    return model


def external_files(path: Path, network: str) -> list[str]:
    """The paths, relative to the folder of an ONNX file, of the other files that hold its weights."""
    with _translated_read_errors(network):
        model = onnx.load(path, format="protobuf", load_external_data=False)
        locations = sorted(set(map(_location_of, _external_tensors(model))))
        for location in locations:
            _data_path(path.parent, location)
    return locations


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


def write_onnx(model: onnx.ModelProto, path: Path, *, max_weight_bytes: int = _MAX_WEIGHT_BYTES) -> list[Path]:
    """Writes a model, and weights that take more than `max_weight_bytes` to a second file; returns the files."""
    graph, weights = _split_weights(model, max_weight_bytes)
    if not weights:
        onnx.save_model(model, path, format="protobuf")
        return [path]
    data = path.with_name(f"{path.name}.data")
    with data.open("wb") as file:
        for reference, weight in zip(_external_tensors(graph), weights, strict=True):
            place = {"location": data.name, "offset": file.tell(), "length": file.write(weight.raw_data)}
            for key, value in place.items():
                reference.external_data.add(key=key, value=str(value))
    path.write_bytes(graph.SerializeToString())
    return [path, data]


def digest(model: onnx.ModelProto, *, max_weight_bytes: int = _MAX_WEIGHT_BYTES) -> str:
    """SHA-256 of a model, the same whichever files held it: of its message, then of the weights that do not fit."""
    graph, weights = _split_weights(model, max_weight_bytes)
    sha256 = hashlib.sha256(graph.SerializeToString(deterministic=True))
    for weight in weights:
        sha256.update(weight.raw_data)
    return sha256.hexdigest()


def digest_of_file(path: Path) -> str:
    """The digest of the model in an ONNX file."""
    return digest(read_whole(path))


@contextlib.contextmanager
def _translated_read_errors(network: str) -> Iterator[None]:
    try:
        yield
    except OSError as err:
        raise UserInputError(
            f"network={network}: the file cannot be read ({err.strerror}); give an ONNX file or a built-in name"
        ) from err
    except DecodeError as err:
        raise UserInputError(
            f"network={network}: not a valid ONNX file, or cut short ({one_line(err)}); export the model again"
        ) from err
    except (onnx.checker.ValidationError, ValueError) as err:
        raise UserInputError(
            f"network={network}: its external data cannot be read ({one_line(err)}); put that file beside the model"
        ) from err


def _external_tensors(model: onnx.ModelProto) -> Iterator[TensorProto]:
    of_functions = (tensor for function in model.functions for tensor in constants_of(function.node))
    return filter(external_data_helper.uses_external_data, itertools.chain(tensors_of(model.graph), of_functions))


def _location_of(tensor: TensorProto) -> str:
    """Where a model says that the external data of a tensor is; of several entries the last counts, as in ONNX."""
    return next((entry.value for entry in reversed(tensor.external_data) if entry.key == "location"), "")


def _data_path(directory: Path, location: str) -> Path:
    """The file at a location that a model in `directory` names; a ValueError where it is outside of `data_root`."""
    root = data_root(directory)
    return path_below(root, str(directory.resolve().relative_to(root) / location)).resolve()


def _load_tensor(tensor: TensorProto, directory: Path, network: str) -> None:
    tensor.raw_data = _read_data(tensor, directory, require_tensor(tensor, network))
    tensor.data_location = TensorProto.DEFAULT
    del tensor.external_data[:]


def _read_data(tensor: TensorProto, directory: Path, num_bytes: int) -> bytes:
    """The external data of a tensor that takes `num_bytes`; of more that is there, one byte more is read."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    path = _data_path(directory, entries.get("location", ""))
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


def _split_weights(model: onnx.ModelProto, max_weight_bytes: int) -> tuple[onnx.ModelProto, list[TensorProto]]:
    """A model whose weights are in external data without a place yet, and these; itself and none, if they fit."""
    weights = [weight for weight in model.graph.initializer if _raw_bytes(weight) >= _MIN_WEIGHT_BYTES]
    if sum(map(_raw_bytes, weights)) <= max_weight_bytes:
        return model, []
    external = (
        TensorProto(name=weight.name, dims=weight.dims, data_type=weight.data_type, data_location=TensorProto.EXTERNAL)
        if _raw_bytes(weight) >= _MIN_WEIGHT_BYTES
        else weight
        for weight in model.graph.initializer
    )
    return with_weights(model, external), weights


def _raw_bytes(tensor: TensorProto) -> int:
    """Size of a tensor's data as plain bytes, without reading it; 0 where it is kept in another way."""
    if not tensor.HasField("raw_data"):
        return 0
    return int(math.prod(tensor.dims) * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)
