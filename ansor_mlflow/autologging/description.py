"""Where the records of a user's tuning come from: the device, and what is known of the rest."""

from __future__ import annotations

import os
import platform
from typing import Any

from ansor_mlflow.autologging.call import TuneCall
from ansor_mlflow.device import Device, DeviceFingerprint
from ansor_mlflow.records import Provenance

_FOREIGN_LOWERING = 0
"""Lowering version of records whose tasks another lowering than ours made."""


def is_remote(call: TuneCall) -> bool:
    """Whether another machine measures, of which this one knows nothing but the target."""
    from tvm.s_tir.meta_schedule.runner import RPCRunner

    return isinstance(call.runner, RPCRunner)


def device_of(call: TuneCall) -> DeviceFingerprint:
    """The device that is tuned for; wrong in its CPU where another machine measures."""
    return Device.of(call.target, runtime_num_threads()).fingerprint


def foreign_provenance(
    call: TuneCall, network: str, *, estimated_latency_ms: float | None, trials_per_task: float | None
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
        num_threads=runtime_num_threads(),
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

    As `MaxConcurrency` in src/runtime/threading_backend.cc has it; TVM itself would start the threads when asked.
    """
    given = os.environ.get("TVM_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS")
    if given and given.isdecimal():
        return max(1, int(given))
    cpus = len(os.sched_getaffinity(0))
    return max(1, cpus // 2 if os.uname().machine == "x86_64" else cpus)
