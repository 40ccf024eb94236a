"""Squeezes with axes that count from the front: TVM's ConvertLayout crashes on those that count from the end."""

from __future__ import annotations

from tvm import relax
from tvm.ir import IRModule
from tvm.ir.transform import PassContext, module_pass


@relax.expr_functor.mutator
class _Squeezes(relax.PyExprMutator):  # type: ignore[misc]
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        if getattr(call.op, "name", "") != "relax.squeeze" or call.attrs.axis is None:
            return call
        data = call.args[0]
        return relax.op.squeeze(data, [int(axis) % data.ty.ndim for axis in call.attrs.axis])


@module_pass(opt_level=0, name="PositiveSqueezeAxes")
class PositiveSqueezeAxes:
    """Rewrites "main"."""

    def transform_module(self, mod: IRModule, _context: PassContext) -> IRModule:
        """Gives every squeeze its axes from the front."""
        rewritten = mod.clone()
        rewritten.update_func(mod.get_global_var("main"), _Squeezes(mod).visit_expr(mod["main"]))
        return rewritten
