"""Passes over the Relax function "main"."""

from __future__ import annotations

from tvm import relax
from tvm.ir import IRModule
from tvm.ir.transform import Pass, PassContext, module_pass


def rewrite_main(name: str, mutator: type[relax.PyExprMutator]) -> Pass:
    """A pass that rewrites "main" by a mutator, which is made with the module.

    Args:
        name: What the pass is called.
        mutator: A class with the decorator `relax.expr_functor.mutator`.
    """

    @module_pass(opt_level=0, name=name)  # type: ignore[untyped-decorator]
    def rewrite(mod: IRModule, _context: PassContext) -> IRModule:
        rewritten = mod.clone()
        rewritten.update_func(mod.get_global_var("main"), mutator(mod).visit_expr(mod["main"]))
        return rewritten

    return rewrite
