"""One module of the functions of several parts."""

from __future__ import annotations

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
        _add(joined, name, mod)
    return joined


def _add(joined: IRModule, name: str, mod: IRModule) -> None:
    variables: dict[str, GlobalVar] = {}
    for var, function in mod.functions_items():
        if var.name_hint == "main":
            continue
        new = _free_name(joined, var.name_hint, function)
        if new in _names(joined):
            variables[var.name_hint] = joined.get_global_var(new)
            continue
        variables[var.name_hint] = GlobalVar(new)
        relax.expr._update_type(variables[var.name_hint], var.ty)
        joined[variables[var.name_hint]] = _renamed(function, new)
    joined[name] = _Renamer(variables).visit_expr(mod["main"]).with_attr("global_symbol", name)


def _renamed(function: Any, name: str) -> Any:
    """A function under its new name. One that has no symbol gets none: that would change the hash of its records."""
    has_symbol = function.attrs is not None and "global_symbol" in function.attrs
    return function.with_attr("global_symbol", name) if has_symbol else function


def _names(mod: IRModule) -> set[str]:
    return {var.name_hint for var in mod.get_global_vars()}


def _free_name(joined: IRModule, name: str, function: Any) -> str:
    """The name itself or with a number: the first that is not taken, or taken by the same function."""
    candidate, number = name, 0
    while candidate in _names(joined):
        there, here = (other.without_attr("global_symbol") for other in (joined[candidate], function))
        if structural_equal(there, here, map_free_vars=True):
            return candidate
        number += 1
        candidate = f"{name}_{number}"
    return candidate


@relax.expr_functor.mutator
class _Renamer(relax.PyExprMutator):  # type: ignore[misc]
    def __init__(self, variables: Mapping[str, GlobalVar]) -> None:
        super().__init__()
        self._variables = variables

    def visit_global_var_(self, var: GlobalVar) -> GlobalVar:
        return self._variables[var.name_hint]
