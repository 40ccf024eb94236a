"""Gives the inputs of an ONNX model static shapes, or some of its dimensions for a model of several sizes."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import EncodeError  # type: ignore[import-untyped]
from onnx import helper

from ansor_mlflow.errors import UserInputError, one_line
from ansor_mlflow.graphs import (
    branches_of,
    corrected_types,
    run_briefly,
    start_session,
    static_shape,
    without_numbers,
)
from ansor_mlflow.networks.checks import require_sizes
from ansor_mlflow.networks.shapes import DeclaredShape, resolve_shapes
from ansor_mlflow.networks.values import fix_values, require_shape, take_known_branches, typed_values
from ansor_mlflow.tensors import OPEN, Arrays, TensorSpec, random_inputs

_log = logging.getLogger("ansor_mlflow")

_DTYPES: dict[int, str] = {
    helper.np_dtype_to_tensor_dtype(np.dtype(name)): name
    for name in (
        *("bool", "float16", "float32", "float64", "int8", "int16", "int32", "int64"),
        *("uint8", "uint16", "uint32", "uint64"),
    )
}
"""NumPy's names of the element types that NumPy itself has: inputs and outputs pass through it."""

_MAX_IR_VERSION = 10
"""ONNX Runtime refuses a file of a version that is newer than itself, whatever is in it; later versions only add types
of 4 bits and less, and configurations of several devices.
"""


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

    Inputs with `values` are none any more. `directory` is the `data_root` of weights that `read_onnx` left in their
    files, and `note` gets the sentence that a batch is taken as 1.
    """
    model.ir_version = min(model.ir_version, _MAX_IR_VERSION)
    inputs = _inputs(model.graph)
    for value in (*inputs, *model.graph.output):
        if value.type.tensor_type.elem_type not in _DTYPES:  # 0 where the type is that of a sequence or a map
            raise UserInputError(
                f"network={network}: {value.name!r} is not a tensor of NumPy's floats, integers or booleans; "
                "export the model without it (skl2onnx: options={'zipmap': False})"
            )
    declared = declared_shapes(model)
    dtypes = {value.name: _dtype(value) for value in inputs}
    fixed = typed_values(network, dtypes, values)
    for name, array in fixed.items():
        require_shape(network, name, array, declared[name])
    given = {**{name: array.shape for name, array in fixed.items() if _is_open(declared[name], array.ndim)}, **given}
    integers = {name for name, dtype in dtypes.items() if np.dtype(dtype).kind in "iub"}
    shapes = resolve_shapes(network, declared, given, batch_size=batch_size, integers=integers, note=note)
    _fix_inputs(model, network, shapes, fixed)
    hint = "give input_shapes that the network can take" if given else "export the model again"
    model = _infer_shapes(model, network, directory, hint=hint)
    require_sizes(model, network)  # before ONNX Runtime computes any
    if types := corrected_types(model, input_specs(model), directory):
        _forget_shapes(model.graph)
        model.graph.value_info.extend(types)
        model = _inferred(model, strict=False)
    require_sizes(model, network)
    for value in filter(_has_negative, (*model.graph.value_info, *model.graph.output)):  # an image was too small
        node = next((node for node in model.graph.node if value.name in node.output), onnx.NodeProto())
        sizes = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        raise UserInputError(
            f"network={network}: node {node.name!r} ({node.op_type}) would give {value.name!r} the shape {sizes}; "
            "give larger input_shapes"
        )
    _complete_outputs(model, network, directory)
    return model


def open_shapes(
    model: onnx.ModelProto, network: str, inputs: Sequence[TensorSpec], values: Mapping[str, Any] = {}
) -> onnx.ModelProto:
    """Returns the model of several sizes: with some dimensions of its inputs fixed, and dynamic ones. Changes `model`.

    `fix_shapes` takes its sizes; `inputs` has `OPEN` dimensions, and `values` what other inputs are for good.
    """
    model.ir_version = min(model.ir_version, _MAX_IR_VERSION)
    shapes = {spec.name: spec.shape for spec in inputs}
    arrays = typed_values(network, {value.name: _dtype(value) for value in _inputs(model.graph)}, values)
    fixed = []
    _forget_shapes(model.graph)
    for value in _inputs(model.graph):
        declared = _declared_shape(value)
        if value.name in shapes:
            names = [dim if isinstance(dim, str) and dim != "?" else None for dim in declared or ()]
            open_dims = zip(shapes[value.name], names or [None] * len(shapes[value.name]), strict=True)
            _set_shape(value, [name if size == OPEN else size for size, name in open_dims])
        else:
            array = arrays[value.name]
            shape = array.shape if _is_open(declared, array.ndim) else tuple(map(int, declared or ()))
            fixed.append(TensorSpec(value.name, shape, _dtype(value)))
    fix_values(model, network, fixed, arrays)
    return model


def declared_shapes(model: onnx.ModelProto) -> dict[str, DeclaredShape | None]:
    """The shapes of a model's inputs as its file declares them."""
    return {value.name: _declared_shape(value) for value in _inputs(model.graph)}


