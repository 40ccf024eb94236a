"""ONNX files for tests of how networks are read, and what reads them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from ansor_mlflow.networks import Network
from ansor_mlflow.tensors import random_inputs


def start(network: Network) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(network.model.SerializeToString(), providers=["CPUExecutionProvider"])


def run(network: Network, seed: int = 0) -> list[np.ndarray]:
    return start(network).run(None, random_inputs(network.inputs, seed))


def value(
    name: str, shape: Sequence[int | str | None] | None, elem_type: int = TensorProto.FLOAT
) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, elem_type, shape)


def save(
    path: Path,
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    outputs: list[onnx.ValueInfoProto],
    weights: dict[str, np.ndarray] | None = None,
    **options: Any,
) -> str:
    initializers = [numpy_helper.from_array(values, name) for name, values in (weights or {}).items()]
    graph = helper.make_graph(nodes, "graph", inputs, outputs, initializers)
    domains = {"", *(node.domain for node in nodes)}
    opsets = [helper.make_opsetid(domain, 1 if domain else 17) for domain in domains]
    onnx.save(helper.make_model(graph, ir_version=8, opset_imports=opsets), path, **options)
    return str(path)


def proposed(error: BaseException) -> dict[str, list[int]]:
    """The `input_shapes` that an error tells the user to copy."""
    found = re.search(r"input_shapes='([^']*)'", str(error))
    assert found is not None
    return json.loads(found[1])
