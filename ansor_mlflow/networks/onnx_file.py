"""Reads and writes ONNX files, and fixes the shapes of their inputs.

An ONNX model is a protobuf message, which holds at most 2 GiB; more weights are in files beside it ("external data":
docs/ExternalData.md of ONNX). In memory a model holds all its weights, but while its shapes are inferred the large ones
stay in their files, because both libraries that infer them take a message.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from google.protobuf.message import DecodeError, EncodeError  # type: ignore[import-untyped]
from onnx import TensorProto, external_data_helper, helper

from ansor_mlflow.errors import UserInputError, one_line
from ansor_mlflow.graphs import (
    MAX_SHAPE_ELEMENTS,
    branches_of,
    constants_of,
    corrected_types,
    run_briefly,
    start_session,
    static_shape,
    tensors_of,
    with_weights,
    without_numbers,
)
from ansor_mlflow.networks.checks import require_data, require_sizes, require_sound, require_tensor
from ansor_mlflow.networks.external_data import data_path, find_data, location_of, read_data
from ansor_mlflow.networks.shapes import DeclaredShape, resolve_shapes
from ansor_mlflow.networks.values import fix_values, require_shape, take_known_branches, typed_values
from ansor_mlflow.tensors import OPEN, Arrays, TensorSpec, random_inputs

_log = logging.getLogger("ansor_mlflow")

_DTYPES: dict[int, str] = {
    TensorProto.FLOAT16: "float16",
    TensorProto.FLOAT: "float32",
    TensorProto.DOUBLE: "float64",
    TensorProto.INT8: "int8",
    TensorProto.INT16: "int16",
    TensorProto.INT32: "int32",
    TensorProto.INT64: "int64",
    TensorProto.UINT8: "uint8",
    TensorProto.UINT16: "uint16",
    TensorProto.UINT32: "uint32",
    TensorProto.UINT64: "uint64",
    TensorProto.BOOL: "bool",
}
"""NumPy's names of the element types that NumPy itself has: inputs and outputs pass through it."""

_MAX_IR_VERSION = 10
"""ONNX Runtime refuses a file of a version that is newer than itself, whatever is in it; later versions only add types
of 4 bits and less, and configurations of several devices.
"""
_MAX_WEIGHT_BYTES = 2**31 - 2**26
"""Weights that one message can hold beside 64 MiB for the graph."""
_MIN_WEIGHT_BYTES = 1024
"""Smaller tensors always stay in the message; ONNX's own functions have the same limit."""


def read_onnx(path: Path, network: str) -> onnx.ModelProto:
    """Reads a model. Its large weights stay in their files, whose names are below `data_root`, until `load_weights`.

    Raises:
        UserInputError: The file or its external data is missing or not an ONNX model.
    """
    with _translated_read_errors(network):
        model = onnx.load(path, format="protobuf", load_external_data=False)
        for tensor in _external_tensors(model):
            if math.prod(tensor.dims) <= MAX_SHAPE_ELEMENTS:
                _load_tensor(tensor, path.parent, network)
            else:  # ONNX Runtime may read it before `load_weights` does
                find_data(tensor, path.parent)
    if not model.HasField("graph"):  # an empty file is a valid message without fields
        raise UserInputError(f"network={network}: the file holds no ONNX model; export the model again")
    if not model.graph.node:
        raise UserInputError(f"network={network}: the model has no nodes, so there is nothing to tune")
    return require_sound(model, network)


def load_weights(model: onnx.ModelProto, network: str, directory: Path) -> None:
    """Reads into `model` the weights that `read_onnx` left in the files of `directory`, its `data_root`.

    Raises:
        UserInputError: A file is missing, cut short, or outside of `directory`.
    """
    with _translated_read_errors(network):
        for tensor in _external_tensors(model):
            _load_tensor(tensor, directory, network)
    require_data(model, network)


def external_files(path: Path, network: str) -> list[str]:
    """The paths, relative to the folder of an ONNX file, of the other files that hold its weights.

    Raises:
        UserInputError: The file is missing or not an ONNX model, or one of the others would be outside of its folder.
    """
    with _translated_read_errors(network):
        model = onnx.load(path, format="protobuf", load_external_data=False)
        locations = sorted(set(map(location_of, _external_tensors(model))))
        for location in locations:
            data_path(path.parent, location)
    return locations


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
    """The digest of the model in an ONNX file. See `read_whole` for what it raises."""
    return digest(read_whole(path))


def read_whole(path: Path) -> onnx.ModelProto:
    """The model in an ONNX file that `write_onnx` wrote, with all its weights; see `read_onnx`."""
    model = read_onnx(path, str(path))
    load_weights(model, str(path), path.parent)
    return model


