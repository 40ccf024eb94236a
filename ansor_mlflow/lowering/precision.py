"""Computes float32 networks in 16-bit floats.

Convolutions and products of matrices take 16-bit operands and add up in float32; what follows them works on 16 bits.
Inputs and outputs of the network stay as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.ir.transform import Pass, PassContext


def compute_in(dtype: Literal["float32", "float16", "bfloat16"]) -> list[Pass]:
    """The passes over a Relax module that make it compute in `dtype`."""
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
