"""Models of older versions of ONNX's operators."""

from __future__ import annotations

import onnx
from onnx import helper, version_converter

from ansor_mlflow.graphs.rewriting import opset_version

OLDEST_OPSET = 11
"""From here on slices, pads and bounds of Clip are inputs, and Upsample is Resize."""

_OLD_RESIZE = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
"""How Upsample, and Resize before version 11, count pixels."""


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
        raised: onnx.ModelProto = version_converter.convert_version(model, OLDEST_OPSET)
    except Exception:  # noqa: BLE001  it raises errors of many kinds for what it does not know
        return model
    for node in raised.graph.node:
        if node.op_type in ("Resize", "Upsample"):  # the converter forgets that they had one way of counting
            kept = [attribute for attribute in node.attribute if attribute.name == "mode"]
            del node.attribute[:]
            node.attribute.extend([*kept, *(helper.make_attribute(*item) for item in _OLD_RESIZE.items())])
    return raised
