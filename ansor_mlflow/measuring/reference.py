"""ONNX Runtime: the reference for correctness, and the baseline for speed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt

from ansor_mlflow.tensors import Arrays


class ReferenceSession:
    """A network in ONNX Runtime on the CPU.

    Args:
        network: ONNX file.
        num_threads: Threads of one operator.
        exact: Whether sums of products of 8 bits are exact; ONNX Runtime's fastest kernels for CPUs without VNNI
            saturate in 16 bits.
    """

    def __init__(self, network: Path, num_threads: int, *, exact: bool = False) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = num_threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        if exact:
            options.add_session_config_entry("session.x64quantprecision", "1")
        self._session = onnxruntime.InferenceSession(str(network), options, providers=["CPUExecutionProvider"])
        self._outputs = [output.name for output in self._session.get_outputs()]

    def run(self, inputs: Mapping[str, npt.NDArray[Any]]) -> Arrays:
        """Runs the network once; returns the outputs by name."""
        return dict(zip(self._outputs, self._session.run(None, dict(inputs)), strict=True))


def is_quantized(network: Path) -> bool:
    """Whether the network of an ONNX file rounds values to 8 bits between its layers."""
    import onnx

    graph = onnx.load(network, format="protobuf", load_external_data=False).graph
    return any(node.op_type in {"DynamicQuantizeLinear", "QuantizeLinear"} for node in graph.node)
