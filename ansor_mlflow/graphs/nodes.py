"""What the rewritings of ONNX graphs share."""

from __future__ import annotations

import math
from collections.abc import Iterator

import onnx
from onnx import TensorProto, helper

from ansor_mlflow.networks import with_inputs_for

FLOATS = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16}
_LAYERS = {"Conv", "ConvTranspose", "GRU", "Gather", "Gemm", "LSTM", "MatMul", "RNN"}
_MAX_KEPT_ELEMENTS = 2**16
"""Larger constants of layers are weights, of which nothing is computed beforehand."""
_MAX_ELEMENTS = 2**24
"""Larger constants are always left out."""

ValueInfos = dict[str, onnx.ValueInfoProto]
"""The type of each tensor of a graph."""


def uses(graph: onnx.GraphProto) -> Iterator[str]:
    """Yields each name as often as a node, also one in a branch, or an output takes it."""
    for node in graph.node:
        yield from inputs_of(node)
    yield from (output.name for output in graph.output)


def inputs_of(node: onnx.NodeProto) -> Iterator[str]:
    """Yields the names that a node takes, and those that its branches take."""
    yield from node.input
    for branch in branches_of(node):
        yield from uses(branch)


def branches_of(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yields the graphs that are attributes of a node, as those of `If`, `Loop` and `Scan` are."""
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g


def attribute(node: onnx.NodeProto, name: str, default: float) -> float:
    """The number that is a node's attribute of that name, or the default."""
    return next((float(onnx.helper.get_attribute_value(a)) for a in node.attribute if a.name == name), default)


def remove_unused_initializers(graph: onnx.GraphProto) -> None:
    """Removes them from the inputs, too, where older ONNX files list them."""
    unused = {initializer.name for initializer in graph.initializer} - set(uses(graph))
    for entries in (graph.initializer, graph.input):
        for entry in [entry for entry in entries if entry.name in unused]:
            entries.remove(entry)


def without_weights(model: onnx.ModelProto) -> tuple[onnx.ModelProto, dict[str, onnx.TensorProto]]:
    """A copy in which large weights are inputs, and these weights by name; it always fits into one message of 2 GiB."""
    graph = model.graph
    computed_with = {name for node in graph.node if node.op_type not in _LAYERS for name in inputs_of(node)}
    weights = {w.name: w for w in graph.initializer if _is_weight(w, w.name in computed_with)}
    return with_inputs_for(model, weights), weights


def _is_weight(tensor: onnx.TensorProto, is_computed_with: bool) -> bool:
    num_elements: int = math.prod(tensor.dims)
    return num_elements > (_MAX_ELEMENTS if is_computed_with else _MAX_KEPT_ELEMENTS)


def is_tensor(value: onnx.ValueInfoProto | None) -> bool:
    """Whether a value is no sequence, optional or map; one of which nothing is known counts as a tensor."""
    return value is None or value.type.WhichOneof("value") in (None, "tensor_type")


def value_infos(model: onnx.ModelProto) -> ValueInfos:
    """The type of each tensor, with its shape where ONNX can infer it; weights included."""
    graph = onnx.shape_inference.infer_shapes(without_weights(model)[0], data_prop=True).graph
    weights = [helper.make_tensor_value_info(w.name, w.data_type, w.dims) for w in graph.initializer]
    return {value.name: value for value in (*weights, *graph.input, *graph.value_info, *graph.output)}
