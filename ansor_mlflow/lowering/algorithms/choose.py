"""Chooses the algorithm of each layer, that of the fastest record as far as the library may grow, and puts it in."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from tvm import relax, tirx
from tvm.ir import GenericConst, GlobalVar, IRModule
from tvm.s_tir.meta_schedule.utils import shash2hex

from ansor_mlflow.lowering.network import LayerAlgorithm, LoweredNetwork, TuningTask
from ansor_mlflow.sketches import find_programs

if TYPE_CHECKING:
    from tvm.s_tir.meta_schedule.database import Database
    from tvm.target import Target

_SYMBOL = "global_symbol"
_CYCLES_PER_S = 3e9
"""Cycles of a CPU in a second, about: estimates without records are weighed against each other and recorded times."""


@dataclass(frozen=True)
class ChosenAlgorithm:
    """An algorithm for a layer."""

    task: TuningTask
    seconds: float
    """Latency of a call: the median of the fastest record, else what the sketch estimates."""
    is_recorded: bool

    @property
    def growth_bytes(self) -> int:
        """Bytes by which the weights of all calls are larger than by the direct algorithm."""
        return 0 if self.task.algorithm is None else self.task.info.weight * self.task.algorithm.growth_bytes


def choose_algorithms(
    lowered: LoweredNetwork, database: Database, target: Target, max_bytes: int | None = None
) -> list[ChosenAlgorithm]:
    """One algorithm for each layer. One without a record is taken only where no other has one.

    Where all constants together are larger than `max_bytes`, the layers that lose the least time for each byte are
    computed in algorithms with smaller weights.
    """
    layers: dict[str, list[TuningTask]] = {}
    for task in lowered.tasks:
        layers.setdefault(task.info.layer_hash, []).append(task)
    ranked = [_ranked(algorithms, database, target) for algorithms in layers.values()]
    if max_bytes is not None:
        spare = max_bytes - lowered.constant_bytes
        while sum(algorithms[0].growth_bytes for algorithms in ranked) > max(0, spare) and (
            steps := list(_steps(ranked))
        ):
            _, layer, number = min(steps)
            ranked[layer] = ranked[layer][number:]
    return [algorithms[0] for algorithms in ranked]


def _ranked(algorithms: Sequence[TuningTask], database: Database, target: Target) -> list[ChosenAlgorithm]:
    """The algorithms of a layer, the fastest first; those without a record only where no other has one."""
    found = []
    for task in algorithms:
        if (record := database.query_tuning_record(task.mod, target, task.info.name)) is not None:
            found.append(ChosenAlgorithm(task, median(map(float, record.run_secs)), is_recorded=True))
    if not found and len(algorithms) == 1:
        return [ChosenAlgorithm(algorithms[0], 0.0, is_recorded=False)]
    for task in algorithms if not found else ():
        programs = find_programs(task.mod, target)
        seconds = programs.estimated_cycles / _CYCLES_PER_S if programs else math.inf
        found.append(ChosenAlgorithm(task, seconds, is_recorded=False))
    return sorted(found, key=lambda algorithm: algorithm.seconds)


def _steps(ranked: Sequence[Sequence[ChosenAlgorithm]]) -> Iterator[tuple[float, int, int]]:
    """Yields what may be done to make weights smaller: the seconds lost for each byte, the layer, and the algorithm."""
    for layer, (first, *others) in enumerate(ranked):
        for number, other in enumerate(others, start=1):
            if (saved := first.growth_bytes - other.growth_bytes) > 0:
                yield (other.seconds - first.seconds) * first.task.info.weight / saved, layer, number


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
    entries = [var.name_hint for var, function in mod.functions_items() if isinstance(function, relax.Function)]
    return relax.transform.DeadCodeElimination(entries)(replacer.builder_.get())


@relax.expr_functor.mutator
class _Replacer(relax.PyExprMutator):  # type: ignore[misc]
    def __init__(self, mod: IRModule, functions: Mapping[str, LayerAlgorithm]) -> None:
        super().__init__(mod)
        self._functions = functions
        self._added: dict[str, GlobalVar] = {}

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
        if name not in self._added:
            function = algorithm.mod["main"].without_attr(_SYMBOL)
            self._added[name] = self.builder_.add_func(function, f"{name}_{algorithm.suffix}")
        return relax.call_tir(self._added[name], arguments, call.ty_args[0])
