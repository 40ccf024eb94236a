"""Networks that are compiled without a tuning, and whether they compute what they should."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ansor_mlflow.device import available_cpus, fingerprint
from ansor_mlflow.lowering import LoweredNetwork
from ansor_mlflow.measuring import ReferenceSession
from ansor_mlflow.model import CompiledNetwork, TunedModel, compile_untuned, part_entries
from ansor_mlflow.networks import Network
from ansor_mlflow.tensors import random_inputs

if TYPE_CHECKING:
    from tvm.target import Target


def compiled_untuned(network: Network, lowered: LoweredNetwork, target: Target, directory: Path) -> CompiledNetwork:
    """Compiles a network of an ONNX file as TVM does by itself, so that it is many times slower than ONNX Runtime."""
    assert network.path is not None
    records = directory / "records"
    records.mkdir()
    compile_untuned(lowered, target, directory / "model.so")
    return CompiledNetwork(
        name=network.name,
        network=network.path,
        inputs=network.inputs,
        outputs=network.outputs,
        library=directory / "model.so",
        records=records,
        fingerprint=fingerprint(target, available_cpus()),
        coverage={},
        parts=part_entries(lowered),
        sizes=network.sizes,
    )


def assert_computes(model: TunedModel, network: Path) -> None:
    """Compares a loaded model of one output with what ONNX Runtime computes of its network."""
    inputs = random_inputs(model.inputs, 5)
    ((name, expected),) = ReferenceSession(network, num_threads=1).run(inputs).items()
    np.testing.assert_allclose(model.run(inputs)[name], expected, rtol=0, atol=1e-4 * abs(expected).max())
