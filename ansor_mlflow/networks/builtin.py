"""The built-in networks by name. A new family is a module with a `NETWORKS` of its own and a line here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx

from ansor_mlflow.errors import UserInputError
from ansor_mlflow.networks import operators
from ansor_mlflow.networks.families import bert, densenet, inception, mlp, mobilenet, resnet, resnet3d, squeezenet, vgg
from ansor_mlflow.networks.families.family import BuiltinNetwork
from ansor_mlflow.networks.shapes import resolve_shapes

BUILTIN_NETWORKS: dict[str, BuiltinNetwork] = {
    **resnet.NETWORKS,
    **resnet3d.NETWORKS,
    **vgg.NETWORKS,
    **mobilenet.NETWORKS,
    **squeezenet.NETWORKS,
    **inception.NETWORKS,
    **densenet.NETWORKS,
    **mlp.NETWORKS,
    **bert.NETWORKS,
    **operators.NETWORKS,
}


def build_builtin(
    name: str, *, batch_size: int, input_shapes: Mapping[str, Sequence[int]], seed: int
) -> onnx.ModelProto:
    """Generates the built-in network `name`.

    Args:
        name: A key of `BUILTIN_NETWORKS`.
        batch_size: First dimension of the default input shapes.
        input_shapes: Shapes that replace default ones.
        seed: Seed of the weights.

    Raises:
        UserInputError: The network cannot take the shapes, or they contradict `batch_size`.
    """
    network = BUILTIN_NETWORKS[name]
    shapes = resolve_shapes(name, network.default_shapes(batch_size), input_shapes)
    for input_name in input_shapes:
        if batch_size not in (1, shapes[input_name][0]):
            raise UserInputError(
                f"batch_size={batch_size}, but input_shapes gives {input_name!r} of {name} "
                f"{list(shapes[input_name])}; leave one of them out"
            )
    return network.build(shapes, seed)
