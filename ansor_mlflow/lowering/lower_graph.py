"""Lowers one ONNX graph: import, layout, fused functions."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import onnx

from ansor_mlflow.device import has_arithmetic, platform_of
from ansor_mlflow.errors import first_line
from ansor_mlflow.settings import LoweringSettings
from ansor_mlflow.sketches import why_not_compilable

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.ir.transform import Pass
    from tvm.target import Target

_CHANNELS_LAST = {
    "relax.nn.conv1d": ["NWC", "WIO"],
    "relax.nn.conv2d": ["NHWC", "HWIO"],
    "relax.nn.conv3d": ["NDHWC", "DHWIO"],
}
"""Channels are what is vectorised."""
_LAYOUTS = {
    "auto": _CHANNELS_LAST,
    "NHWC": _CHANNELS_LAST,
    "NCHW": {
        "relax.nn.conv1d": ["NCW", "OIW"],
        "relax.nn.conv2d": ["NCHW", "OIHW"],
        "relax.nn.conv3d": ["NCDHW", "OIDHW"],
    },
}
_MAX_FUSED = 32
"""Operators of a fused function. The search takes a minute for a function of many more, such as the end of an unrolled
recurrent layer; no other network of the gallery has one of as many."""


class NotLoweredError(Exception):
    """Says in a few words why TVM cannot compute a graph."""


def lower_graph(model: onnx.ModelProto, target: Target, settings: LoweringSettings) -> IRModule:
    """Lowers a simplified graph with static shapes to fused functions, which the Relax function "main" calls."""
    from tvm import relax

    from ansor_mlflow.lowering.elementwise import constants_second
    from ansor_mlflow.lowering.relax_passes import (
        BYTES_IN_CONVOLUTIONS,
        FOLD_CONSTANTS,
        FUNCTIONS,
        bound_indices,
        correct_patterns,
        even_channels,
        joined_layer_norms,
        named_by_operators,
    )

    has_pairs = settings.dtype == "bfloat16" and has_arithmetic(target, "bfloat16")
    passes = [
        *_first_passes(),
        joined_layer_norms,
        *([even_channels] if has_pairs else []),
        constants_second,  # layouts are those of the first operands
        bound_indices,
        relax.transform.ConvertLayout(_LAYOUTS[settings.layout]),
        *_compute_in(settings.dtype),
        FOLD_CONSTANTS,  # weights in their layout and type
        BYTES_IN_CONVOLUTIONS,
        # TVM's pipeline "zero", with more to say of what is fused
        relax.transform.LegalizeOps(FUNCTIONS),
        named_by_operators,
        relax.transform.AnnotateTIROpPattern(),
        correct_patterns,
        relax.transform.FoldConstant(),
        relax.transform.FuseOps(),
        relax.transform.FuseTIR(),
        relax.transform.AttachAttrLayoutFreeBuffers(),
    ]
    return _lowered(model, target, passes)


def lower_node(model: onnx.ModelProto, target: Target) -> IRModule:
    """Lowers a graph only as far as shows whether TVM knows its operators: milliseconds for one node."""
    from tvm import relax

    return _lowered(model, target, [*_first_passes(), relax.transform.LegalizeOps()])


def _first_passes() -> list[Pass]:
    """Passes that the importer's output needs whatever comes next."""
    from tvm import relax

    from ansor_mlflow.lowering.elementwise import EXPAND_ELEMENTWISE
    from ansor_mlflow.lowering.relax_passes import FOLD_CONSTANTS, positive_squeeze_axes

    return [
        positive_squeeze_axes,
        relax.transform.DecomposeOpsForInference(),
        EXPAND_ELEMENTWISE,
        relax.transform.CanonicalizeBindings(),
        FOLD_CONSTANTS,
    ]


def _compute_in(dtype: Literal["float32", "float16", "bfloat16"]) -> list[Pass]:
    """The passes over a Relax module that make it compute in `dtype`.

    Convolutions and products of matrices take 16-bit operands and add up in float32; what follows them works on 16
    bits. Inputs and outputs of the network stay as they are.
    """
    from tvm import relax

    from ansor_mlflow.lowering.importer import hide_functions, show_functions
    from ansor_mlflow.lowering.relax_passes import float16_to_bfloat16

    if dtype == "float32":
        return []
    convert = [relax.transform.ConvertToDataflow(), relax.transform.ToMixedPrecision(out_dtype="float32")]
    mixed: list[Pass] = [hide_functions, *convert, show_functions]
    return mixed if dtype == "float16" else [*mixed, float16_to_bfloat16]


def _lowered(model: onnx.ModelProto, target: Target, passes: Sequence[Pass]) -> IRModule:
    import tvm

    mod = _import_onnx(model, target)
    try:
        with target, tvm.transform.PassContext(config={"relax.FuseOps.max_depth": _MAX_FUSED}):
            mod = tvm.transform.Sequential(list(passes))(mod)
    except Exception as err:  # passes raise errors of every kind for what they do not expect
        raise NotLoweredError(f"TVM's passes: {first_line(err)}") from err
    if left := _operators_left(mod):
        raise NotLoweredError(f"TVM has no kernel for {', '.join(left)}")
    if platform_of(target).by_llvm and (reason := why_not_compilable(mod, target)):
        raise NotLoweredError(f"TVM's code generator: {reason}")
    return mod


def _import_onnx(model: onnx.ModelProto, target: Target) -> IRModule:
    import tvm

    from ansor_mlflow.lowering.importer import import_onnx

    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):  # it prints what it then raises
            warnings.simplefilter("ignore")
            return import_onnx(model, target)
    except tvm.error.OpNotImplemented as err:
        raise NotLoweredError("TVM does not import it") from err
    except Exception as err:  # the importer's converters raise errors of every kind for a graph they do not understand
        raise NotLoweredError(f"TVM's importer: {first_line(err)}") from err


def _operators_left(mod: IRModule) -> list[str]:
    """Names of Relax's operators that have not become functions."""
    from tvm import relax

    found: set[str] = set()

    def visit(expr: object) -> None:
        if isinstance(expr, relax.Call):
            found.add(getattr(expr.op, "name", ""))

    for _, function in mod.functions_items():
        if isinstance(function, relax.Function):
            relax.analysis.post_order_visit(function, visit)
    return sorted(found - {"", "relax.call_tir"})
