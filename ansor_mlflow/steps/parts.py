"""What ONNX Runtime's parts of a network take beside the tasks that TVM computes."""

from __future__ import annotations

import logging
from dataclasses import replace

from ansor_mlflow.device import Device, why_not_runnable
from ansor_mlflow.errors import AnsorMlflowError
from ansor_mlflow.lowering import LoweredNetwork
from ansor_mlflow.measuring import time_parts_in_onnxruntime
from ansor_mlflow.model import PartEntry, part_entries
from ansor_mlflow.tensors import Sized

_SEED = 0
_log = logging.getLogger("ansor_mlflow")


def estimated_parts(
    lowered: LoweredNetwork, network: Sized, device: Device, estimated_s: float
) -> tuple[PartEntry, ...]:
    """The parts of a network before it is compiled; ONNX Runtime's with their measured times.

    Args:
        lowered: The network.
        network: Its inputs and outputs. Of one with several sizes nothing is measured.
        device: Where it runs. Of another machine nothing is measured.
        estimated_s: What its tasks take together, in seconds, of which the shares of the time are.
    """
    parts = part_entries(lowered)
    beside = [number for number, part in enumerate(parts) if part.runs_in == "onnxruntime"]
    if not beside or network.sizes or why_not_runnable(device.fingerprint):
        return parts
    try:
        seconds = time_parts_in_onnxruntime(lowered, network, device.num_threads, _SEED)
    except AnsorMlflowError as err:
        _log.warning("what stays with ONNX Runtime is not timed: %s", err)
        return parts
    total = estimated_s + sum(seconds[number] for number in beside)
    return tuple(
        replace(part, latency_ms=seconds[number] * 1e3, latency_share=seconds[number] / total)
        if number in beside
        else part
        for number, part in enumerate(parts)
    )
