"""Networks that are compiled without a tuning."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ansor_mlflow.device import available_cpus, fingerprint
from ansor_mlflow.lowering import LoweredNetwork
from ansor_mlflow.model import CompiledNetwork, compile_untuned, part_entries
from ansor_mlflow.networks import Network

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
