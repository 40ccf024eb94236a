"""ONNX Runtime: the reference for correctness, and the baseline for speed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy.typing as npt

from ansor_mlflow.tensors import Arrays


class ReferenceSession:
    """A network in ONNX Runtime: the reference on the CPU, a rival where the model runs.

    Args:
        network: ONNX file.
        num_threads: Threads of one operator.
        exact: Whether sums of products of 8 bits are exact; ONNX Runtime's fastest kernels for CPUs without VNNI
            saturate in 16 bits.
        device: Where it runs.

    Raises:
        RuntimeError: It has nothing to run there with.
    """

    def __init__(
        self, network: Path, num_threads: int, *, exact: bool = False, device: Literal["cpu", "cuda"] = "cpu"
    ) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = num_threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        if exact:
            options.add_session_config_entry("session.x64quantprecision", "1")
        provider = "CPUExecutionProvider" if device == "cpu" else "CUDAExecutionProvider"
        settings = {} if device == "cpu" else {"use_tf32": "0"}  # products of float32 in float32
        self._session = onnxruntime.InferenceSession(str(network), options, providers=[(provider, settings)])
        if provider not in self._session.get_providers():  # it takes the CPU instead, and only warns
            raise RuntimeError(f"this build has no {provider}; pip install onnxruntime-gpu in its place")
        self._outputs = [output.name for output in self._session.get_outputs()]

    def run(self, inputs: Mapping[str, npt.NDArray[Any]]) -> Arrays:
        """Runs the network once; returns the outputs by name."""
        return dict(zip(self._outputs, self._session.run(None, dict(inputs)), strict=True))


def is_quantized(network: Path) -> bool:
    """Whether the network of an ONNX file rounds values to 8 bits between its layers."""
    import onnx

    graph = onnx.load(network, format="protobuf", load_external_data=False).graph
    rounding = {"DynamicQuantizeLinear", "QGemm", "QuantizeLinear"}
    return any(node.op_type in rounding or node.op_type.startswith("QLinear") for node in graph.node)
