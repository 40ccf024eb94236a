"""What a family of built-in networks declares about each of its members, and what image classifiers have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import onnx

from ansor_mlflow.errors import UserInputError
from ansor_mlflow.networks.graph import GraphBuilder
from ansor_mlflow.networks.shapes import Shape

NUM_CLASSES = 1000
"""Classes of ImageNet."""


@dataclass(frozen=True, kw_only=True)
class BuiltinNetwork:
    """A network that is generated, with weights drawn from a seed."""

    default_shapes: Callable[[int], dict[str, Shape]]
    """Takes a batch size, returns the shape of every input."""
    build: Callable[[dict[str, Shape], int], onnx.ModelProto]
    """Takes the shape of every input and a seed. Raises UserInputError for sizes that the network cannot take."""


def image_classifier(
    name: str,
    append_layers: Callable[[GraphBuilder, Shape], None],
    *,
    image: Shape = (3, 224, 224),
    min_size: int = 32,
    num_classes: int = NUM_CLASSES,
) -> BuiltinNetwork:
    """A network with one input "data", float32 (N, *image), and one output "logits", float32 (N, num_classes).

    `append_layers` declares the input with the shape it is given, and appends all layers up to the logits. A video has
    its number of frames before height and width, of which each is at least `min_size`.
    """

    def build(input_shapes: dict[str, Shape], seed: int) -> onnx.ModelProto:
        shape = input_shapes["data"]
        if shape[1] != image[0] or min(shape[-2:]) < min_size:
            axes = ", ".join("DHW"[-len(shape[2:]) :])
            raise UserInputError(
                f"input_shapes gives 'data' of {name} {list(shape)}; it must be [N, {image[0]}, {axes}] with H and W "
                f"at least {min_size}"
            )
        builder = GraphBuilder(seed)
        append_layers(builder, shape)
        return builder.build(name, {"logits": (shape[0], num_classes)})

    return BuiltinNetwork(default_shapes=lambda batch_size: {"data": (batch_size, *image)}, build=build)


def append_pooled_logits(builder: GraphBuilder, data: str, *, channels: int, num_classes: int = NUM_CLASSES) -> None:
    """Appends the usual end: mean over the image, then a dense layer "logits"; data is (N, channels, ...)."""
    data = builder.node("GlobalAveragePool", "head.pool", data)
    data = builder.node("Flatten", "head.flatten", data, axis=1)
    builder.dense("logits", data, units=num_classes, in_units=channels)