def input_specs(model: onnx.ModelProto) -> tuple[TensorSpec, ...]:
    """The inputs of a model with static shapes; before IR version 4 weights are listed with them, and are left out."""
    return tuple(map(_spec, _inputs(model.graph)))


def output_specs(model: onnx.ModelProto) -> tuple[TensorSpec, ...]:
    """The outputs of a model with static shapes, but for those that depend on the values of its inputs."""
    return tuple(map(_spec, model.graph.output))


def _inputs(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    weights = {weight.name for weight in graph.initializer}
    return [value for value in graph.input if value.name not in weights]


def _spec(value: onnx.ValueInfoProto) -> TensorSpec:
    shape = tuple(dim.dim_value if dim.HasField("dim_value") else OPEN for dim in value.type.tensor_type.shape.dim)
    return TensorSpec(name=value.name, shape=shape, dtype=_dtype(value))


def _dtype(value: onnx.ValueInfoProto) -> str:
    return _DTYPES[value.type.tensor_type.elem_type]


def _declared_shape(value: onnx.ValueInfoProto) -> DeclaredShape | None:
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return None
    # Some exporters write 0 or -1 for a dynamic dimension.
    return tuple(dim.dim_value if dim.dim_value > 0 else dim.dim_param or "?" for dim in tensor.shape.dim)


def _is_open(declared: DeclaredShape | None, rank: int) -> bool:
    return declared is None or (len(declared) == rank and not all(isinstance(dim, int) for dim in declared))


def _set_shape(value: onnx.ValueInfoProto, shape: Sequence[int | str | None]) -> None:
    elem_type = value.type.tensor_type.elem_type
    value.CopyFrom(helper.make_tensor_value_info(value.name, elem_type, shape, value.doc_string))


def _fix_inputs(model: onnx.ModelProto, network: str, shapes: Mapping[str, Sequence[int]], values: Arrays) -> None:
    """Gives inputs their shapes and values, and takes the branches that these decide."""
    inputs = _inputs(model.graph)
    declared = declared_shapes(model)
    for value in inputs:
        _set_shape(value, shapes[value.name])
    noted = [*model.graph.value_info, *model.graph.output]
    pairs = [pair for name, dims in declared.items() for pair in zip(dims or (), shapes[name], strict=False)]
    is_fixed_otherwise = None in declared.values() or any(dim != size for dim, size in pairs if isinstance(dim, int))
    if is_fixed_otherwise or any(map(_has_negative, noted)):
        _forget_shapes(model.graph)
    sizes = {dim: size for dim, size in pairs if isinstance(dim, str)}
    for value in noted:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in sizes:
                dim.dim_value = sizes[dim.dim_param]
    fix_values(model, network, list(map(_spec, inputs)), values)
    take_known_branches(model)


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
    _forget_shapes(model.graph)  # what the file says may be what is wrong
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


def _has_negative(value: onnx.ValueInfoProto) -> bool:
    return any(dim.dim_value < 0 for dim in value.type.tensor_type.shape.dim)


def _forget_shapes(graph: onnx.GraphProto) -> None:
    """Removes what was inferred from other input shapes; inference would take it for a contradiction."""
    del graph.value_info[:]
    _clear_shapes(graph.output)
    for branch in (branch for node in graph.node for branch in branches_of(node)):
        _clear_shapes(branch.input)  # of a loop
        _forget_shapes(branch)


def _clear_shapes(values: Iterable[onnx.ValueInfoProto]) -> None:
    for value in values:
        if value.type.HasField("tensor_type"):  # a branch may have values of another type
            value.type.tensor_type.ClearField("shape")


def _complete_outputs(model: onnx.ModelProto, network: str, directory: Path | None) -> None:
    """Asks ONNX Runtime for output shapes that ONNX could not infer; it evaluates the constant parts of a graph too.

    It says [] of a scalar, and of an output that it knows nothing of; a call shows how many axes that has. None and
    names are dimensions that depend on values.
    """
    outputs = model.graph.output
    if all(static_shape(output) is not None for output in outputs):
        return
    try:
        session = start_session(model.SerializeToString(), directory)
        shapes: list[list[int | str | None]] = [list(output.shape) for output in session.get_outputs()]
        has_shape = [output.type.tensor_type.HasField("shape") for output in outputs]
        if not all(shape or known for shape, known in zip(shapes, has_shape, strict=True)):
            arrays = run_briefly(session, None, random_inputs(input_specs(model), seed=0))
            if arrays is None:
                raise TimeoutError("a run does not end in time")
            shapes = [shape or [None] * array.ndim for shape, array in zip(shapes, arrays, strict=True)]
    except Exception as err:  # ONNX Runtime has an error class for each of its status codes, without a common base
        raise UserInputError(
            f"network={network}: neither ONNX nor ONNX Runtime can infer the shapes of its outputs "
            f"({one_line(err)}); export the model with static shapes"
        ) from err
    for output, shape in zip(outputs, shapes, strict=True):
        _set_shape(output, shape)
