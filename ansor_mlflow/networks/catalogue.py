"""The sizes of the built-in networks, counted beforehand: lowering them all takes minutes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources


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
