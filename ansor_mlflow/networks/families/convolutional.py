"""ResNet in two and three dimensions, VGG, SqueezeNet, MobileNet, DenseNet and Inception v3.

The last ("Rethinking the Inception Architecture for Computer Vision", Szegedy et al., 2015) is layer by layer as
torchvision has it (`torchvision/models/inception.py`, version 0.20), without the auxiliary head. Graphs end in logits;
dropout does nothing at inference and is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from ansor_mlflow.networks.graph import NUM_CLASSES, GraphBuilder, PerAxis, append_pooled_logits, image_classifier
from ansor_mlflow.networks.shapes import Shape

STAGE_CHANNELS = (64, 128, 256, 512)
NUM_VIDEO_CLASSES = 400
"""Classes of Kinetics."""


BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
"""Blocks of each of the four stages, by depth."""
FIRST_DEPTH_WITH_BOTTLENECKS = 50


def _append_resnet(
    depth: int, builder: GraphBuilder, input_shape: Shape, *, stem_stride: PerAxis = 2, num_classes: int = NUM_CLASSES
) -> None:
    """Appends a ResNet with as many spatial axes as its input has."""
    rank, has_bottlenecks = len(input_shape) - 2, depth >= FIRST_DEPTH_WITH_BOTTLENECKS
    data = builder.input("data", input_shape)
    data = builder.conv("stem.conv", data, (64, 3, *[7] * rank), stride=stem_stride, padding=3)
    data = builder.relu("stem.relu", builder.batch_norm("stem.bn", data, 64))
    data = builder.pool("MaxPool", "stem.pool", data, (3,) * rank, stride=2, padding=1)
    in_channels = 64
    for stage, (channels, num_blocks) in enumerate(zip(STAGE_CHANNELS, BLOCKS[depth], strict=True)):
        for block in range(num_blocks):
            block_name = f"stage{stage}.block{block}"
            stride = 2 if block == 0 and stage > 0 else 1
            if has_bottlenecks:
                layers = [(channels, 1, 1), (channels, 3, stride), (4 * channels, 1, 1)]
            else:
                layers = [(channels, 3, stride), (channels, 3, 1)]
            data = _residual_block(builder, block_name, data, in_channels, layers, rank)
            in_channels = layers[-1][0]
    append_pooled_logits(builder, data, channels=in_channels, num_classes=num_classes)


def _residual_block(
    builder: GraphBuilder, name: str, data: str, in_channels: int, layers: Sequence[tuple[int, int, int]], rank: int
) -> str:
    """Convolutions of so many channels, kernel size and stride, added to the (projected) input."""
    out_channels, stride = layers[-1][0], max(stride for *_, stride in layers)
    branch, branch_channels = data, in_channels
    for index, (layer_channels, kernel, layer_stride) in enumerate(layers):
        shape = (layer_channels, branch_channels, *[kernel] * rank)
        branch = builder.conv(f"{name}.conv{index}", branch, shape, stride=layer_stride, padding=kernel // 2)
        is_last = index == len(layers) - 1
        # A branch that is small beside its input keeps the sum of fifty of them in bounds.
        branch = builder.batch_norm(f"{name}.bn{index}", branch, layer_channels, gain=0.35 if is_last else 0.75)
        if not is_last:
            branch = builder.relu(f"{name}.relu{index}", branch)
        branch_channels = layer_channels
    if stride != 1 or in_channels != out_channels:
        shape = (out_channels, in_channels, *[1] * rank)
        data = builder.conv(f"{name}.projection", data, shape, stride=stride)
        data = builder.batch_norm(f"{name}.projection.bn", data, out_channels)
    return builder.relu(f"{name}.relu", builder.node("Add", f"{name}.add", branch, data))


VGG_CHANNELS = (64, 128, 256, 512, 512)
HIDDEN_UNITS = 4096
CONVOLUTIONS = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
"""3×3 convolutions of each stage, by depth."""


def _append_vgg(convolutions: tuple[int, ...], builder: GraphBuilder, input_shape: Shape) -> None:
    """The first dense layer takes what the five poolings leave of the image, 7×7 of 224×224."""
    data = builder.input("data", input_shape)
    in_channels = 3
    for stage, (channels, num_convolutions) in enumerate(zip(VGG_CHANNELS, convolutions, strict=True)):
        for index in range(num_convolutions):
            name = f"stage{stage}.conv{index}"
            data = builder.conv(name, data, (channels, in_channels, 3, 3), padding=1, bias=True)
            data = builder.relu(f"{name}.relu", data)
            in_channels = channels
        data = builder.pool("MaxPool", f"stage{stage}.pool", data, (2, 2), stride=2)
    data = builder.node("Flatten", "head.flatten", data, axis=1)
    in_units = in_channels * (input_shape[2] // 32) * (input_shape[3] // 32)
    for index in range(2):
        data = builder.dense(f"head.dense{index}", data, units=HIDDEN_UNITS, in_units=in_units)
        data = builder.relu(f"head.relu{index}", data)
        in_units = HIDDEN_UNITS
    builder.dense("logits", data, units=NUM_CLASSES, in_units=in_units)


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


GROWTH_RATE = 32
BOTTLENECK_CHANNELS = 4 * GROWTH_RATE
BLOCK_LAYERS = (6, 12, 24, 16)


def _append_densenet(builder: GraphBuilder, input_shape: Shape) -> None:
    channels = 64
    data = builder.conv("stem.conv", builder.input("data", input_shape), (channels, 3, 7, 7), stride=2, padding=3)
    data = _norm_relu(builder, "stem", data, channels)
    data = builder.pool("MaxPool", "stem.pool", data, (3, 3), stride=2, padding=1)
    for block, num_layers in enumerate(BLOCK_LAYERS):
        for layer in range(num_layers):
            data = _dense_layer(builder, f"block{block}.layer{layer}", data, channels)
            channels += GROWTH_RATE
        if block < len(BLOCK_LAYERS) - 1:
            data = _transition(builder, f"transition{block}", data, channels)
            channels //= 2
    append_pooled_logits(builder, _norm_relu(builder, "head", data, channels), channels=channels)


def _dense_layer(builder: GraphBuilder, name: str, data: str, channels: int) -> str:
    """Adds `GROWTH_RATE` channels, which a 1×1 and a 3×3 convolution compute from all that there are."""
    new = _norm_relu(builder, f"{name}.first", data, channels)
    new = builder.conv(f"{name}.conv0", new, (BOTTLENECK_CHANNELS, channels, 1, 1))
    new = _norm_relu(builder, f"{name}.second", new, BOTTLENECK_CHANNELS)
    new = builder.conv(f"{name}.conv1", new, (GROWTH_RATE, BOTTLENECK_CHANNELS, 3, 3), padding=1)
    return builder.node("Concat", f"{name}.concat", data, new, axis=1)


def _transition(builder: GraphBuilder, name: str, data: str, channels: int) -> str:
    """Halves channels, height and width."""
    data = _norm_relu(builder, name, data, channels)
    data = builder.conv(f"{name}.conv", data, (channels // 2, channels, 1, 1))
    return builder.pool("AveragePool", f"{name}.pool", data, (2, 2), stride=2)


def _norm_relu(builder: GraphBuilder, name: str, data: str, channels: int) -> str:
    return builder.relu(f"{name}.relu", builder.batch_norm(f"{name}.bn", data, channels, gain=1))


class _Features(NamedTuple):
    tensor: str
    """Name of a tensor (N, channels, H, W)."""
    channels: int


class _Layer(NamedTuple):
    """A convolution with batch norm and relu. Padding keeps the size of the image unless the layer is `valid`."""

    channels: int
    kernel: tuple[int, int] = (1, 1)
    stride: int = 1
    valid: bool = False


def _halving(channels: int) -> _Layer:
    return _Layer(channels, (3, 3), stride=2, valid=True)


def _append_inception(builder: GraphBuilder, input_shape: Shape) -> None:
    data = _Features(builder.input("data", input_shape), input_shape[1])
    data = _chain(builder, "stem0", data, _halving(32), _Layer(32, (3, 3), valid=True), _Layer(64, (3, 3)))
    data = _max_pool(builder, "stem0.pool", data)
    data = _chain(builder, "stem1", data, _Layer(80), _Layer(192, (3, 3), valid=True))
    data = _max_pool(builder, "stem1.pool", data)
    for index, pool_channels in enumerate((32, 64, 64)):
        data = _block_a(builder, f"a{index}", data, pool_channels)
    data = _block_b(builder, "b", data)
    for index, channels in enumerate((128, 160, 160, 192)):
        data = _block_c(builder, f"c{index}", data, channels)
    data = _block_d(builder, "d", data)
    for index in range(2):
        data = _block_e(builder, f"e{index}", data)
    append_pooled_logits(builder, data.tensor, channels=data.channels)


def _block_a(builder: GraphBuilder, name: str, data: _Features, pool_channels: int) -> _Features:
    """Figure 5 of the paper, with one 5×5 kernel kept."""
    branches = {
        "one": [_Layer(64)],
        "five": [_Layer(48), _Layer(64, (5, 5))],
        "three": [_Layer(64), _Layer(96, (3, 3)), _Layer(96, (3, 3))],
    }
    chains = _chains(builder, name, data, branches)
    return _concat(builder, name, *chains, _pool_chain(builder, f"{name}.pool", data, _Layer(pool_channels)))


def _block_b(builder: GraphBuilder, name: str, data: _Features) -> _Features:
    """Halves height and width, as in figure 10."""
    branches = {"three": [_halving(384)], "double": [_Layer(64), _Layer(96, (3, 3)), _halving(96)]}
    return _concat(builder, name, *_chains(builder, name, data, branches), _max_pool(builder, f"{name}.pool", data))


def _block_c(builder: GraphBuilder, name: str, data: _Features, channels: int) -> _Features:
    """Figure 6: 7×7 kernels as rows and columns."""
    row, column = _Layer(channels, (1, 7)), _Layer(channels, (7, 1))
    branches = {
        "one": [_Layer(192)],
        "seven": [_Layer(channels), row, _Layer(192, (7, 1))],
        "double": [_Layer(channels), column, row, column, _Layer(192, (1, 7))],
    }
    chains = _chains(builder, name, data, branches)
    return _concat(builder, name, *chains, _pool_chain(builder, f"{name}.pool", data, _Layer(192)))


def _block_d(builder: GraphBuilder, name: str, data: _Features) -> _Features:
    """Halves height and width."""
    seven = [_Layer(192), _Layer(192, (1, 7)), _Layer(192, (7, 1)), _halving(192)]
    chains = _chains(builder, name, data, {"three": [_Layer(192), _halving(320)], "seven": seven})
    return _concat(builder, name, *chains, _max_pool(builder, f"{name}.pool", data))


def _block_e(builder: GraphBuilder, name: str, data: _Features) -> _Features:
    """Figure 7: rows and columns side by side."""
    branches = {"three": [_Layer(384)], "double": [_Layer(448), _Layer(384, (3, 3))]}
    wide = _chains(builder, name, data, branches)
    one = _chain(builder, f"{name}.one", data, _Layer(320))
    sides = {"row": [_Layer(384, (1, 3))], "column": [_Layer(384, (3, 1))]}
    chains = [chain for branch in wide for chain in _chains(builder, branch.tensor, branch, sides)]
    return _concat(builder, name, one, *chains, _pool_chain(builder, f"{name}.pool", data, _Layer(192)))


def _chains(builder: GraphBuilder, name: str, data: _Features, branches: dict[str, list[_Layer]]) -> list[_Features]:
    return [_chain(builder, f"{name}.{branch}", data, *layers) for branch, layers in branches.items()]


def _chain(builder: GraphBuilder, name: str, data: _Features, *layers: _Layer) -> _Features:
    tensor, in_channels = data
    for index, (channels, kernel, stride, valid) in enumerate(layers):
        padding = 0 if valid else (kernel[0] // 2, kernel[1] // 2)
        shape = (channels, in_channels, *kernel)
        tensor = builder.conv(f"{name}.conv{index}", tensor, shape, stride=stride, padding=padding)
        tensor = builder.batch_norm(f"{name}.bn{index}", tensor, channels, gain=1)
        tensor = builder.relu(f"{name}.relu{index}", tensor)
        in_channels = channels
    return _Features(tensor, in_channels)


def _pool_chain(builder: GraphBuilder, name: str, data: _Features, layer: _Layer) -> _Features:
    """Means over 3×3 pixels, where those beyond the edge count as zeros, and a convolution."""
    mean = builder.pool("AveragePool", name, data.tensor, (3, 3), padding=1, count_include_pad=1)
    return _chain(builder, name, data._replace(tensor=mean), layer)


def _max_pool(builder: GraphBuilder, name: str, data: _Features) -> _Features:
    return data._replace(tensor=builder.pool("MaxPool", name, data.tensor, (3, 3), stride=2))


def _concat(builder: GraphBuilder, name: str, *parts: _Features) -> _Features:
    tensor = builder.node("Concat", name, *(part.tensor for part in parts), axis=1)
    return _Features(tensor, sum(part.channels for part in parts))


NETWORKS = {
    **{f"resnet-{depth}": image_classifier(f"resnet-{depth}", partial(_append_resnet, depth)) for depth in BLOCKS}
    | {
        f"resnet3d-{depth}": image_classifier(
            f"resnet3d-{depth}",
            partial(_append_resnet, depth, stem_stride=(1, 2, 2), num_classes=NUM_VIDEO_CLASSES),
            image=(3, 16, 112, 112),
            num_classes=NUM_VIDEO_CLASSES,
        )
        for depth in (18, 34, 50)
    },
    **{
        f"vgg-{depth}": image_classifier(f"vgg-{depth}", partial(_append_vgg, convolutions))
        for depth, convolutions in CONVOLUTIONS.items()
    },
    "squeezenet_v1.1": image_classifier("squeezenet_v1.1", _append_squeezenet),
    "mobilenet": image_classifier("mobilenet", _append_mobilenet),
    "mobilenet_v2": image_classifier("mobilenet_v2", _append_mobilenet_v2),
    "densenet-121": image_classifier("densenet-121", _append_densenet),
    "inception_v3": image_classifier("inception_v3", _append_inception, image=(3, 299, 299), min_size=75),
}
