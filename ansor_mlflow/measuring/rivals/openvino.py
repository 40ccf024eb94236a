"""OpenVINO, of Intel, on the CPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy.typing as npt

from ansor_mlflow.device import CPU
from ansor_mlflow.measuring.rivals.task import Rival, RivalTask
from ansor_mlflow.tensors import Arrays

_WHERE = re.compile(r"(Exception from|Check '[^']*' failed at) \S+:\d+:\s*")
"""The lines of C++ that an error has passed, which come before what it says."""


def _load(task: RivalTask) -> Callable[[Mapping[str, npt.NDArray[Any]]], Arrays]:
    """Compiles the network for one stream, in its own precision."""
    import openvino

    if task.platform != CPU:
        raise ValueError(f"it does not run on {task.platform.name}")
    config: dict[str, Any] = {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "INFERENCE_NUM_THREADS": task.num_threads,
        # every value in the type that the network gives it: else bfloat16, where the CPU has instructions for it
        "EXECUTION_MODE_HINT": "ACCURACY",
    }
    try:
        request = openvino.Core().compile_model(str(task.network), "CPU", config).create_infer_request()
    except RuntimeError as err:
        raise RuntimeError(_WHERE.sub("", str(err))) from err

    def run(inputs: Mapping[str, npt.NDArray[Any]]) -> Arrays:
        values = request.infer(dict(inputs), share_inputs=True)
        return {name: values[index] for index, name in enumerate(task.outputs)}

    return run


OPENVINO = Rival(title="OpenVINO", package="openvino", load=_load)
