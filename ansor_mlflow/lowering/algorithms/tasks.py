"""The tasks of a network with the other algorithms to compute their layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tvm.ir import GenericConst, IRModule
from tvm.s_tir.meta_schedule.utils import shash2hex

from ansor_mlflow.errors import UserInputError
from ansor_mlflow.lowering.algorithms.find import NoAlgorithmError, WinogradLayer, find_algorithms
from ansor_mlflow.lowering.algorithms.rewrite import constants_of
from ansor_mlflow.lowering.network import TuningTask, short_name
from ansor_mlflow.settings import Algorithm

_MAX_REL_ERROR = 1e-4
"""Largest error of a layer by another algorithm: that which the outputs of a network may have."""
_MIN_FLOPS = 1e7
"""Operations of a layer for which other algorithms get trials; smaller ones take microseconds in any case."""
_MAX_SHOWN = 3


def with_algorithms(
    mod: IRModule, tasks: Sequence[TuningTask], algorithm: Algorithm, called: str
) -> tuple[TuningTask, ...]:
    """Adds to each task those of the other algorithms to compute it, as far as they are exact enough.

    With algorithm=winograd, the direct algorithm is left out where there is another.

    Raises:
        UserInputError: Only other algorithms are wanted, and there is none.
    """
    constants = constants_of(mod)
    found: list[TuningTask] = []
    reasons = []
    for task in tasks:
        others: list[TuningTask] = []
        try:
            if algorithm == "winograd" or task.info.flops >= _MIN_FLOPS:
                others = list(_with_other_algorithms(task, constants[task.info.workload_hash]))
        except NoAlgorithmError as err:
            reasons.append(f"{task.info.name}: {err}")
        found += others if algorithm == "winograd" and others else [task, *others]
    if algorithm == "winograd" and len(found) == len(tasks) == len(reasons):
        raise UserInputError(
            f"network={called}: algorithm=winograd, but no layer can be computed so: "
            f"{', '.join(reasons[:_MAX_SHOWN])}; give auto or direct"
        )
    return tuple(replace(task, info=replace(task.info, index=index)) for index, task in enumerate(found))


def _with_other_algorithms(task: TuningTask, calls: Sequence[Sequence[GenericConst | None]]) -> Iterator[TuningTask]:
    """Yields the tasks of a task's other algorithms."""
    for algorithm in find_algorithms(task.mod):
        max_rel_error = algorithm.max_rel_error(calls)
        if max_rel_error <= _MAX_REL_ERROR:
            yield _task_of(task, algorithm, max_rel_error)


def _task_of(task: TuningTask, algorithm: WinogradLayer, max_rel_error: float) -> TuningTask:
    workload_hash = shash2hex(algorithm.mod)
    info = replace(
        task.info,
        name=short_name(f"{task.info.name}_{algorithm.suffix}", workload_hash),
        flops=algorithm.flops,
        workload_hash=workload_hash,
        algorithm=algorithm.algorithm,
        layer=task.info.workload_hash,
        max_rel_error=max_rel_error,
    )
    return TuningTask(info=info, mod=algorithm.mod, algorithm=algorithm)