def fix_shapes(
    model: onnx.ModelProto,
    network: str,
    given: Mapping[str, Sequence[int]],
    directory: Path | None = None,
    *,
    batch_size: int = 1,
    values: Mapping[str, Any] = {},
    note: Callable[[str], object] = _log.warning,
) -> onnx.ModelProto:
    """Returns the model with static shapes everywhere that shape inference can derive one. Changes `model`.

    Args:
        model: A model.
        network: What messages call it.
        given: Shapes that replace those of its inputs.
        directory: Where the weights are that `read_onnx` left in their files: `data_root`.
        batch_size: Size of a dynamic batch.
        values: Values that inputs get for good, which then are no inputs any more.
        note: Gets the sentence that a batch is taken as 1.

    Raises:
        UserInputError: A shape does not fit, an input or output still has a dynamic dimension, or holds no numbers.
    """
    model.ir_version = min(model.ir_version, _MAX_IR_VERSION)
    inputs = _inputs(model.graph)
    for value in (*inputs, *model.graph.output):
        _require_numbers(value, network)
    declared = {value.name: _declared_shape(value) for value in inputs}
    dtypes = {value.name: _dtype(value) for value in inputs}
    fixed = typed_values(network, dtypes, values)
    for name, array in fixed.items():
        require_shape(network, name, array, declared[name])
    given = {**_shapes_of_values(declared, fixed), **given}
    integers = {name for name, dtype in dtypes.items() if np.dtype(dtype).kind in "iub"}
    shapes = resolve_shapes(network, declared, given, batch_size=batch_size, integers=integers, note=note)
    _fix_inputs(model, network, shapes, fixed)
    hint = "give input_shapes that the network can take" if given else "export the model again"
    return _fixed_everywhere(model, network, directory, hint=hint)


def open_shapes(
    model: onnx.ModelProto, network: str, inputs: Sequence[TensorSpec], values: Mapping[str, Any] = {}
) -> onnx.ModelProto:
    """Returns the model of several sizes: with some dimensions of its inputs fixed, and dynamic ones. Changes `model`.

    `fix_shapes` takes its sizes; `inputs` has `OPEN` dimensions, and `values` what other inputs are for good.
    """
    model.ir_version = min(model.ir_version, _MAX_IR_VERSION)
    shapes = {spec.name: spec.shape for spec in inputs}
    dtypes = {value.name: _dtype(value) for value in _inputs(model.graph)}
    specs = []
    _forget_shapes(model)
    for value in _inputs(model.graph):
        declared = _declared_shape(value)
        if value.name in shapes:
            names = [dim if isinstance(dim, str) and dim != "?" else None for dim in declared or ()]
            open_dims = zip(shapes[value.name], names or [None] * len(shapes[value.name]), strict=True)
            _set_shape(value, [name if size == OPEN else size for size, name in open_dims])
        else:
            specs.append((value.name, declared, _dtype(value)))
    arrays = typed_values(network, dtypes, values)
    fixed = [
        TensorSpec(
            name, arrays[name].shape if _is_open(dims, arrays[name].ndim) else tuple(map(int, dims or ())), dtype
        )
        for name, dims, dtype in specs
    ]
    fix_values(model, network, fixed, arrays)
    return model


def input_specs(model: onnx.ModelProto) -> tuple[TensorSpec, ...]:
    """The inputs of a model with static shapes; before IR version 4 weights are listed with them, and are left out."""
    return tuple(map(_spec, _inputs(model.graph)))


def output_specs(model: onnx.ModelProto) -> tuple[TensorSpec, ...]:
    """The outputs of a model with static shapes, but for those that depend on the values of its inputs."""
    return tuple(map(_spec, model.graph.output))


