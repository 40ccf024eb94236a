"""Lowers one ONNX graph: import, layout, fused functions."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import onnx

from ansor_mlflow.device import platform_of
from ansor_mlflow.errors import first_line
from ansor_mlflow.settings import Layout, LoweringSettings
from ansor_mlflow.sketches import why_not_compilable

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.ir.transform import Pass, PassContext
    from tvm.target import Target

_LAYOUTS = {
    "NHWC": {
        "relax.nn.conv1d": ["NWC", "WIO"],
        "relax.nn.conv2d": ["NHWC", "HWIO"],
        "relax.nn.conv3d": ["NDHWC", "DHWIO"],
    },
    "NCHW": {
        "relax.nn.conv1d": ["NCW", "OIW"],
        "relax.nn.conv2d": ["NCHW", "OIHW"],
        "relax.nn.conv3d": ["NCDHW", "OIDHW"],
    },
}
_MAX_FUSED = 32
"""Operators of a fused function. The search takes a minute for a function of many more, such as the end of an unrolled
recurrent layer; no other network of the gallery has one of as many."""
_LOWERED = {"relax.call_tir"}
"""Calls that are left of operators which have become functions."""


class NotLoweredError(Exception):
    """Says in a few words why TVM cannot compute a graph."""


def lower_graph(model: onnx.ModelProto, target: Target, settings: LoweringSettings) -> IRModule:
    """Lowers a simplified graph with static shapes to fused functions, which the Relax function "main" calls.

    Raises:
        NotLoweredError: TVM cannot compute the graph.
    """
    from tvm import relax

    from ansor_mlflow.lowering.constants import fold_constants
    from ansor_mlflow.lowering.elementwise import constants_second
    from ansor_mlflow.lowering.indices import bound_indices
    from ansor_mlflow.lowering.relax_passes import PLACES, CorrectPatterns

    passes = [
        *_first_passes(),
        constants_second(),
        bound_indices(),
        relax.transform.ConvertLayout(_LAYOUTS[resolve_layout(settings.layout)]),
        *_compute_in(settings.dtype),
        fold_constants(),
        # TVM's pipeline "zero", with more to say of what is fused
        relax.transform.LegalizeOps(PLACES),
        relax.transform.AnnotateTIROpPattern(),
        CorrectPatterns(),
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


def resolve_layout(layout: Layout) -> Literal["NHWC", "NCHW"]:
    """The layout that "auto" stands for: channels last, because they are what is vectorised."""
    return "NHWC" if layout == "auto" else layout


def _first_passes() -> list[Pass]:
    """Passes that the importer's output needs whatever comes next."""
    from tvm import relax

    from ansor_mlflow.lowering.constants import fold_constants
    from ansor_mlflow.lowering.elementwise import expand_elementwise
    from ansor_mlflow.lowering.indices import positive_squeeze_axes

    return [
        positive_squeeze_axes(),
        relax.transform.DecomposeOpsForInference(),
        expand_elementwise(),
        relax.transform.CanonicalizeBindings(),
        fold_constants(),
    ]


def _compute_in(dtype: Literal["float32", "float16", "bfloat16"]) -> list[Pass]:
    """The passes over a Relax module that make it compute in `dtype`.

    Convolutions and products of matrices take 16-bit operands and add up in float32; what follows them works on 16
    bits. Inputs and outputs of the network stay as they are.
    """
    from tvm import relax
    from tvm.ir.transform import module_pass

    if dtype == "float32":
        return []
    mixed: list[Pass] = [relax.transform.ConvertToDataflow(), relax.transform.ToMixedPrecision(out_dtype="float32")]
    if dtype == "float16":
        return mixed

    @module_pass(opt_level=0, name="Float16ToBfloat16")  # type: ignore[untyped-decorator]
    def to_bfloat16(mod: IRModule, _context: PassContext) -> IRModule:
        return _with_bfloat16(mod)

    return [*mixed, to_bfloat16]


def _with_bfloat16(mod: IRModule) -> IRModule:
    """Casts to bfloat16 wherever the module casts to float16, which is all that TVM's own pass knows."""
    from tvm import relax

    @relax.expr_functor.mutator
    class Casts(relax.PyExprMutator):  # type: ignore[misc]
        def visit_call_(self, call: relax.Call) -> relax.Expr:
            call = self.visit_expr_post_order(call)
            if call.op.name == "relax.astype" and call.attrs.dtype == "float16":
                return relax.op.astype(call.args[0], "bfloat16")
            return call

    mutator = Casts(mod)
    for name, function in mod.functions_items():
        if isinstance(function, relax.Function):
            mutator.builder_.update_func(name, mutator.visit_expr(function))
    return mutator.builder_.get()


def _lowered(model: onnx.ModelProto, target: Target, passes: Sequence[Pass]) -> IRModule:
    import tvm

    mod = _import_onnx(model)
    try:
        with target, tvm.transform.PassContext(config={"relax.FuseOps.max_depth": _MAX_FUSED}):
            mod = tvm.transform.Sequential(list(passes))(mod)
    except Exception as err:  # passes raise errors of every kind for what they do not expect
        raise NotLoweredError(f"TVM's passes: {first_line(err)}") from err
    if left := sorted(set(_not_lowered(mod))):
        raise NotLoweredError(f"TVM has no kernel for {', '.join(left)}")
    if platform_of(target).by_llvm and (reason := why_not_compilable(mod, target)):
        raise NotLoweredError(f"TVM's code generator: {reason}")
    return mod


def _import_onnx(model: onnx.ModelProto) -> IRModule:
    import tvm
    from tvm.relax.frontend.onnx import from_onnx

    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):  # it prints what it then raises
            warnings.simplefilter("ignore")
            return from_onnx(model, keep_params_in_input=False)
    except tvm.error.OpNotImplemented as err:
        raise NotLoweredError("TVM does not import it") from err
    except Exception as err:  # the importer's converters raise errors of every kind for a graph they do not understand
        raise NotLoweredError(f"TVM's importer: {first_line(err)}") from err


def _not_lowered(mod: IRModule) -> Iterator[str]:
    """Yields Relax's operators that are left in a module."""
    from tvm import relax

    found: list[str] = []

    def visit(expr: object) -> None:
        name = getattr(expr.op, "name", "") if isinstance(expr, relax.Call) else ""
        if name and name not in _LOWERED:
            found.append(name)

    for _, function in mod.functions_items():
        if isinstance(function, relax.Function):
            relax.analysis.post_order_visit(function, visit)
    yield from found
