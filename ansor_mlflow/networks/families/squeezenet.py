"""SqueezeNet 1.1 ("SqueezeNet: AlexNet-level accuracy with 50x fewer parameters", Iandola et al., 2016; version 1.1 is
that of https://github.com/forresti/SqueezeNet).

Dropout does nothing at inference and is left out. The logits are means of relus, so none is negative.
"""

from __future__ import annotations

from ansor_mlflow.networks.families.family import NUM_CLASSES, image_classifier
from ansor_mlflow.networks.graph import GraphBuilder
from ansor_mlflow.networks.shapes import Shape

SQUEEZED_CHANNELS = ((16, 16), (32, 32), (48, 48, 64, 64))
"""Squeezed channels of the fire modules between the poolings; a module returns eight times as many."""


def _append_squeezenet(builder: GraphBuilder, input_shape: Shape) -> None:
    data = _conv_relu(builder, "stem", builder.input("data", input_shape), 64, 3, 3, stride=2)
    channels = 64
    for stage, modules in enumerate(SQUEEZED_CHANNELS):
        # Caffe's pooling, which the network was made with, rounds sizes up.
        data = builder.pool("MaxPool", f"stage{stage}.pool", data, (3, 3), stride=2, ceil_mode=1)
        for index, squeezed in enumerate(modules):
            data = _fire(builder, f"stage{stage}.fire{index}", data, channels, squeezed)
            channels = 8 * squeezed
    data = _conv_relu(builder, "head", data, NUM_CLASSES, channels, 1)
    builder.node("Flatten", "logits", builder.node("GlobalAveragePool", "head.pool", data), axis=1)


def _fire(builder: GraphBuilder, name: str, data: str, in_channels: int, squeezed: int) -> str:
    """Squeezes with 1×1 kernels, expands with as many 1×1 as 3×3 kernels."""
    data = _conv_relu(builder, f"{name}.squeeze", data, squeezed, in_channels, 1)
    parts = [_conv_relu(builder, f"{name}.expand{kernel}", data, 4 * squeezed, squeezed, kernel) for kernel in (1, 3)]
    return builder.node("Concat", f"{name}.concat", *parts, axis=1)


def _conv_relu(
    builder: GraphBuilder, name: str, data: str, channels: int, in_channels: int, kernel: int, *, stride: int = 1
) -> str:
    """Convolution with bias, without padding where it has a stride, and relu."""
    padding = kernel // 2 if stride == 1 else 0
    shape = (channels, in_channels, kernel, kernel)
    data = builder.conv(name, data, shape, stride=stride, padding=padding, bias=True)
    return builder.relu(f"{name}.relu", data)


NETWORKS = {"squeezenet_v1.1": image_classifier("squeezenet_v1.1", _append_squeezenet)}
