"""Our builder for scripts that call MetaSchedule's own `tune_tir` or `tune_relax`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ansor_mlflow.processes import Outcome
from ansor_mlflow.tuning.workers.builder import Builder


def as_metaschedule_builder(builder: Builder) -> Any:
    """A MetaSchedule `PyBuilder` over a `Builder`: pass it as `builder=`.

    MetaSchedule's own `LocalBuilder` starts new processes in every round, which import TVM for half a minute. Modules
    are built for the builder's target; the target of a `BuilderInput` and its parameters are not looked at.

    Args:
        builder: Stays the caller's, who closes it after tuning.
    """
    from tvm.ir.utils import derived_object
    from tvm.s_tir.meta_schedule.builder import BuilderInput, BuilderResult, PyBuilder

    @derived_object
    class _Adapter(PyBuilder):  # type: ignore[misc]
        def build(self, build_inputs: list[BuilderInput]) -> list[BuilderResult]:
            outcomes = builder.build([build_input.mod for build_input in build_inputs])
            return [_result(outcome) for outcome in outcomes]

    return _Adapter()


def _result(outcome: Outcome[Path]) -> Any:
    """An outcome as MetaSchedule takes it, whose callbacks remove the whole directory that an artifact is in."""
    from tvm.s_tir.meta_schedule.builder import BuilderResult

    if outcome.value is None:
        return BuilderResult(None, f"{outcome.failure}: {outcome.error}")
    directory = outcome.value.with_suffix("")
    directory.mkdir()
    return BuilderResult(str(outcome.value.rename(directory / outcome.value.name)), None)
