"""Squeezes with axes that count from the front: TVM's ConvertLayout crashes on those that count from the end."""

from __future__ import annotations

from tvm import relax
from tvm.ir.transform import Pass

from ansor_mlflow.lowering.rewriting import rewrite_main


@relax.expr_functor.mutator
class _Squeezes(relax.PyExprMutator):  # type: ignore[misc]
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        if getattr(call.op, "name", "") != "relax.squeeze" or call.attrs.axis is None:
            return call
        data = call.args[0]
        return relax.op.squeeze(data, [int(axis) % data.ty.ndim for axis in call.attrs.axis])


def positive_squeeze_axes() -> Pass:
    """The pass that gives every squeeze its axes from the front."""
    return rewrite_main("PositiveSqueezeAxes", _Squeezes)
