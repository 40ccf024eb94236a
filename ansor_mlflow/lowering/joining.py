"""One module of the functions of several parts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from tvm import relax
from tvm.ir import GlobalVar, IRModule
from tvm_ffi import structural_equal


def join_modules(modules: Mapping[str, IRModule]) -> IRModule:
    """Puts the functions of several modules into one; the "main" of each gets the name that it is given by.

    Functions of two modules that are the same become one; others of the same name get a number.
    """
    joined = IRModule()
    for name, mod in modules.items():
        variables: dict[str, GlobalVar] = {}
        for var, function in mod.functions_items():
            if var.name_hint != "main":
                variables[var.name_hint] = _added(joined, var, function)
        joined[name] = _Renamer(variables).visit_expr(mod["main"]).with_attr("global_symbol", name)
    return joined


def _added(joined: IRModule, var: GlobalVar, function: Any) -> GlobalVar:
    """The variable of a function under its name or with a number: the first that is free, or that of the same one."""
    name = var.name_hint
    there = {other.name_hint: other for other in joined.get_global_vars()}
    for number in itertools.count(1):
        if name not in there:
            break
        other, same = (each.without_attr("global_symbol") for each in (joined[name], function))
        if structural_equal(other, same, map_free_vars=True):
            return there[name]
        name = f"{var.name_hint}_{number}"
    new = GlobalVar(name)
    relax.expr._update_type(new, var.ty)
    # One that has no symbol gets none: that would change the hash of its records.
    has_symbol = function.attrs is not None and "global_symbol" in function.attrs
    joined[new] = function.with_attr("global_symbol", name) if has_symbol else function
    return new


@relax.expr_functor.mutator
class _Renamer(relax.PyExprMutator):  # type: ignore[misc]
    def __init__(self, variables: Mapping[str, GlobalVar]) -> None:
        super().__init__()
        self._variables = variables

    def visit_global_var_(self, var: GlobalVar) -> GlobalVar:
        return self._variables[var.name_hint]
