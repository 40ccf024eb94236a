"""ResNet-18/34/50/101/152 ("Deep Residual Learning for Image Recognition", He et al., 2015, table 1).

The stride of a bottleneck block sits on its 3×3 convolution (the "v1.5" of most frameworks). The graph ends in logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import onnx

from ansor_mlflow.errors import UserInputError
from ansor_mlflow.networks.family import BuiltinNetwork
from ansor_mlflow.networks.graph import GraphBuilder
from ansor_mlflow.networks.shapes import Shape

STAGE_CHANNELS = (64, 128, 256, 512)
NUM_CLASSES = 1000
MIN_IMAGE_SIZE = 32


@dataclass(frozen=True)
class _Variant:
    blocks: tuple[int, int, int, int]
    bottleneck: bool

    @property
    def expansion(self) -> int:
        return 4 if self.bottleneck else 1


VARIANTS = {
    18: _Variant((2, 2, 2, 2), bottleneck=False),
    34: _Variant((3, 4, 6, 3), bottleneck=False),
    50: _Variant((3, 4, 6, 3), bottleneck=True),
    101: _Variant((3, 4, 23, 3), bottleneck=True),
    152: _Variant((3, 8, 36, 3), bottleneck=True),
}


def build_resnet(depth: int, *, input_shape: tuple[int, ...], seed: int) -> onnx.ModelProto:
    """Generates a ResNet as ONNX.

    Args:
        depth: One of 18, 34, 50, 101, 152.
        input_shape: Shape of the input "data", (N, 3, H, W) with H and W at least 32.
        seed: Seed of the weights.

    Returns:
        A model with input "data", float32 (N, 3, H, W), and output "logits", float32 (N, 1000).
    """
    variant = VARIANTS[depth]
    builder = GraphBuilder(seed)
    data = builder.input("data", input_shape)
    data = builder.conv("stem.conv", data, (64, 3, 7, 7), stride=2, padding=3)
    data = builder.relu("stem.relu", builder.batch_norm("stem.bn", data, 64))
    data = builder.node("MaxPool", "stem.pool", data, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    in_channels = 64
    for stage, (channels, num_blocks) in enumerate(zip(STAGE_CHANNELS, variant.blocks, strict=True)):
        for block in range(num_blocks):
            stride = 2 if block == 0 and stage > 0 else 1
            data = _residual_block(builder, f"stage{stage}.block{block}", data, variant, in_channels, channels, stride)
            in_channels = channels * variant.expansion
    data = builder.node("GlobalAveragePool", "head.pool", data)
    data = builder.node("Flatten", "head.flatten", data, axis=1)
    builder.dense("logits", data, units=NUM_CLASSES, in_units=in_channels)
    return builder.build(f"resnet-{depth}", {"logits": (input_shape[0], NUM_CLASSES)})


def _residual_block(
    builder: GraphBuilder, name: str, data: str, variant: _Variant, in_channels: int, channels: int, stride: int
) -> str:
    """Two 3×3 convolutions, or 1×1, 3×3, 1×1 for a bottleneck, added to the (projected) input."""
    out_channels = channels * variant.expansion
    if variant.bottleneck:
        layers = [(channels, 1, 1), (channels, 3, stride), (out_channels, 1, 1)]
    else:
        layers = [(channels, 3, stride), (channels, 3, 1)]
    branch, branch_channels = data, in_channels
    for index, (layer_channels, kernel, layer_stride) in enumerate(layers):
        shape = (layer_channels, branch_channels, kernel, kernel)
        branch = builder.conv(f"{name}.conv{index}", branch, shape, stride=layer_stride, padding=kernel // 2)
        branch = builder.batch_norm(f"{name}.bn{index}", branch, layer_channels)
        if index < len(layers) - 1:
            branch = builder.relu(f"{name}.relu{index}", branch)
        branch_channels = layer_channels
    if stride != 1 or in_channels != out_channels:
        data = builder.conv(f"{name}.projection", data, (out_channels, in_channels, 1, 1), stride=stride)
        data = builder.batch_norm(f"{name}.projection.bn", data, out_channels)
    return builder.relu(f"{name}.relu", builder.node("Add", f"{name}.add", branch, data))


def _default_shapes(batch_size: int) -> dict[str, Shape]:
    return {"data": (batch_size, 3, 224, 224)}


def _build(depth: int, input_shapes: dict[str, Shape], seed: int) -> onnx.ModelProto:
    shape = input_shapes["data"]
    if shape[1] != 3 or min(shape[2:]) < MIN_IMAGE_SIZE:
        raise UserInputError(
            f"input_shapes gives 'data' of resnet-{depth} {list(shape)}; it must be [N, 3, H, W] with H and W at least "
            f"{MIN_IMAGE_SIZE}"
        )
    return build_resnet(depth, input_shape=shape, seed=seed)


NETWORKS = {
    f"resnet-{depth}": BuiltinNetwork(default_shapes=_default_shapes, build=partial(_build, depth))
    for depth in VARIANTS
}