def _inputs(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    weights = {weight.name for weight in (*graph.initializer, *(sparse.values for sparse in graph.sparse_initializer))}
    return [value for value in graph.input if value.name not in weights]


def _spec(value: onnx.ValueInfoProto) -> TensorSpec:
    shape = tuple(dim.dim_value if dim.HasField("dim_value") else OPEN for dim in value.type.tensor_type.shape.dim)
    return TensorSpec(name=value.name, shape=shape, dtype=_dtype(value))


def _dtype(value: onnx.ValueInfoProto) -> str:
    return _DTYPES[value.type.tensor_type.elem_type]


def _require_numbers(value: onnx.ValueInfoProto, network: str) -> None:
    if value.type.tensor_type.elem_type not in _DTYPES:  # 0 where the type is that of a sequence or a map
        raise UserInputError(
            f"network={network}: {value.name!r} is not a tensor of NumPy's floats, integers or booleans; "
            "export the model without it (skl2onnx: options={'zipmap': False})"
        )


def _declared_shape(value: onnx.ValueInfoProto) -> DeclaredShape | None:
    if not value.type.tensor_type.HasField("shape"):
        return None
    # Some exporters write 0 or -1 for a dynamic dimension.
    return tuple(
        dim.dim_value if dim.dim_value > 0 else dim.dim_param or "?" for dim in value.type.tensor_type.shape.dim
    )


def _set_shape(value: onnx.ValueInfoProto, shape: Sequence[int | str | None]) -> None:
    elem_type = value.type.tensor_type.elem_type
    value.CopyFrom(helper.make_tensor_value_info(value.name, elem_type, shape, value.doc_string))


def _fix_inputs(model: onnx.ModelProto, network: str, shapes: Mapping[str, Sequence[int]], values: Arrays) -> None:
    """Gives inputs their shapes and values, and takes the branches that these decide."""
    inputs = _inputs(model.graph)
    declared = {value.name: _declared_shape(value) for value in inputs}
    for value in inputs:
        _set_shape(value, shapes[value.name])
    noted = [*model.graph.value_info, *model.graph.output]
    if any(map(_has_negative, noted)) or not all(_agree(declared[name], shape) for name, shape in shapes.items()):
        _forget_shapes(model)
    for value in noted:
        _replace_names(value, _sizes(declared, shapes))
    fix_values(model, network, list(map(_spec, inputs)), values)
    take_known_branches(model)


def _agree(declared: DeclaredShape | None, shape: Sequence[int]) -> bool:
    """Whether a shape differs from the declared one in dynamic dimensions alone."""
    return declared is not None and all(
        isinstance(dim, str) or dim == size for dim, size in zip(declared, shape, strict=True)
    )


def _sizes(declared: Mapping[str, DeclaredShape | None], shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """The sizes of named dimensions."""
    pairs = (zip(declared[name] or (), shape, strict=False) for name, shape in shapes.items())
    return {dim: size for dims in pairs for dim, size in dims if isinstance(dim, str)}


def _replace_names(value: onnx.ValueInfoProto, sizes: Mapping[str, int]) -> None:
    for dim in value.type.tensor_type.shape.dim if value.type.tensor_type.HasField("shape") else ():
        if dim.dim_param in sizes:
            dim.dim_value = sizes[dim.dim_param]


def _shapes_of_values(declared: Mapping[str, DeclaredShape | None], values: Arrays) -> dict[str, tuple[int, ...]]:
    """Shapes of values whose inputs leave theirs open."""
    return {name: value.shape for name, value in values.items() if _is_open(declared[name], value.ndim)}


def _is_open(declared: DeclaredShape | None, rank: int) -> bool:
    return declared is None or (len(declared) == rank and not all(isinstance(dim, int) for dim in declared))


def _fixed_everywhere(model: onnx.ModelProto, network: str, directory: Path | None, *, hint: str) -> onnx.ModelProto:
    """A model with static inputs as `fix_shapes` returns it."""
    model = _infer_shapes(model, network, directory, hint=hint)
    require_sizes(model, network)  # before ONNX Runtime computes any
    if types := corrected_types(model, input_specs(model), directory):
        _forget_shapes(model)
        model.graph.value_info.extend(types)
        model = _inferred(model, strict=False)
    require_sizes(model, network)
    _require_positive(model.graph, network)
    _complete_outputs(model, network, directory)
    return model


def _infer_shapes(model: onnx.ModelProto, network: str, directory: Path | None, *, hint: str) -> onnx.ModelProto:
    """Infers shapes as ONNX does, strictly; where that finds contradictions, as far as ONNX Runtime sees none."""
    try:
        return _inferred(model)
    except onnx.shape_inference.InferenceError as err:
        reason = err
    except EncodeError as err:
        raise UserInputError(
            f"network={network}: the model is larger than 2 GiB, the limit of an ONNX message; give an ONNX file with "
            "external data"
        ) from err
    _forget_shapes(model)  # what the file says may be what is wrong
    with contextlib.suppress(onnx.shape_inference.InferenceError):
        return _inferred(model)
    try:
        loose = _inferred(model, strict=False)
        require_sizes(loose, network)  # before ONNX Runtime computes what is constant
        start_session(model.SerializeToString(), directory)
    except UserInputError:
        raise
    except Exception as err:  # ONNX Runtime has an error class for each of its status codes, without a common base
        raise UserInputError(f"network={network}: its shapes do not fit together ({one_line(reason)}); {hint}") from err
    return loose


def _inferred(model: onnx.ModelProto, *, strict: bool = True) -> onnx.ModelProto:
    infer = functools.partial(onnx.shape_inference.infer_shapes, check_type=True, strict_mode=strict, data_prop=True)
    return without_numbers(model, infer)


def _require_positive(graph: onnx.GraphProto, network: str) -> None:
    """Checks that no tensor has a negative dimension, which inference computes where an image is too small."""
    for value in (*graph.value_info, *graph.output):
        if _has_negative(value):
            node = next((node for node in graph.node if value.name in node.output), onnx.NodeProto())
            sizes = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
            raise UserInputError(
                f"network={network}: node {node.name!r} ({node.op_type}) would give {value.name!r} the shape {sizes}; "
                "give larger input_shapes"
            )


def _has_negative(value: onnx.ValueInfoProto) -> bool:
    return any(dim.dim_value < 0 for dim in value.type.tensor_type.shape.dim)


def _forget_shapes(model: onnx.ModelProto) -> None:
    """Removes what was inferred from other input shapes; inference would take it for a contradiction."""
    _forget_shapes_of(model.graph)
    for function in model.functions:
        del function.value_info[:]


def _forget_shapes_of(graph: onnx.GraphProto) -> None:
    del graph.value_info[:]
    for output in graph.output:
        if output.type.HasField("tensor_type"):  # a branch may have an output of another type
            output.type.tensor_type.ClearField("shape")
    for branch in (branch for node in graph.node for branch in branches_of(node)):
        for value in branch.input:  # of a loop
            if value.type.HasField("tensor_type"):
                value.type.tensor_type.ClearField("shape")
        _forget_shapes_of(branch)


def _complete_outputs(model: onnx.ModelProto, network: str, directory: Path | None) -> None:
    """Asks ONNX Runtime for output shapes that ONNX could not infer; it evaluates the constant parts of a graph too."""
    if all(static_shape(output) is not None for output in model.graph.output):
        return
    try:
        session = start_session(model.SerializeToString(), directory)
        shapes = _output_shapes(session, model)
    except Exception as err:  # ONNX Runtime has an error class for each of its status codes, without a common base
        raise UserInputError(
            f"network={network}: neither ONNX nor ONNX Runtime can infer the shapes of its outputs "
            f"({one_line(err)}); export the model with static shapes"
        ) from err
    for output, shape in zip(model.graph.output, shapes, strict=True):
        _set_shape(output, shape)


def _output_shapes(session: onnxruntime.InferenceSession, model: onnx.ModelProto) -> list[list[int | str | None]]:
    """The shapes of a model's outputs, with None or a name where they depend on values.

    ONNX Runtime says [] of a scalar, and of an output that it knows nothing of; a call shows how many axes that has.
    """
    shapes = [list(output.shape) for output in session.get_outputs()]
    has_shape = [output.type.tensor_type.HasField("shape") for output in model.graph.output]
    if all(shape or known for shape, known in zip(shapes, has_shape, strict=True)):
        return shapes
    arrays = run_briefly(session, None, random_inputs(input_specs(model), seed=0))
    if arrays is None:
        raise TimeoutError("a run does not end in time")
    return [shape or [None] * array.ndim for shape, array in zip(shapes, arrays, strict=True)]


@contextlib.contextmanager
def _translated_read_errors(network: str) -> Iterator[None]:
    """Translates the errors of reading a model and its external data."""
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


def _external_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    of_functions = (tensor for function in model.functions for tensor in constants_of(function.node))
    return filter(external_data_helper.uses_external_data, itertools.chain(tensors_of(model.graph), of_functions))


def _load_tensor(tensor: onnx.TensorProto, directory: Path, network: str) -> None:
    num_bytes = require_tensor(tensor, network)
    tensor.raw_data = read_data(tensor, directory, num_bytes)
    tensor.data_location = TensorProto.DEFAULT
    del tensor.external_data[:]


def _split_weights(model: onnx.ModelProto, max_weight_bytes: int) -> tuple[onnx.ModelProto, list[onnx.TensorProto]]:
    """A model whose weights are in external data that has no place yet, and these weights.

    Weights that take no more than `max_weight_bytes` stay where they are: the model itself, and none.
    """
    weights = [weight for weight in model.graph.initializer if _raw_bytes(weight) >= _MIN_WEIGHT_BYTES]
    if sum(map(_raw_bytes, weights)) <= max_weight_bytes:
        return model, []
    external = (
        _without_data(tensor) if _raw_bytes(tensor) >= _MIN_WEIGHT_BYTES else tensor
        for tensor in model.graph.initializer
    )
    return with_weights(model, external), weights


def _raw_bytes(tensor: onnx.TensorProto) -> int:
    """Size of a tensor's data as plain bytes, without reading it; 0 where it is kept in another way."""
    if not tensor.HasField("raw_data"):
        return 0
    return int(math.prod(tensor.dims) * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)


def _without_data(tensor: onnx.TensorProto) -> onnx.TensorProto:
    return onnx.TensorProto(
        name=tensor.name, dims=tensor.dims, data_type=tensor.data_type, data_location=TensorProto.EXTERNAL
    )
