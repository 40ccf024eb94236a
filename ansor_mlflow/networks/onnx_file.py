"""Reads ONNX files and fixes the shapes of their inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx
import onnxruntime
from google.protobuf.message import DecodeError, EncodeError  # type: ignore[import-untyped]
from onnx import TensorProto, helper

from ansor_mlflow.errors import UserInputError
from ansor_mlflow.networks.shapes import DeclaredShape, resolve_shapes
from ansor_mlflow.tensors import TensorSpec

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


def read_onnx(path: Path) -> onnx.ModelProto:
    """Reads a model and the external data it refers to.

    Raises:
        UserInputError: The file or its external data is missing or not an ONNX model.
    """
    try:
        model = onnx.load(path, format="protobuf")
    except OSError as err:
        raise UserInputError(
            f"network={path}: the file cannot be read ({err.strerror}); give an ONNX file or a built-in name"
        ) from err
    except DecodeError as err:
        raise UserInputError(
            f"network={path}: not a valid ONNX file, or cut short ({_one_line(err)}); export the model again"
        ) from err
    except onnx.checker.ValidationError as err:
        raise UserInputError(
            f"network={path}: its external data cannot be read ({_one_line(err)}); put that file beside the model"
        ) from err
    if not model.HasField("graph"):  # an empty file is a valid message without fields
        raise UserInputError(f"network={path}: the file holds no ONNX model; export the model again")
    if not model.graph.node:
        raise UserInputError(f"network={path}: the model has no nodes, so there is nothing to tune")
    return model


def fix_shapes(model: onnx.ModelProto, network: str, given: Mapping[str, Sequence[int]]) -> onnx.ModelProto:
    """Returns the model with static shapes everywhere that shape inference can derive one. Changes `model`.

    Args:
        model: A model.
        network: What messages call it.
        given: Shapes that replace those of its inputs.

    Raises:
        UserInputError: A shape does not fit, an input or output still has a dynamic dimension, or holds no numbers.
    """
    inputs = _inputs(model.graph)
    for value in (*inputs, *model.graph.output):
        _require_numbers(value, network)
    declared = {value.name: _declared_shape(value) for value in inputs}
    shapes = resolve_shapes(network, declared, given)
    for value in inputs:
        _set_shape(value, shapes[value.name])
    if shapes != declared:
        _forget_shapes(model.graph)
    try:
        model = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    except onnx.shape_inference.InferenceError as err:
        hint = "give input_shapes that the network can take" if given else "export the model again"
        raise UserInputError(f"network={network}: its shapes do not fit together ({_one_line(err)}); {hint}") from err
    except EncodeError as err:
        raise UserInputError(
            f"network={network}: the model is larger than 2 GiB, the limit of an ONNX message; split it"
        ) from err
    _complete_outputs(model, network)
    return model


def input_specs(model: onnx.ModelProto) -> tuple[TensorSpec, ...]:
    """The inputs of a model with static shapes; before IR version 4 weights are listed with them, and are left out."""
    return tuple(map(_spec, _inputs(model.graph)))


def output_specs(model: onnx.ModelProto) -> tuple[TensorSpec, ...]:
    """The outputs of a model with static shapes."""
    return tuple(map(_spec, model.graph.output))


def _inputs(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    weights = {weight.name for weight in (*graph.initializer, *(sparse.values for sparse in graph.sparse_initializer))}
    return [value for value in graph.input if value.name not in weights]


def _spec(value: onnx.ValueInfoProto) -> TensorSpec:
    tensor = value.type.tensor_type
    shape = tuple(dim.dim_value for dim in tensor.shape.dim)
    return TensorSpec(name=value.name, shape=shape, dtype=_DTYPES[tensor.elem_type])


def _require_numbers(value: onnx.ValueInfoProto, network: str) -> None:
    if value.type.tensor_type.elem_type not in _DTYPES:  # 0 where the type is that of a sequence or a map
        raise UserInputError(
            f"network={network}: {value.name!r} is not a tensor of NumPy's floats, integers or booleans; "
            "export the model without it"
        )


def _declared_shape(value: onnx.ValueInfoProto) -> DeclaredShape | None:
    if not value.type.tensor_type.HasField("shape"):
        return None
    # Some exporters write 0 or -1 for a dynamic dimension.
    return tuple(
        dim.dim_value if dim.dim_value > 0 else dim.dim_param or "?" for dim in value.type.tensor_type.shape.dim
    )


def _set_shape(value: onnx.ValueInfoProto, shape: Sequence[int]) -> None:
    elem_type = value.type.tensor_type.elem_type
    value.CopyFrom(helper.make_tensor_value_info(value.name, elem_type, shape, value.doc_string))


def _forget_shapes(graph: onnx.GraphProto) -> None:
    """Removes what was inferred from other input shapes; inference would take it for a contradiction."""
    del graph.value_info[:]
    for output in graph.output:
        if output.type.HasField("tensor_type"):  # a branch may have an output of another type
            output.type.tensor_type.ClearField("shape")
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _forget_shapes(attribute.g)


def _complete_outputs(model: onnx.ModelProto, network: str) -> None:
    """Asks ONNX Runtime for output shapes that ONNX could not infer; it evaluates the constant parts of a graph too."""
    if all(map(_is_static, model.graph.output)):
        return
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    except Exception as err:  # ONNX Runtime has an error class for each of its status codes, without a common base
        raise UserInputError(
            f"network={network}: neither ONNX nor ONNX Runtime can infer the shapes of its outputs "
            f"({_one_line(err)}); export the model with static shapes"
        ) from err
    for output, found in zip(model.graph.output, session.get_outputs(), strict=True):
        if not all(isinstance(dim, int) for dim in found.shape):
            raise UserInputError(
                f"network={network}: the shape of output {output.name!r} depends on the input's values; "
                "only static shapes can be tuned"
            )
        _set_shape(output, found.shape)


def _is_static(value: onnx.ValueInfoProto) -> bool:
    tensor = value.type.tensor_type
    return bool(tensor.HasField("shape")) and all(dim.HasField("dim_value") for dim in tensor.shape.dim)


def _one_line(err: Exception) -> str:
    text = " ".join(str(err).split())
    return text if len(text) <= 300 else f"{text[:300]}…"
