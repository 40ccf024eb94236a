"""Types of tensors, as ONNX Runtime infers them where ONNX does not, or infers what no run gives.

ONNX knows nothing of the sizes behind operators of other domains, and counts the bins of `STFT` wrongly. What runs
such an operator is ONNX Runtime, so that its word counts.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

from ansor_mlflow.graphs.walk import is_large, with_inputs_for, without_weights
from ansor_mlflow.tensors import Arrays, TensorSpec, random_inputs

FLOATS = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16}
_MEASURED_DOMAIN = "ai.onnx.ml"
"""Its operators on tensors have outputs of sizes that follow from those of their inputs, which nobody infers."""

_MAX_RUN_S = 4.0
"""Seconds after which a run that has not failed counts as one that will not."""
_FATAL = 4
"""Severity of ONNX Runtime's messages from which they are shown."""
_ELEMENT_TYPES = {f"tensor({name.lower()})": number for name, number in TensorProto.DataType.items()}
"""ONNX's numbers of element types by ONNX Runtime's names of tensors."""

ValueInfos = dict[str, onnx.ValueInfoProto]
"""The type of each tensor of a graph."""
_Shape = tuple[int, ...]


def known_dims(value: onnx.ValueInfoProto | None) -> tuple[int | None, ...] | None:
    """The sizes of a tensor's axes, None for one that is not static; None where nothing is known of its shape."""
    if value is None or not value.type.tensor_type.HasField("shape"):
        return None
    return tuple(dim.dim_value if dim.HasField("dim_value") else None for dim in value.type.tensor_type.shape.dim)


def static_shape(value: onnx.ValueInfoProto | None) -> _Shape | None:
    """The shape of a tensor; None where it is not known, or the value is no tensor."""
    dims = known_dims(value)
    known = tuple(size for size in dims or () if size is not None)
    return known if dims is not None and len(known) == len(dims) else None


def is_tensor(value: onnx.ValueInfoProto | None) -> bool:
    """Whether a value is no sequence, optional or map; one of which nothing is known counts as a tensor."""
    return value is None or value.type.WhichOneof("value") in (None, "tensor_type")


def value_infos(model: onnx.ModelProto) -> ValueInfos:
    """The type of each tensor, with its shape where ONNX can infer it; weights included."""
    return noted_value_infos(onnx.shape_inference.infer_shapes(without_weights(model)[0], data_prop=True).graph)


def noted_value_infos(graph: onnx.GraphProto) -> ValueInfos:
    """The type of each tensor that a graph itself says, weights included."""
    weights = [helper.make_tensor_value_info(w.name, w.data_type, w.dims) for w in graph.initializer]
    return {value.name: value for value in (*weights, *graph.input, *graph.value_info, *graph.output)}


def corrected_types(
    model: onnx.ModelProto, inputs: Sequence[TensorSpec], directory: Path | None
) -> list[onnx.ValueInfoProto]:
    """Types of tensors with which ONNX infers all others as ONNX Runtime does: for most models none.

    Where nobody infers a shape, the model is run with inputs of these types; `directory` has the weights that are not
    in it.
    """
    measured: list[onnx.ValueInfoProto] = []
    while True:
        types, shapes = _inferred(model, measured)
        unknown = [
            name
            for node in model.graph.node
            if node.domain == _MEASURED_DOMAIN and all(name in shapes for name in node.input if name)
            for name in node.output
            if name and name not in shapes
        ]
        found = _measured(model, unknown, inputs, directory) if unknown else []
        if not found:
            return types
        measured += found


