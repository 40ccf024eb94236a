"""Replays a record: does its schedule apply, build and run, and does the kernel still compute the same.

The scheduled kernel is compared with the same kernel before any schedule, on the same seeded arguments; one of a GPU
with that on a CPU, as it has no threads. Both run in worker processes, because a record may come from anywhere and may
do anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ansor_mlflow.codegen import pass_config, tir_pipeline
from ansor_mlflow.device import Device, import_tensor_intrin, set_num_threads
from ansor_mlflow.errors import MachineError
from ansor_mlflow.files import ScratchDirectory
from ansor_mlflow.lowering import TuningTask
from ansor_mlflow.measuring import compare_tensors
from ansor_mlflow.processes import Outcome, WorkerPool
from ansor_mlflow.tensors import TensorSpec, random_inputs
from ansor_mlflow.workers import arg_info

if TYPE_CHECKING:
    from tvm.ir import IRModule

COPIES_OF_ARGUMENTS = 20
"""Memory in a process that comparing takes, in sizes of the kernel's arguments: most of it is for float64."""


@dataclass(frozen=True)
class _Job:
    mod: IRModule
    device: Device
    seed: int
    reference: Path
    """NumPy file with the arguments that the unscheduled kernel changes, by position, as float64."""
    trace: str


class Replayer:
    """Replays records, each in a process of its own. To be closed."""

    def __init__(self, device: Device, *, seed: int, timeout_s: float, memory_bytes: int | None = None) -> None:
        self._device = device
        self._seed = seed
        self._timeout_s = timeout_s + device.platform.setup_s
        self._references = ScratchDirectory("ansor_mlflow-scratch-")
        self._pool = WorkerPool(1, max_tasks=1, memory_bytes=memory_bytes)

    def replay(self, task: TuningTask, trace: str) -> Outcome[float]:
        """Applies a schedule, which is JSON as records have it, to a task; the `max_rel_error` of the kernel's results.

        Where the unscheduled kernel's are not finite, the scheduled one's must be the same.
        """
        reference = Path(self._references.path, f"{task.info.index}.npz")
        job = _Job(task.mod, self._device, self._seed, reference, trace)
        if not reference.exists():
            (outcome,) = self._pool.map(_write_reference, [job], self._timeout_s)
            if outcome.failure:
                raise MachineError(
                    f"task {task.info.name}: the kernel before any schedule, which records are compared with, does not "
                    f"run ({' '.join(outcome.error.split())}); raise measure_timeout_s or worker_memory_mib"
                )
        (replayed,) = self._pool.map(_max_rel_error, [job], self._timeout_s)
        return replayed

    def close(self) -> None:
        self._pool.close()
        self._references.close()


# -- in the worker -----------------------------------------------------------------------------------------------------


def _write_reference(job: Any) -> None:
    before = _arguments(job)
    after = _run(job.mod, before, job.device if job.device.platform.in_process else Device.resolve("auto", "auto"))
    changed = {name: value for name, value in after.items() if not np.array_equal(value, _wide(before[name]))}
    temporary = job.reference.with_suffix(".new.npz")
    np.savez(temporary, **changed)
    temporary.replace(job.reference)


def _max_rel_error(job: Any) -> float:
    """Compares every argument, so that a schedule that overwrites an input is found, too."""
    import tvm_ffi
    from tvm.s_tir import Schedule
    from tvm.s_tir.schedule import Trace

    import_tensor_intrin(job.device.platform.kind)
    schedule = Schedule(job.mod)
    Trace.apply_json_to_schedule(tvm_ffi.get_global_func("ffi.json.Parse")(job.trace), schedule)
    before = _arguments(job)
    after = _run(schedule.mod, before, job.device)
    with np.load(job.reference) as reference:
        return max(
            compare_tensors(value, reference[name] if name in reference.files else _wide(before[name])).max_rel_error
            for name, value in after.items()
        )


def _arguments(job: _Job) -> dict[str, Any]:
    """Seeded values of the kernel's arguments, the results' among them, by position."""
    from tvm.s_tir.meta_schedule.arg_info import ArgInfo

    infos = [arg_info(info) for info in ArgInfo.from_entry_func(job.mod, remove_preproc=True)]
    specs = [TensorSpec(str(position), shape, dtype) for position, (_, dtype, shape) in enumerate(infos)]
    return random_inputs(specs, job.seed)


def _run(mod: IRModule, arguments: dict[str, Any], device: Device) -> dict[str, Any]:
    """The arguments after a call of the kernel, as float64."""
    import tvm
    from tvm.driver import build
    from tvm.ir.transform import PassContext

    wanted = device.num_threads
    if device.platform.counts_threads and (used := set_num_threads(wanted)) != wanted:
        raise RuntimeError(f"TVM runs on {used} threads here, not on {wanted}")
    with PassContext(config=pass_config(device.target)):
        kernel = build(mod, target=device.target, pipeline=tir_pipeline(device.target))["main"]
    place = tvm.device(device.platform.name)
    tensors = {name: tvm.runtime.tensor(value, place) for name, value in arguments.items()}
    kernel(*tensors.values())
    return {name: _wide(tensor.numpy()) for name, tensor in tensors.items()}


def _wide(values: Any) -> Any:
    """The values as float64: NumPy's files know no bfloat16."""
    return np.asarray(values, np.float64)
