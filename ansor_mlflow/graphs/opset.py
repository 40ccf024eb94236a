"""Models of older versions of ONNX's operators."""

from __future__ import annotations

import onnx
from onnx import helper, numpy_helper, version_converter

from ansor_mlflow.graphs.editor import opset_version
from ansor_mlflow.networks import without_numbers

OLDEST_OPSET = 11
"""From here on slices, pads and bounds of Clip are inputs, and Upsample is Resize."""

_COUNTING = {"coordinate_transformation_mode": "asymmetric"}
"""How Upsample, and Resize before version 11, count positions. ONNX Runtime rounds them up where a tensor shrinks."""


def raise_opset(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with operators of version 11 at least, as far as ONNX's own converter knows them.

    TVM reads most older operators, but neither Slice nor Upsample by their attributes.

    Args:
        model: Stays as it is.

    Returns:
        A model that computes the same; the same model, if it is new enough or cannot be converted.
    """
    if opset_version(model) >= OLDEST_OPSET:
        return model
    try:
        raised = without_numbers(model, lambda light: version_converter.convert_version(light, OLDEST_OPSET))
    except Exception:  # noqa: BLE001  it raises errors of many kinds for what it does not know
        return model
    del raised.graph.value_info[:]  # a mask of Dropout was of floats
    constants = {tensor.name: tensor for tensor in raised.graph.initializer}
    constants |= {n.output[0]: a.t for n in raised.graph.node if n.op_type == "Constant" for a in n.attribute}
    for node in raised.graph.node:
        if node.op_type == "Resize":  # the converter forgets how positions were counted
            scales = constants.get(node.input[2])
            shrinks = scales is not None and numpy_helper.to_array(scales).min() < 1
            kept = [attribute for attribute in node.attribute if attribute.name == "mode"]
            counting = _COUNTING | {"nearest_mode": "ceil" if shrinks else "floor"}
            del node.attribute[:]
            node.attribute.extend([*kept, *(helper.make_attribute(*item) for item in counting.items())])
    return raised
