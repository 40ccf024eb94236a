"""Passes over Relax: a mutator of "main", the places of extrema, and what functions are fused with."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from tvm import relax, te, tirx, topi
from tvm.ir import IRModule
from tvm.ir.transform import Pass, PassContext, module_pass
from tvm.tirx import PrimFunc

_PATTERN = "op_pattern"
_INJECTIVE, _OPAQUE = 2, 8
"""`OpPatternKind` of TVM (include/tvm/relax/op_attr_types.h): below the first are elementwise and broadcast operations,
and the last is fused with nothing."""
_MAX_FUSED_PARTS = 6
"""Parts of a concatenation; those of image networks have no more."""


def rewrite_main(name: str, mutator: type[relax.PyExprMutator]) -> Pass:
    """A pass that rewrites "main" by a mutator (`relax.expr_functor.mutator`), which is made with the module."""

    @module_pass(opt_level=0, name=name)  # type: ignore[untyped-decorator]
    def rewrite(mod: IRModule, _context: PassContext) -> IRModule:
        rewritten = mod.clone()
        rewritten.update_func(mod.get_global_var("main"), mutator(mod).visit_expr(mod["main"]))
        return rewritten

    return rewrite


def _call(builder: relax.BlockBuilder, call: relax.Call, *, find: Callable[..., te.Tensor], sign: int) -> relax.Expr:
    axis = None if call.attrs.axis is None else int(call.attrs.axis)

    def place(data: te.Tensor) -> te.Tensor:
        if str(data.dtype).startswith("float"):
            return find(_comparable(data, axis, sign), axis, call.attrs.keepdims)
        found = find(data, axis, call.attrs.keepdims)
        return te.compute(found.shape, lambda *indices: tirx.max(found[indices], 0), "place")  # all are the smallest

    return builder.call_te(place, call.args[0], primfunc_name_hint=call.op.name.removeprefix("relax."))


def _comparable(data: te.Tensor, axis: int | None, sign: int) -> te.Tensor:
    """Values of which the first one is chosen where it is NaN; all are beyond the number that TVM begins with."""
    dtype = str(data.dtype)
    info = np.finfo(dtype)
    last = tirx.const(-sign * float(np.nextafter(info.max, info.dtype.type(0))), dtype)
    wins = tirx.const(sign * np.inf, dtype)
    bound = tirx.max if sign > 0 else tirx.min

    def value(*indices: Any) -> Any:
        along = indices if axis is None else [indices[axis]]
        is_first = tirx.all(*(index == 0 for index in along))
        element = data[indices]
        of_nan = tirx.Select(is_first, wins, last)
        return tirx.Select(tirx.isnan(element), of_nan, bound(element, last))

    return te.compute(data.shape, value, "comparable")


PLACES = {
    "relax.argmax": partial(_call, find=topi.argmax, sign=1),
    "relax.argmin": partial(_call, find=topi.argmin, sign=-1),
}
"""How these operators become functions, for `LegalizeOps`.

TVM begins with the smallest number of a type at place -1, and forgets what came before a NaN. As ONNX Runtime, this
begins with the first value, which stays where it is NaN, and passes over any other NaN.
"""


# TVM takes a slice that begins at zero for an elementwise operation, since it reads what it writes, and fuses it into a
# convolution. The convolution's tiles then have to fit the sizes after the slice, too, for which they were padded.
#
# It fuses a concatenation with what computes any of its parts. With many parts, as those of the steps of a recurrent
# layer, the last step would be a function of its own kind, whose every element asks which step it belongs to: LLVM
# takes a minute for it.
@module_pass(opt_level=0, name="CorrectPatterns")
class CorrectPatterns:
    """Says what slices and concatenations are; to be run on what AnnotateTIROpPattern annotated."""

    def transform_module(self, mod: IRModule, _context: PassContext) -> IRModule:
        """Rewrites the attributes of these functions."""
        annotated = mod.clone()
        for name, function in mod.functions_items():
            if isinstance(function, PrimFunc) and (least := _least_pattern(name.name_hint, function)):
                pattern = int(function.attrs[_PATTERN])
                annotated.update_func(name, function.with_attr(_PATTERN, max(pattern, least)))
        return annotated


def _least_pattern(name: str, function: PrimFunc) -> int:
    if name.startswith("strided_slice"):
        return _INJECTIVE
    if name.startswith("concatenate") and len(function.params) - 1 > _MAX_FUSED_PARTS:
        return _OPAQUE
    return 0
