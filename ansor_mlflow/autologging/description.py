"""Where the records of a user's tuning come from: the device, and what is known of the rest."""

from __future__ import annotations

import logging
import os
import platform
import re
from typing import Any

from ansor_mlflow.autologging.call import TuneCall
from ansor_mlflow.device import Device, DeviceFingerprint
from ansor_mlflow.records import Provenance

_FOREIGN_LOWERING = 0
"""Lowering version of records whose tasks another lowering than ours made."""
_log = logging.getLogger(__name__)


def is_remote(call: TuneCall) -> bool:
    """Whether another machine measures, of which this one knows nothing but the target."""
    from tvm.s_tir.meta_schedule.runner import RPCRunner

    return isinstance(call.runner, RPCRunner)


def device_of(call: TuneCall) -> DeviceFingerprint:
    """The device that is tuned for; wrong in its CPU and threads where another machine measures."""
    return Device.of(call.target, _num_threads(call)).fingerprint


def _num_threads(call: TuneCall) -> int:
    """Threads of a kernel: what TVM says in the process that measures, or else what it takes in one like this.

    A script may set the environment after that process has begun, or set the threads in there, by an initializer.
    """
    import tvm
    from tvm.s_tir.meta_schedule.runner import LocalRunner

    if isinstance(call.runner, LocalRunner):
        try:
            return int(call.runner.pool.submit(tvm.runtime.num_threads).result())
        except Exception as err:  # noqa: BLE001 - the process may end in any way, and the tuning will say so itself
            _log.debug("the runner does not say how many threads it has: %s", err)
    return runtime_num_threads()


def foreign_provenance(
    call: TuneCall,
    network: str,
    *,
    num_threads: int,
    estimated_latency_ms: float | None,
    trials_per_task: float | None,
) -> Provenance:
    """The provenance of records whose tasks the user has lowered, so that no tuning of ours goes on from them."""
    import tvm

    return Provenance(
        network=network,
        from_file=False,
        network_sha256="",
        batch_size=0,
        input_shapes={},
        seed=0,
        layout="",
        dtype="",
        pad_channels="off",
        target=str(call.target),
        num_threads=num_threads,
        lowering_version=_FOREIGN_LOWERING,
        tvm_version=tvm.__version__,
        host=platform.node(),
        measure=_measure_settings(call),
        estimated_latency_ms=estimated_latency_ms,
        trials_per_task=trials_per_task,
    )


def _measure_settings(call: TuneCall) -> dict[str, Any]:
    """Settings of the time evaluator, where the runner has them."""
    config = getattr(call.runner, "evaluator_config", None)
    if config is None:
        return {}
    return {
        "number": config.number,
        "repeat": config.repeat,
        "min_repeat_ms": config.min_repeat_ms,
        "cache_flush": config.enable_cpu_cache_flush,
    }


def runtime_num_threads() -> int:
    """Threads that kernels get in a process that leaves TVM alone.

    As `MaxConcurrency` in src/runtime/threading_backend.cc has it, and no more than the machine has CPUs; TVM itself
    would start the threads when asked.
    """
    given = os.environ.get("TVM_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS")
    if given and (number := re.match(r"\s*(\d+)", given)):  # as atoi reads it, also the list "4,2" of OpenMP
        return max(1, min(int(number[1]), os.cpu_count() or 1))
    cpus = len(os.sched_getaffinity(0))
    return max(1, cpus // 2 if os.uname().machine == "x86_64" else cpus)
