"""DenseNet-121 ("Densely Connected Convolutional Networks", Huang et al., 2017, table 1). The graph ends in logits."""

from __future__ import annotations

from ansor_mlflow.networks.families.family import append_pooled_logits, image_classifier
from ansor_mlflow.networks.graph import GraphBuilder
from ansor_mlflow.networks.shapes import Shape

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


NETWORKS = {"densenet-121": image_classifier("densenet-121", _append_densenet)}
