"""Fixtures that several test files share. They are real parts, made once for the whole session."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import onnx
import pytest
from hypothesis import settings

from ansor_mlflow.networks import Network, load_network
from ansor_mlflow.networks.graph import GraphBuilder
from ansor_mlflow.targets import available_cpus, resolve_target

if TYPE_CHECKING:
    from tvm.target import Target

settings.register_profile("no_deadline", deadline=None)  # how long an example takes says more of the machine than of us
settings.load_profile("no_deadline")


@pytest.fixture(scope="session")
def host_target() -> Target:
    """`target=auto` with every CPU this process may use."""
    return resolve_target("auto", available_cpus())


@pytest.fixture(scope="session")
def small_onnx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ONNX file: convolution, batch norm, relu, global average pool, dense; (1, 3, 16, 16) -> (1, 10)."""
    builder = GraphBuilder(seed=0)
    data = builder.input("data", (1, 3, 16, 16))
    data = builder.conv("conv", data, (8, 3, 3, 3), padding=1)
    data = builder.relu("relu", builder.batch_norm("bn", data, 8))
    data = builder.node("Flatten", "flatten", builder.node("GlobalAveragePool", "pool", data), axis=1)
    builder.dense("logits", data, units=10, in_units=8)
    path = tmp_path_factory.mktemp("networks") / "small.onnx"
    onnx.save(builder.build("small", {"logits": (1, 10)}), path)
    return path


@pytest.fixture(scope="session")
def small_network(small_onnx: Path) -> Network:
    """The network of `small_onnx`, loaded."""
    return load_network(str(small_onnx))
