"""MobileNet ("MobileNets: Efficient Convolutional Neural Networks for Mobile Vision Applications", Howard et al., 2017,
table 1) and MobileNetV2 ("Inverted Residuals and Linear Bottlenecks", Sandler et al., 2018, table 2), both of width 1.

The graphs end in logits.
"""

from __future__ import annotations

import numpy as np

from ansor_mlflow.networks.families.family import append_pooled_logits, image_classifier
from ansor_mlflow.networks.graph import GraphBuilder
from ansor_mlflow.networks.shapes import Shape

SEPARABLE_BLOCKS = (
    (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1)
)  # fmt: skip
"""Output channels and stride of each depthwise separable block of MobileNet."""

INVERTED_STAGES = (
    (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)
)  # fmt: skip
"""Expansion, output channels, number of blocks and stride of the first of them, for each stage of MobileNetV2."""


def _append_mobilenet(builder: GraphBuilder, input_shape: Shape) -> None:
    def layer(name: str, data: str, channels: int, in_channels: int, kernel: int, *, stride: int = 1) -> str:
        data = _conv_norm(builder, name, data, channels, in_channels, kernel, stride=stride)
        return builder.relu(f"{name}.relu", data)

    data = layer("stem", builder.input("data", input_shape), 32, 3, 3, stride=2)
    in_channels = 32
    for block, (channels, stride) in enumerate(SEPARABLE_BLOCKS):
        data = layer(f"block{block}.depthwise", data, in_channels, 1, 3, stride=stride)
        data = layer(f"block{block}.pointwise", data, channels, in_channels, 1)
        in_channels = channels
    append_pooled_logits(builder, data, channels=in_channels)


def _append_mobilenet_v2(builder: GraphBuilder, input_shape: Shape) -> None:
    bounds = builder.weight("zero", np.zeros(())), builder.weight("six", np.full((), 6))

    def layer(name: str, data: str, channels: int, in_channels: int, kernel: int, *, stride: int = 1) -> str:
        data = _conv_norm(builder, name, data, channels, in_channels, kernel, stride=stride)
        return builder.node("Clip", f"{name}.relu6", data, *bounds)

    def block(name: str, data: str, channels: int, in_channels: int, expansion: int, stride: int) -> str:
        """Widens, filters each channel, narrows without relu6, and adds its input where the shape is the same."""
        hidden, branch = in_channels * expansion, data
        if expansion > 1:
            branch = layer(f"{name}.expand", branch, hidden, in_channels, 1)
        branch = layer(f"{name}.depthwise", branch, hidden, 1, 3, stride=stride)
        branch = _conv_norm(builder, f"{name}.project", branch, channels, hidden, 1)
        return builder.node("Add", f"{name}.add", branch, data) if (stride, in_channels) == (1, channels) else branch

    data = layer("stem", builder.input("data", input_shape), 32, 3, 3, stride=2)
    in_channels = 32
    for stage, (expansion, channels, num_blocks, first_stride) in enumerate(INVERTED_STAGES):
        for index in range(num_blocks):
            stride = first_stride if index == 0 else 1
            data = block(f"stage{stage}.block{index}", data, channels, in_channels, expansion, stride)
            in_channels = channels
    data = layer("head", data, 1280, in_channels, 1)
    append_pooled_logits(builder, data, channels=1280)


def _conv_norm(
    builder: GraphBuilder, name: str, data: str, channels: int, in_channels: int, kernel: int, *, stride: int = 1
) -> str:
    """Convolution, depthwise if its kernel has one input channel, and batch norm."""
    groups = channels if in_channels == 1 else 1
    shape = (channels, in_channels, kernel, kernel)
    data = builder.conv(name, data, shape, stride=stride, padding=kernel // 2, groups=groups)
    return builder.batch_norm(f"{name}.bn", data, channels, gain=1)


NETWORKS = {
    "mobilenet": image_classifier("mobilenet", _append_mobilenet),
    "mobilenet_v2": image_classifier("mobilenet_v2", _append_mobilenet_v2),
}