def types_as_before(model: onnx.ModelProto, before: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """Does what `corrected_types` does, for a model that was made of one with such types; nothing is run."""
    produced = {name for node in model.graph.node if node.domain == _MEASURED_DOMAIN for name in node.output}
    return _inferred(model, [value for value in before.graph.value_info if value.name in produced])[0]


def _inferred(
    model: onnx.ModelProto, known: Iterable[onnx.ValueInfoProto]
) -> tuple[list[onnx.ValueInfoProto], dict[str, _Shape]]:
    """The types that ONNX has to be told beside those that are known, and the shapes of all tensors that have one."""
    # Large weights are inputs of it, and it has neither types nor shapes of what it computes.
    light = with_inputs_for(model, {weight.name for weight in model.graph.initializer if is_large(weight)})
    for output in light.graph.output:
        output.ClearField("type")
    del light.graph.value_info[:]
    types = list(known)
    light.graph.value_info.extend(types)
    theirs = _onnxruntimes_types(light)
    while True:
        del light.graph.value_info[:]
        light.graph.value_info.extend(types)
        graph = onnx.shape_inference.infer_shapes(light, data_prop=True).graph
        values = (*graph.input, *graph.value_info, *graph.output)
        shapes = {value.name: shape for value in values if (shape := static_shape(value)) is not None}
        differ = {name for name, value in theirs.items() if shapes.get(name) != static_shape(value)}
        differ -= {value.name for value in types}
        unaffected = (node for node in graph.node if differ.isdisjoint(node.input))
        first = [theirs[name] for node in unaffected for name in node.output if name in differ]
        if not first:
            return types, shapes | {weight.name: tuple(weight.dims) for weight in graph.initializer}
        types += first


def _onnxruntimes_types(model: onnx.ModelProto) -> Mapping[str, onnx.ValueInfoProto]:
    """Types of the nodes' outputs, where ONNX Runtime infers a static shape; none, if it does not load the model.

    A shape without axes is left out: ONNX Runtime writes what it does not know in the same way.
    """
    try:
        produced = (name for node in model.graph.node for name in node.output if name)
        session = start_session(_with_outputs(model, produced).SerializeToString(), None, optimized=False)
    except Exception:  # noqa: BLE001 - ONNX Runtime has an error class for each of its status codes, protobuf its own
        return {}
    return {
        output.name: helper.make_tensor_value_info(output.name, _ELEMENT_TYPES[output.type], output.shape)
        for output in session.get_outputs()
        if output.type in _ELEMENT_TYPES and output.shape and all(isinstance(size, int) for size in output.shape)
    }


def _measured(
    model: onnx.ModelProto, names: Sequence[str], inputs: Sequence[TensorSpec], directory: Path | None
) -> list[onnx.ValueInfoProto]:
    """Types of tensors in a run; none, if ONNX Runtime does not run the model, or not for long."""
    try:
        session = start_session(_with_outputs(model, names).SerializeToString(), directory, optimized=False)
        arrays = run_briefly(session, names, random_inputs(inputs, seed=0)) or []
    except Exception:  # noqa: BLE001 - as above
        return []
    return [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in zip(names, arrays, strict=False)  # none of a run that is too long
        if isinstance(array, np.ndarray)
    ]


def _with_outputs(model: onnx.ModelProto, names: Iterable[str]) -> onnx.ModelProto:
    """A copy of a model that returns more tensors."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    there = {output.name for output in copy.graph.output}
    copy.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in there)
    return copy


def start_session(model: bytes, directory: Path | None, *, optimized: bool = True) -> onnxruntime.InferenceSession:
    """Loads a model in ONNX Runtime, which raises whatever it likes where it cannot.

    Optimised, it computes what is constant, which shows more of shapes. `directory` has the model's external data.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = _FATAL
    levels = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_BASIC if optimized else levels.ORT_DISABLE_ALL
    if directory is not None:  # onnxruntime_session_options_config_keys.h
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", str(directory.resolve())
        )
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def run_briefly(session: onnxruntime.InferenceSession, names: Sequence[str] | None, inputs: Arrays) -> list[Any] | None:
    """Outputs of a model, all where none is named; None where they take longer than `_MAX_RUN_S`."""
    options = onnxruntime.RunOptions()
    options.log_severity_level = _FATAL
    is_slow = threading.Event()

    def give_up() -> None:
        is_slow.set()
        options.terminate = True

    timer = threading.Timer(_MAX_RUN_S, give_up)
    timer.start()
    try:
        return list(session.run(names, inputs, options))
    except Exception:
        if is_slow.is_set():
            return None
        raise
    finally:
        timer.cancel()
