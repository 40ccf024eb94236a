"""Layers that may be computed by several algorithms."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime

from ansor_mlflow.lowering import LoweredNetwork, TuningTask
from ansor_mlflow.lowering.lower import lower
from ansor_mlflow.networks import load_network
from ansor_mlflow.networks.graph import GraphBuilder
from ansor_mlflow.settings import LoweringSettings

if TYPE_CHECKING:
    from tvm.target import Target

ERRORS = {2: 2e-6, 4: 2e-5}
"""Largest error of a layer over its largest output, by the outputs of a tile: what docs/tuning.md states."""
MORE_TAPS = 5
"""How many times as large it may be with five or seven taps."""


def conv(height: int, width: int, filters: int, channels: int, rest: str = "3,3,1,1,bias,relu", batch: int = 1) -> str:
    return f"conv2d:{batch},{height},{width},{filters},{channels},{rest}"


def conv3d(shape: str, filters: int, channels: int, rest: str = "3,3,3,1,1,bias,relu", batch: int = 1) -> str:
    """Of depth, height and width `shape`, such as "4,7,7"."""
    return f"conv3d:{batch},{shape},{filters},{channels},{rest}"


def line(
    length: int,
    filters: int,
    channels: int,
    taps: int,
    batch: int = 1,
    *,
    stride: int = 1,
    dilation: int = 1,
    groups: int = 1,
    padding: int = 0,
) -> onnx.ModelProto:
    """A convolution over one axis, with a bias and Relu; `length` are the elements of its output."""
    builder = GraphBuilder(seed=0)
    given = (length - 1) * stride + dilation * (taps - 1) + 1 - 2 * padding
    data = builder.input("data", (batch, channels, given))
    settings: dict[str, Any] = {"stride": stride, "dilation": dilation, "padding": padding, "groups": groups}
    total = builder.conv("conv", data, (filters, channels // groups, taps), bias=True, **settings)
    return builder.build("line", {builder.relu("output", total): (batch, filters, length)})


def layer_of(network: str | onnx.ModelProto, target: Target, **lowering: object) -> TuningTask:
    settings_ = LoweringSettings(algorithm="direct", pad_channels="off", **lowering)  # type: ignore[arg-type]
    model = load_network(network).model if isinstance(network, str) else network
    return max(lower(model, target, settings_).tasks, key=lambda task: task.info.flops)


def layers_of(lowered: LoweredNetwork) -> list[list[TuningTask]]:
    by_layer = itertools.groupby(lowered.tasks, key=lambda task: task.info.layer_hash)
    return [algorithms for _, group in by_layer if len(algorithms := list(group)) > 1]


def output_error(library: Path, model: onnx.ModelProto) -> float:
    """The largest error of a library's output over the largest output, against ONNX Runtime's."""
    import tvm
    from tvm import relax

    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(0)
    feeds = {each.name: rng.normal(size=each.shape).astype("float32") for each in session.get_inputs()}
    (expected,) = session.run(None, feeds)
    machine = relax.VirtualMachine(tvm.runtime.load_module(str(library)), tvm.cpu())
    actual = machine["main"](*map(tvm.runtime.tensor, feeds.values())).numpy()
    return float(abs(actual - expected).max() / abs(expected).max())
