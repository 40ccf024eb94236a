"""All rewritings of operators that TVM imports wrongly, slowly, or not at all."""

from __future__ import annotations

import onnx

from ansor_mlflow.graphs.editor import Rewritings, rewrite
from ansor_mlflow.graphs.operators import (
    convolution,
    elementwise,
    indexing,
    normalization,
    quantized,
    recurrent,
    resize,
)

_FIRST: Rewritings = {**elementwise.EXTREMA, **quantized.REWRITINGS}
"""Quantisation takes extrema of its own, whose NaN become integers."""
_OTHERS: Rewritings = {
    **convolution.REWRITINGS,
    **elementwise.REWRITINGS,
    **indexing.REWRITINGS,
    **normalization.REWRITINGS,
    **recurrent.REWRITINGS,
    **resize.REWRITINGS,
}


def rewrite_operators(model: onnx.ModelProto) -> onnx.ModelProto:
    """A model without the operators that have a form which TVM computes better; the model itself if it has none.

    Its constants are initializers.
    """
    return rewrite(rewrite(model, _FIRST), _OTHERS)
