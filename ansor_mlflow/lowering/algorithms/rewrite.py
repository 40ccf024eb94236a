"""Puts other algorithms to compute layers into a network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm import relax, tirx
from tvm.ir import GenericConst, GlobalVar, IRModule
from tvm.s_tir.meta_schedule.utils import shash2hex

from ansor_mlflow.lowering.network import LayerAlgorithm

_SYMBOL = "global_symbol"


def hash_of(function: Any) -> str:
    """The structural hash of the task that a function of a network is."""
    from tvm.s_tir.meta_schedule.tune_context import _normalize_mod

    return str(shash2hex(_normalize_mod(function.without_attr(_SYMBOL) if _SYMBOL in function.attrs else function)))


def constants_of(mod: IRModule) -> dict[str, list[list[GenericConst | None]]]:
    """The constant arguments of each call of a function, None for the others, by the workload's structural hash."""
    by_name: dict[str, list[list[GenericConst | None]]] = {}

    def visit(expr: Any) -> None:
        if isinstance(expr, relax.Call) and getattr(expr.op, "name", "") == "relax.call_tir":
            arguments = [each if isinstance(each, GenericConst) else None for each in expr.args[1]]
            by_name.setdefault(expr.args[0].name_hint, []).append(arguments)

    for _, function in mod.functions_items():
        if isinstance(function, relax.Function):
            relax.analysis.post_order_visit(function, visit)
    return {hash_of(mod[name]): calls for name, calls in by_name.items()}


def replace_layers(mod: IRModule, algorithms: Mapping[str, LayerAlgorithm]) -> IRModule:
    """A network in which layers are computed by other algorithms, with their weights transformed.

    `algorithms` has them by the structural hash of the task that each takes the place of.
    """
    functions = {
        var.name_hint: algorithm
        for var, function in mod.functions_items()
        if isinstance(function, tirx.PrimFunc) and (algorithm := algorithms.get(hash_of(function))) is not None
    }
    if not functions:
        return mod
    replacer = _Replacer(mod, functions)
    for var, function in mod.functions_items():
        if isinstance(function, relax.Function):
            replacer.builder_.update_func(var, replacer.visit_expr(function))
    return relax.transform.DeadCodeElimination(
        [v.name_hint for v, f in mod.functions_items() if isinstance(f, relax.Function)]
    )(replacer.builder_.get())


@relax.expr_functor.mutator
class _Replacer(relax.PyExprMutator):  # type: ignore[misc]
    def __init__(self, mod: IRModule, functions: Mapping[str, LayerAlgorithm]) -> None:
        super().__init__(mod)
        self._mod = mod
        self._functions = functions
        self._added: dict[str, GlobalVar] = {}
        self._weights: dict[tuple[Any, int], Any] = {}

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        if getattr(call.op, "name", "") != "relax.call_tir":
            return call
        name, arguments = call.args[0].name_hint, list(call.args[1])
        algorithm = self._functions.get(name)
        if algorithm is None or not isinstance(arguments[algorithm.weights], GenericConst):
            return call
        weights = arguments[algorithm.weights].value.numpy()
        arguments[algorithm.weights] = relax.const(algorithm.transform(weights), "float32")
        return relax.call_tir(self._function(name, algorithm), arguments, call.ty_args[0])

    def _function(self, name: str, algorithm: LayerAlgorithm) -> GlobalVar:
        if name not in self._added:
            function = algorithm.mod["main"].without_attr(_SYMBOL)
            self._added[name] = self.builder_.add_func(function, f"{name}_{algorithm.suffix}")
        return self._added[name]
