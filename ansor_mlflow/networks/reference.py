"""ONNX Runtime: the reference for correctness, and the baseline for speed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt
import onnxruntime

Arrays = dict[str, npt.NDArray[Any]]


class ReferenceSession:
    """A network in ONNX Runtime on the CPU.

    Args:
        network: ONNX file.
        num_threads: Threads of one operator.
    """

    def __init__(self, network: Path, num_threads: int) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = num_threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(str(network), options, providers=["CPUExecutionProvider"])
        self._outputs = [output.name for output in self._session.get_outputs()]

    def run(self, inputs: Mapping[str, npt.NDArray[Any]]) -> Arrays:
        """Runs the network once; returns the outputs by name."""
        return dict(zip(self._outputs, self._session.run(None, dict(inputs)), strict=True))
