"""Programs of tasks, and whether they compute what the task does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from hypothesis import HealthCheck, Phase, settings

from ansor_mlflow.codegen import tir_pipeline
from ansor_mlflow.lowering import TuningTask
from ansor_mlflow.records import RecordLog
from ansor_mlflow.sketches import Programs, find_programs
from ansor_mlflow.tuning import TaskSearch, make_cost_model

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.s_tir import Schedule
    from tvm.s_tir.meta_schedule.search_strategy import MeasureCandidate
    from tvm.target import Target

TOLERANCE = 1e-4
"""Largest difference from TVM's own program, over the largest value."""
compiled_examples = settings(
    max_examples=settings.default.max_examples // 4,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    phases=[Phase.generate],
)
"""For properties each of whose examples is compiled, which takes a second or so."""
_NUMPY_TYPES = {"bfloat16": ml_dtypes.bfloat16}


def programs_of(mod: IRModule, target: Target) -> Programs:
    programs = find_programs(mod, target)
    assert programs is not None
    return programs


def program_of(programs: Programs, tile: Any) -> Schedule:
    program = programs.program(tile)
    assert program is not None
    return program


def first_program(task: TuningTask, target: Target) -> IRModule:
    """What the sketch of a task chooses without a measurement."""
    program = programs_of(task.mod, target).first()
    assert program is not None
    return program.mod


def random_candidates(task: TuningTask, target: Target, directory: Path) -> list[MeasureCandidate]:
    """A few programs of MetaSchedule's space, one at least."""
    search = TaskSearch(
        task,
        target=target,
        strategy="random",
        num_trials_per_round=4,
        num_threads=1,
        seed=1,
        log=RecordLog(directory, target.export()),
        cost_model=make_cost_model("none", 1, seed=1),
    )
    candidates = search.propose(4)
    search.close()
    assert candidates
    return candidates


def assert_no_race(mod: IRModule) -> None:
    """No loop whose steps run at once is one over what is summed: two of them would add to one element."""
    from tvm.s_tir import SBlockRealize
    from tvm.tirx import For, ForKind, IterVar
    from tvm.tirx.analysis import undefined_vars
    from tvm_ffi import structural_walk

    def check_block(loop: For, realize: SBlockRealize) -> None:
        for var, value in zip(realize.block.iter_vars, realize.iter_values, strict=True):
            if var.iter_type == IterVar.CommReduce:
                assert not any(used.same_as(loop.loop_var) for used in undefined_vars(value)), realize.block

    def check_loop(loop: For) -> None:
        if loop.kind == ForKind.PARALLEL:
            structural_walk(loop.body, (SBlockRealize, lambda realize: check_block(loop, realize)))

    structural_walk(mod["main"].body, (For, check_loop))


def assert_same(
    plain: IRModule,
    mod: IRModule,
    target: Target,
    tolerance: float = TOLERANCE,
    num_results: int = 1,
    arrays: Sequence[np.ndarray] = (),
) -> None:
    """Compares a program with the function as TVM compiles it by itself."""
    import tvm
    from tvm.driver import build
    from tvm.s_tir.meta_schedule.arg_info import ArgInfo

    assert_no_race(mod)
    rng = np.random.default_rng(0)
    infos = ArgInfo.from_prim_func(plain["main"])
    random = [4 * rng.normal(size=[int(dim) for dim in info.shape]) for info in infos]
    random = [
        array.astype(_NUMPY_TYPES.get(str(info.dtype), info.dtype)) for array, info in zip(random, infos, strict=True)
    ]
    given = [*arrays, *random[len(arrays) :]]
    results = []
    for each, passes in ((plain, "default"), (mod, tir_pipeline(target))):  # the program packs its weights itself
        tensors = [tvm.runtime.tensor(array) for array in given]
        build(each, target=target, pipeline=passes)["main"](*tensors)
        results.append(np.concatenate([tensor.numpy().ravel() for tensor in tensors[-num_results:]]))
    expected, actual = results
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * max(abs(expected).max(), 1e-6))
