"""ONNX's own evaluator as a rival: every operator is a function of NumPy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ansor_mlflow.measuring import Rival, RivalTask

Inputs = Mapping[str, npt.NDArray[Any]]


def _load(task: RivalTask) -> Callable[[Inputs], dict[str, npt.NDArray[Any]]]:
    from onnx.reference import ReferenceEvaluator  # only the process that is timed needs it

    evaluator = ReferenceEvaluator(str(task.network))

    def run(inputs: Inputs) -> dict[str, npt.NDArray[Any]]:
        values = evaluator.run(list(task.outputs), dict(inputs))
        return {name: np.asarray(value) for name, value in zip(task.outputs, values, strict=True)}

    return run


ONNX_REFERENCE = Rival(title="ONNX's reference", package="onnx", load=_load)
