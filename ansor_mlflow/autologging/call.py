"""A call of `TaskScheduler.tune`, and what MetaSchedule says of it, in our words."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ansor_mlflow.records import RecordPair
from ansor_mlflow.trials import TaskInfo, Trial, TrialStatus

if TYPE_CHECKING:
    from tvm.s_tir.meta_schedule import TuneContext
    from tvm.s_tir.meta_schedule.builder import BuilderResult
    from tvm.s_tir.meta_schedule.measure_callback import MeasureCallback
    from tvm.s_tir.meta_schedule.runner import RunnerResult
    from tvm.target import Target

Times = Callable[[], Mapping[str, float]]
"""Seconds that parts of MetaSchedule took so far, by the names that its profiler gives them; 0 for other names."""
# what MetaSchedule's builders and runners, and ours, say of a trial that failed
_TIMED_OUT = re.compile(r"Timeout, killed|^timed_out:|\bTimeoutError\b")
_CRASHED = re.compile(r"^crashed:|ChildProcessError|worker died")


@dataclass(frozen=True, kw_only=True)
class TuneCall:
    """The arguments of TVM 0.27's `TaskScheduler.tune`."""

    tasks: Sequence[TuneContext]
    task_weights: Sequence[float]
    max_trials_global: int
    max_trials_per_task: int
    num_trials_per_iter: int
    builder: Any
    runner: Any
    measure_callbacks: Sequence[Any]
    database: Any
    cost_model: Any

    @staticmethod
    def bind(signature: inspect.Signature, scheduler: object, *args: Any, **kwargs: Any) -> TuneCall:
        """The call with these arguments. Raises TypeError where another TVM has others."""
        arguments = signature.bind(scheduler, *args, **kwargs).arguments
        return TuneCall(**{name: value for name, value in arguments.items() if name != "self"})

    @property
    def target(self) -> Target:
        return self.tasks[0].target

    def describe_tasks(self) -> tuple[TaskInfo, ...]:
        """The tasks; those of one name, which users' own contexts often have, are numbered."""
        from tvm.s_tir.analysis import estimate_tir_flops
        from tvm.s_tir.meta_schedule.utils import shash2hex

        named: Counter[str] = Counter()
        infos = []
        for index, (context, weight) in enumerate(zip(self.tasks, self.task_weights, strict=True)):
            name = str(context.task_name)
            infos.append(
                TaskInfo(
                    index=index,
                    name=f"{name}_{named[name]}" if named[name] else name,
                    weight=int(weight),
                    flops=float(estimate_tir_flops(context.mod)),
                    workload_hash=shash2hex(context.mod),
                )
            )
            named[name] += 1
        return tuple(infos)

    def database_files(self) -> RecordPair | None:
        """The files of the user's database; None where it is none of files, or they are not there yet."""
        from tvm.s_tir.meta_schedule.database import JSONDatabase

        if not isinstance(self.database, JSONDatabase):
            return None
        pair = RecordPair(Path(self.database.path_workload), Path(self.database.path_tuning_record))
        return pair if pair.workloads.is_file() and pair.records.is_file() else None

    def measure_settings(self) -> dict[str, Any]:
        """Settings of the time evaluator, where the runner has them."""
        config = getattr(self.runner, "evaluator_config", None)
        if config is None:
            return {}
        settings = {name: getattr(config, name) for name in ("number", "repeat", "min_repeat_ms")}
        return {**settings, "cache_flush": config.enable_cpu_cache_flush}

    def params(self) -> dict[str, str]:
        """What the user asked for, by the names that our own parameters have."""
        return {
            "target": str(self.target),
            "trials": str(int(self.max_trials_global)),
            "trials_per_task": str(int(self.max_trials_per_task)),
            "num_trials_per_round": str(int(self.num_trials_per_iter)),
        }


def make_trials(
    first_step: int, task: str, built: Sequence[BuilderResult], measured: Sequence[RunnerResult]
) -> tuple[Trial, ...]:
    """The trials of a batch."""
    trials = []
    for step, (library, result) in enumerate(zip(built, measured, strict=True), first_step):
        run_s = tuple(float(seconds) for seconds in result.run_secs or ())
        if run_s and result.error_msg is None:
            trials.append(Trial(step=step, task=task, status=TrialStatus.OK, run_s=run_s))
            continue
        error = str(library.error_msg or result.error_msg or "")[:2000].strip()
        status = TrialStatus.RUN_FAILED if library.error_msg is None else TrialStatus.BUILD_FAILED
        if _TIMED_OUT.search(error):
            status = TrialStatus.TIMED_OUT
        elif _CRASHED.search(error):
            status = TrialStatus.CRASHED
        trials.append(Trial(step=step, task=task, status=status, error=error))
    return tuple(trials)


def as_callback(function: Callable[..., None]) -> MeasureCallback:
    """A callback of MetaSchedule that calls `function` with what it is called with."""
    from tvm.ir.utils import derived_object
    from tvm.s_tir.meta_schedule.measure_callback import PyMeasureCallback

    @derived_object
    class _Callback(PyMeasureCallback):  # type: ignore[misc]
        def apply(self, *args: Any) -> None:
            function(*args)

    return _Callback()


@contextlib.contextmanager
def profiled() -> Iterator[Times]:
    """Times what happens inside, with the user's profiler where there is one: only the innermost one is told."""
    from tvm.s_tir.meta_schedule import Profiler

    current = Profiler.current()
    with contextlib.nullcontext(current) if current is not None else Profiler() as profiler:
        before = {str(name): float(seconds) for name, seconds in profiler.get().items()}
        yield lambda: defaultdict(float, {n: float(s) - before.get(str(n), 0.0) for n, s in profiler.get().items()})
