"""The built-in networks by name, and their sizes. A new family is a module with `NETWORKS`, and a line here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

import onnx

from ansor_mlflow.errors import UserInputError
from ansor_mlflow.networks import operators
from ansor_mlflow.networks.families import convolutional, dense
from ansor_mlflow.networks.graph import BuiltinNetwork
from ansor_mlflow.networks.shapes import resolve_shapes
from ansor_mlflow.plugins import PluginTable

BUILTIN_NETWORKS: PluginTable[BuiltinNetwork] = PluginTable(
    "networks",
    {
        **convolutional.NETWORKS,
        **dense.NETWORKS,
        **operators.NETWORKS,
    },
    lambda found: isinstance(found, BuiltinNetwork),
)


def build_builtin(
    name: str, *, batch_size: int, input_shapes: Mapping[str, Sequence[int]], seed: int
) -> onnx.ModelProto:
    """Generates a network of `BUILTIN_NETWORKS`."""
    network = BUILTIN_NETWORKS[name]
    shapes = resolve_shapes(name, network.default_shapes(batch_size), input_shapes)
    for input_name in input_shapes:
        if batch_size not in (1, shapes[input_name][0]):
            raise UserInputError(
                f"batch_size={batch_size}, but input_shapes gives {input_name!r} of {name} "
                f"{list(shapes[input_name])}; leave one of them out"
            )
    return network.build(shapes, seed)


@dataclass(frozen=True)
class NetworkSize:
    """How large a built-in network is with its default inputs."""

    inputs: dict[str, list[int]]
    """Shapes of the inputs by name."""
    parameters: int
    """Trained values; statistics of batch normalisations do not count."""
    flops: float
    """Floating point operations of all tasks; a multiplication and an addition are two."""
    tasks: int
    """Number of tasks, lowered with the default layout."""


def read_catalogue() -> dict[str, NetworkSize]:
    """The sizes by name, from the file that `benchmarks/zoo.py --catalogue` writes."""
    text = resources.files(__package__).joinpath("catalogue.json").read_text()
    return {name: NetworkSize(**fields) for name, fields in json.loads(text).items()}
