"""Schedules for GPUs that nothing has measured: DLight's, TVM's rules for each kind of kernel. See ADR 20."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.s_tir import Schedule
    from tvm.s_tir.dlight import ScheduleRule
    from tvm.target import Target
    from tvm.tirx import PrimFunc


def schedule_for_gpu(mod: IRModule) -> IRModule:
    """A module in which DLight has scheduled each function that had no schedule. To be called in a target's scope."""
    from tvm.s_tir import dlight

    return dlight.ApplyDefaultSchedule(*_rules())(mod.clone())  # it changes what it is given


def gpu_program(function: PrimFunc, target: Target) -> Schedule | None:
    """DLight's program of a function, with its trace; None where it has none."""
    for rule in _rules():
        with contextlib.suppress(RuntimeError):  # a rule that does not know what to do with it
            if (found := rule.apply(function, target, False)) is not None:
                program: Schedule = found[0] if isinstance(found, list) else found
                return program
    return None


def _rules() -> Sequence[ScheduleRule]:
    """The rules of TVM's own pipeline for CUDA (relax/backend/cuda/pipeline.py), in its order."""
    from tvm.s_tir.dlight import gpu

    return (gpu.Matmul(), gpu.GEMV(), gpu.Reduction(), gpu.GeneralReduction(), gpu.Fallback())


def unbound_kernels(mod: IRModule) -> list[str]:
    """Names of the functions with a loop that no thread of a GPU runs: TVM makes no code of them."""
    from tvm.s_tir import SBlockRealize
    from tvm.tirx import PrimFunc, SeqStmt

    names = []
    for var, function in mod.functions_items():
        if isinstance(function, PrimFunc):
            body = function.body.block.body if isinstance(function.body, SBlockRealize) else function.body
            kernels = body.seq if isinstance(body, SeqStmt) else [body]
            if not all(map(_is_bound, kernels)):
                names.append(var.name_hint)
    return names


def _is_bound(kernel: Any) -> bool:
    from tvm.tirx import AttrStmt, For, ForKind
    from tvm_ffi import structural_walk

    found: list[bool] = []
    structural_walk(kernel, (For, lambda loop: found.append(loop.kind == ForKind.THREAD_BINDING)))
    structural_walk(kernel, (AttrStmt, lambda statement: found.append(statement.attr_key == "thread_extent")))
    return any(found)
