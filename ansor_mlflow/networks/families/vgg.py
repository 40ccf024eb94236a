"""VGG-11/13/16/19 ("Very Deep Convolutional Networks for Large-Scale Image Recognition", Simonyan and Zisserman, 2014,
table 1, columns A, B, D, E).

Dropout does nothing at inference and is left out. The graph ends in logits.
"""

from __future__ import annotations

from functools import partial

from ansor_mlflow.networks.families.family import NUM_CLASSES, image_classifier
from ansor_mlflow.networks.graph import GraphBuilder
from ansor_mlflow.networks.shapes import Shape

STAGE_CHANNELS = (64, 128, 256, 512, 512)
HIDDEN_UNITS = 4096
CONVOLUTIONS = {
    11: (1, 1, 2, 2, 2),
    13: (2, 2, 2, 2, 2),
    16: (2, 2, 3, 3, 3),
    19: (2, 2, 4, 4, 4),
}
"""3×3 convolutions of each stage, by depth."""


def _append_vgg(convolutions: tuple[int, ...], builder: GraphBuilder, input_shape: Shape) -> None:
    """The first dense layer takes what the five poolings leave of the image, 7×7 of 224×224."""
    data = builder.input("data", input_shape)
    in_channels = 3
    for stage, (channels, num_convolutions) in enumerate(zip(STAGE_CHANNELS, convolutions, strict=True)):
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


NETWORKS = {
    f"vgg-{depth}": image_classifier(f"vgg-{depth}", partial(_append_vgg, convolutions))
    for depth, convolutions in CONVOLUTIONS.items()
}
