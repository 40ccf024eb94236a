"""The multilayer perceptron of TVM's `relay.testing.mlp` (TVM 0.18): 784 → 128 → 64 → 10, for the digits of MNIST.

The graph ends in logits.
"""

from __future__ import annotations

import math

from ansor_mlflow.networks.families.family import image_classifier
from ansor_mlflow.networks.graph import GraphBuilder
from ansor_mlflow.networks.shapes import Shape

HIDDEN_UNITS = (128, 64)
NUM_CLASSES = 10


def _append_mlp(builder: GraphBuilder, input_shape: Shape) -> None:
    """The first layer takes all pixels there are, 784 of 28×28."""
    data = builder.node("Flatten", "flatten", builder.input("data", input_shape), axis=1)
    in_units = math.prod(input_shape[1:])
    for index, units in enumerate(HIDDEN_UNITS):
        data = builder.relu(f"relu{index}", builder.dense(f"dense{index}", data, units=units, in_units=in_units))
        in_units = units
    builder.dense("logits", data, units=NUM_CLASSES, in_units=in_units)


NETWORKS = {"mlp": image_classifier("mlp", _append_mlp, image=(1, 28, 28), min_size=1, num_classes=NUM_CLASSES)}
