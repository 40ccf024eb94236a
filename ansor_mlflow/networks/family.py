"""What a family of built-in networks declares about each of its members."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import onnx

from ansor_mlflow.networks.shapes import Shape


@dataclass(frozen=True, kw_only=True)
class BuiltinNetwork:
    """A network that is generated, with weights drawn from a seed."""

    default_shapes: Callable[[int], dict[str, Shape]]
    """Takes a batch size, returns the shape of every input."""
    build: Callable[[dict[str, Shape], int], onnx.ModelProto]
    """Takes the shape of every input and a seed. Raises UserInputError for sizes that the network cannot take."""
