"""Networks to serve, compiled without records, and MLflow's server for them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import onnx
from helpers.servers import SCRIPTS, Server, answers, free_port, running
from helpers.untuned import compiled_untuned

from ansor_mlflow.lowering.lower import lower
from ansor_mlflow.model import CompiledNetwork
from ansor_mlflow.networks import load_network
from ansor_mlflow.networks.graph import GraphBuilder

if TYPE_CHECKING:
    from tvm.target import Target


def compiled(model: onnx.ModelProto, target: Target, directory: Path) -> CompiledNetwork:
    """A network without tuning; its files are in `directory`."""
    file = directory / f"{model.graph.name}.onnx"
    onnx.save(model, file)
    network = load_network(str(file))
    return compiled_untuned(network, lower(network.model, target), target, directory)


def pairs(batch: int) -> onnx.ModelProto:
    """Two inputs and two outputs: (batch, 3, 4) and (batch, 1, 1) → their product, negative values cut, and its rows
    as they are, flat."""
    builder = GraphBuilder(seed=0)
    product = builder.node(
        "Mul", "product", builder.input("image", (batch, 3, 4)), builder.input("gain", (batch, 1, 1))
    )
    builder.relu("positive", product)
    builder.node("Flatten", "flat", product, axis=1)
    return builder.build(f"pairs_{batch}", {"positive": (batch, 3, 4), "flat": (batch, 12)})


def image_classifier() -> onnx.ModelProto:
    """A network as small as can be with the inputs and outputs of ResNet-18."""
    builder = GraphBuilder(seed=0)
    pooled = builder.node("GlobalAveragePool", "pool", builder.input("data", (1, 3, 224, 224)))
    builder.dense("logits", builder.node("Flatten", "flat", pooled, axis=1), units=1000, in_units=3)
    return builder.build("classifier", {"logits": (1, 1000)})


@contextmanager
def model_server(
    arguments: list[str], log: Path, environment: Mapping[str, str] = {}, *, timeout_s: float = 240
) -> Iterator[Server]:
    """Runs `mlflow models serve` on a free port until it is left; `url` is where it takes requests."""
    port = free_port()
    command = [str(SCRIPTS / "mlflow"), "models", "serve", *arguments, "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    path = f"{SCRIPTS}{os.pathsep}{os.environ.get('PATH', '')}"  # where MLflow looks for uvicorn
    environment = {"PATH": path, **environment}
    with running(command, log, lambda: answers(f"{url}/ping"), environment, timeout_s=timeout_s) as process:
        yield Server(process, f"{url}/invocations")
