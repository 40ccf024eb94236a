"""ResNet-18/34/50/101/152 ("Deep Residual Learning for Image Recognition", He et al., 2015, table 1).

The stride of a bottleneck block sits on its 3×3 convolution (the "v1.5" of most frameworks). The graph ends in logits.

ResNet-18/34/50 for video ("Can Spatiotemporal 3D CNNs Retrace the History of 2D CNNs and ImageNet?", Hara et al., 2018,
table 1) have a third axis of their kernels, over frames, whose number the first convolution keeps. Shortcuts that
change the shape are projections ("type B" of https://github.com/kenshohara/3D-ResNets-PyTorch).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ansor_mlflow.networks.families.family import NUM_CLASSES, append_pooled_logits, image_classifier
from ansor_mlflow.networks.graph import GraphBuilder, PerAxis
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


NETWORKS = {
    f"resnet-{depth}": image_classifier(f"resnet-{depth}", partial(_append_resnet, depth)) for depth in BLOCKS
} | {
    f"resnet3d-{depth}": image_classifier(
        f"resnet3d-{depth}",
        partial(_append_resnet, depth, stem_stride=(1, 2, 2), num_classes=NUM_VIDEO_CLASSES),
        image=(3, 16, 112, 112),
        num_classes=NUM_VIDEO_CLASSES,
    )
    for depth in (18, 34, 50)
}
