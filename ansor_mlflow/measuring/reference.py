"""ONNX Runtime: the reference for correctness, and the baseline for speed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from ansor_mlflow.device import CPU, Platform
from ansor_mlflow.measuring.rivals.task import Rival, RivalTask
from ansor_mlflow.tensors import Arrays

if TYPE_CHECKING:
    from onnx import NodeProto


_ROUNDING = {"QAttention", "QGemm", "QuantizeLinear"}
_ROUNDS_TO_8_BITS = 4
"""Accuracy level of MatMulNBits (ContribOperators.md of ONNX Runtime) that rounds what weights are multiplied with."""
_RANDOM = {"Bernoulli", "BiasDropout", "BitmaskDropout", "Multinomial"}


class ReferenceSession:
    """A network in ONNX Runtime: the reference on the CPU, a rival where the model runs.

    With `exact`, sums of products of 8 bits are exact, and nothing is rounded that the network does not round: ONNX
    Runtime's fastest kernels for CPUs without VNNI saturate in 16 bits, and those for weights of 4 bits round what they
    are multiplied with to 8. A RuntimeError says that it has nothing to run there with.
    """

    def __init__(self, network: Path, num_threads: int, *, exact: bool = False, platform: Platform = CPU) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = num_threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        if exact:
            options.add_session_config_entry("session.x64quantprecision", "1")
            options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")  # float32
        provider, settings = platform.provider, dict(platform.provider_settings)
        self._session = onnxruntime.InferenceSession(str(network), options, providers=[(provider, settings)])
        if provider not in self._session.get_providers():  # it takes the CPU instead, and only warns
            raise RuntimeError(f"this build has no {provider}; pip install onnxruntime-gpu in its place")
        self._outputs = [output.name for output in self._session.get_outputs()]

    def run(self, inputs: Mapping[str, npt.NDArray[Any]]) -> Arrays:
        """Runs the network once; returns the outputs by name."""
        return dict(zip(self._outputs, self._session.run(None, dict(inputs)), strict=True))


def _load(task: RivalTask) -> Callable[[Mapping[str, npt.NDArray[Any]]], Arrays]:
    return ReferenceSession(task.network, task.num_threads, platform=task.platform).run


ONNXRUNTIME = Rival(title="ONNX Runtime", package="onnxruntime", load=_load)


def is_quantized(network: Path) -> bool:
    """Whether the network of an ONNX file rounds values to 8 bits between its layers; weights do not count."""
    return any(map(_rounds, _nodes(network)))


def operators_of(network: Path) -> set[str]:
    """The operators of an ONNX file."""
    return {node.op_type for node in _nodes(network)}


def random_operators(network: Path) -> list[str]:
    """The operators of an ONNX file that draw random numbers."""
    return list(dict.fromkeys(node.op_type for node in _nodes(network) if _is_random(node)))


def _nodes(network: Path) -> Iterator[NodeProto]:
    """All nodes of an ONNX file, also those in branches and functions."""
    import onnx

    from ansor_mlflow.graphs import nodes_of

    model = onnx.load(network, format="protobuf", load_external_data=False)
    for nodes in (model.graph.node, *(function.node for function in model.functions)):
        yield from nodes_of(nodes)


def _rounds(node: NodeProto) -> bool:
    if node.op_type == "MatMulNBits":
        return any(
            attribute.name == "accuracy_level" and attribute.i == _ROUNDS_TO_8_BITS for attribute in node.attribute
        )
    return node.op_type in _ROUNDING or node.op_type.startswith(("DynamicQuantize", "QLinear"))


def _is_random(node: NodeProto) -> bool:
    if node.op_type == "Dropout":
        return len(node.input) > 2 and node.input[2] != ""
    return node.op_type in _RANDOM or node.op_type.startswith(("RandomNormal", "RandomUniform"))
