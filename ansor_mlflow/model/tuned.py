"""A loaded model: checks inputs, runs the library, returns arrays."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ansor_mlflow.errors import UserInputError
from ansor_mlflow.model.choice import Choice
from ansor_mlflow.model.manifest import LibraryEntry
from ansor_mlflow.model.virtual_machines import VirtualMachines
from ansor_mlflow.tensors import Arrays, TensorSpec


class TunedModel:
    """A compiled network in memory. Safe to call from several threads; see `VirtualMachines`.

    Args:
        library: The shared library, whose digest was checked.
        inputs: The network's inputs, in the order of the function's parameters.
        outputs: The network's outputs, in order.
        choice: Which library it is, and why.
        num_threads: Threads that kernels run on.
        device: Where the library runs: cpu or cuda.
    """

    def __init__(
        self,
        library: Path,
        inputs: tuple[TensorSpec, ...],
        outputs: tuple[TensorSpec, ...],
        choice: Choice,
        *,
        num_threads: int,
        device: str = "cpu",
    ) -> None:
        self.inputs = inputs
        self.outputs = outputs
        self.choice = choice
        names = [spec.name for spec in outputs]
        self._machines = VirtualMachines(library, inputs, names, choice.entry.parts, num_threads, device)

    @property
    def entry(self) -> LibraryEntry:
        """The library that was loaded."""
        return self.choice.entry

    def run(self, inputs: Mapping[str, npt.ArrayLike]) -> Arrays:
        """Runs the network once.

        Args:
            inputs: An array for each input, of exactly its shape and dtype.

        Returns:
            The outputs by name; the arrays belong to the caller.

        Raises:
            UserInputError: A name, a shape or a dtype is not as the network expects.
        """
        outputs = self._machines.run(self._checked(inputs))
        return {spec.name: array for spec, array in zip(self.outputs, outputs, strict=True)}

    def seconds_of_parts(self, inputs: Mapping[str, npt.ArrayLike]) -> list[float]:
        """How long each part of the network takes in a call, in the order of `entry.parts`.

        Raises:
            UserInputError: See `run`.
        """
        return self._machines.seconds_of_parts(self._checked(inputs))

    def _checked(self, inputs: Mapping[str, npt.ArrayLike]) -> list[npt.NDArray[Any]]:
        names = [spec.name for spec in self.inputs]
        if not isinstance(inputs, Mapping):
            raise UserInputError(f"inputs are of the type {type(inputs).__name__}: give {self._expected()}, by name")
        if set(inputs) != set(names):
            raise UserInputError(f"inputs {sorted(map(str, inputs))}: the model expects {self._expected()}")
        arrays = []
        for spec in self.inputs:
            array = np.asarray(inputs[spec.name])
            if array.shape != spec.shape or array.dtype != spec.dtype:
                given = f"{array.dtype} {array.shape}"
                raise UserInputError(f"input {spec.name!r} is {given}: the model expects {self._expected()}")
            arrays.append(array)
        return arrays

    def _expected(self) -> str:
        return ", ".join(f"{spec.name!r}: {spec.dtype} {spec.shape}" for spec in self.inputs)
