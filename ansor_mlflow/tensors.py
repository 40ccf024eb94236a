"""Names, shapes and dtypes of a network's inputs and outputs, and seeded values for them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Arrays = dict[str, npt.NDArray[Any]]
"""Values of a network's inputs or outputs by their names."""


OPEN = -1
"""A dimension of an output that depends on the values of the inputs, as MLflow's signatures write it."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's name, shape and NumPy dtype name such as "float32"."""

    name: str
    shape: tuple[int, ...]
    """Static; an output may have dimensions that are `OPEN`."""
    dtype: str

    @staticmethod
    def from_dict(fields: dict[str, Any]) -> TensorSpec:
        """Reads the fields as JSON keeps them, with the shape as a list."""
        return TensorSpec(name=fields["name"], shape=tuple(fields["shape"]), dtype=fields["dtype"])


def random_inputs(specs: Iterable[TensorSpec], seed: int) -> Arrays:
    """Seeded values for every tensor: standard normal floats, booleans, and integers that are 0 or 1.

    Integers may be indices into a table, whose size is not known here; every table has two rows.
    """
    rng = np.random.default_rng(seed)
    inputs: Arrays = {}
    for spec in specs:
        kind = np.dtype(spec.dtype).kind
        values = rng.integers(0, 2, spec.shape) if kind in "iub" else rng.standard_normal(spec.shape)
        inputs[spec.name] = np.asarray(values, spec.dtype)
    return inputs
