"""All rewritings of operators that TVM imports wrongly, slowly, or not at all, and what stays with ONNX Runtime.

That is what TVM would compute wrongly; an operator that it cannot import or lower is found by trying.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ansor_mlflow.graphs.editor import GraphEditor, Rewritings, Unchanged, rewrite
from ansor_mlflow.graphs.operators import (
    byte_sums,
    convolution,
    elementwise,
    indexing,
    loops,
    normalization,
    quantized,
    recurrent,
    resize,
)
from ansor_mlflow.graphs.types import FLOATS
from ansor_mlflow.graphs.walk import attributes_of, input_of

_FIRST: Rewritings = {**elementwise.EXTREMA, **quantized.REWRITINGS}
"""Quantisation takes extrema of its own, whose NaN become integers."""
_OTHERS: Rewritings = {
    **quantized.PAIRS,
    **{
        operator: rewriting
        for family in (convolution, elementwise, indexing, normalization, resize)
        for operator, rewriting in family.REWRITINGS.items()
    },
}
_WhyNot = Callable[[onnx.NodeProto, GraphEditor], "str | None"]


def rewrite_operators(
    model: onnx.ModelProto, *, writes_out_steps: bool = False, has_dot_products: bool = False
) -> onnx.ModelProto:
    """A model without the operators that have a form which TVM computes better; the model itself if it has none.

    `writes_out_steps` says whether recurrent layers of short sequences become nodes for each step, too, and
    `has_dot_products` whether the CPU adds products of bytes: then those stay integers.
    """
    first = {**_FIRST, **byte_sums.OF_BYTES} if has_dot_products else _FIRST
    others = {**_OTHERS, **recurrent.REWRITINGS} if writes_out_steps else _OTHERS
    return rewrite(rewrite(model, first), others)


def keep_bytes(model: onnx.ModelProto) -> onnx.ModelProto:
    """A model whose products of what was quantised are those of bytes, for CPUs that add these.

    To be called before constants are folded, which makes floats of weights of 8 bits.
    """
    return rewrite(rewrite(rewrite(model, quantized.PRODUCTS), byte_sums.STEPS), byte_sums.REQUANTIZED)


def has_weights_of(bits: int, model: onnx.ModelProto) -> bool:
    """Whether the weights of all products of bytes are of so many bits, from -64 to 64 for 7, as the CPU's products
    are exact with; to be called of what `rewrite_operators` made.
    """
    weights = {node.input[1] for node in model.graph.node if quantized.is_integer_product(node)}
    most = 2 ** (bits - 1)
    values = (numpy_helper.to_array(each) for each in model.graph.initializer if each.name in weights)
    return all(abs(value.astype(np.int16)).max(initial=0) <= most for value in values)


def write_out_loops(model: onnx.ModelProto) -> onnx.ModelProto:
    """A model with the nodes of all steps in the place of a loop whose number of steps is known."""
    return rewrite(model, loops.REWRITINGS)


def fallback_reasons(model: onnx.ModelProto) -> dict[int, str]:
    """Why TVM would compute a node wrongly or not at all, in a few words, by its place in the graph."""
    graph, reasons = GraphEditor(model), {}
    for place, node in enumerate(model.graph.node):
        with contextlib.suppress(Unchanged):  # shapes that are not known are a reason of their own
            if reason := _why_not(node, graph):
                reasons[place] = reason
    return reasons


def _why_not(node: onnx.NodeProto, graph: GraphEditor) -> str | None:
    # A constant of a Resize may be empty.
    data = [name for name in (*node.input, *node.output) if name and not graph.is_constant(name)]
    if any(0 in (graph.find_shape(name) or ()) for name in data):
        return "a tensor without elements"
    if node.op_type.startswith("Reduce") and attributes_of(node).get("noop_with_empty_axes"):
        with contextlib.suppress(Unchanged):
            graph.reduced_axes(node)
            return None
        return "a reduction over no axis"
    return _WHY_NOT[node.op_type](node, graph) if node.op_type in _WHY_NOT else None


def _attribute(name: str, value: object, reason: str) -> _WhyNot:
    """The reason, where a node has an attribute of that value."""
    return lambda node, _graph: reason if attributes_of(node).get(name) == value else None


def _wrapped_pad(node: onnx.NodeProto, graph: GraphEditor) -> str | None:
    pads = input_of(node, 1)
    crops = not graph.is_constant(pads) or graph.value(pads).min() < 0
    return "a cropped tensor that is continued" if crops and attributes_of(node).get("mode") == "wrap" else None


def _signed_shift(node: onnx.NodeProto, graph: GraphEditor) -> str | None:
    """Shifts by more than the width, and by less than nothing, are defined by ONNX, and by no processor."""
    is_signed = helper.tensor_dtype_to_np_dtype(graph.dtype(node.input[0])).kind == "i"
    return "a shift of signed integers" if is_signed else None


def _floored_remainder(node: onnx.NodeProto, graph: GraphEditor) -> str | None:
    is_float = graph.dtype(node.input[0]) in FLOATS and not attributes_of(node).get("fmod")
    return "a remainder of floats with the divisor's sign" if is_float else None


def _layer_norm(node: onnx.NodeProto, graph: GraphEditor) -> str | None:
    reason = "statistics, several axes or a scale that is broadcast, in another type than float32"
    return None if normalization.is_plain_layer_norm(node, graph) else reason


def _regions(node: onnx.NodeProto, graph: GraphEditor) -> str | None:
    if attributes_of(node).get("mode") == "max":
        return "maxima of regions"
    return "regions that may be empty" if indexing.may_have_empty_regions(node, graph) else None


_WHY_NOT: Mapping[str, _WhyNot] = {
    **dict.fromkeys(("GRU", "LSTM", "RNN"), recurrent.why_not_recurrent),
    "BatchNormalization": _attribute("training_mode", 1, "statistics of the batch"),
    "BitShift": _signed_shift,
    "DynamicQuantizeLSTM": recurrent.why_not_quantized,
    "LayerNormalization": _layer_norm,
    "LpPool": _attribute("ceil_mode", 1, "windows beyond the end"),
    "Mod": _floored_remainder,
    "Pad": _wrapped_pad,
    "Resize": resize.why_not_resized,
    "RoiAlign": _regions,
    "SpaceToDepth": _attribute("mode", "CRD", "depth before blocks"),
}
