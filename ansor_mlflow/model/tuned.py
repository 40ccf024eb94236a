"""A loaded model: checks inputs, runs the library, returns arrays."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ansor_mlflow.device import HugePages
from ansor_mlflow.errors import UserInputError
from ansor_mlflow.model.choice import Choice
from ansor_mlflow.model.manifest import LibraryEntry
from ansor_mlflow.model.sizes import SizeChoice
from ansor_mlflow.model.virtual_machines import VirtualMachines
from ansor_mlflow.tensors import OPEN, Arrays, NetworkShapes, Padded, all_sizes


class TunedModel:
    """A compiled network in memory. Safe to call from several threads; see `VirtualMachines`."""

    def __init__(
        self,
        library: Path,
        network: Padded,
        choice: Choice,
        *,
        num_threads: int,
        device: str = "cpu",
        huge_pages: bool = True,
    ) -> None:
        self.inputs = network.inputs
        """The inputs; dimensions of several sizes are `OPEN`."""
        self.outputs = network.outputs
        self.sizes: tuple[NetworkShapes, ...] = all_sizes(network)
        """What it was compiled for."""
        self.choice = choice
        self._dtypes = {spec.name: np.dtype(spec.dtype) for spec in self.inputs}
        self._size_choice = SizeChoice(self.sizes, network.pad)
        self._machines = VirtualMachines(
            library, self.sizes, choice.entry.parts, num_threads, device, huge_pages=huge_pages
        )

    @property
    def entry(self) -> LibraryEntry:
        """The library that was loaded."""
        return self.choice.entry

    @property
    def huge_pages(self) -> HugePages:
        """The memory of weights, and after a call of activations, that is in huge pages."""
        return self._machines.huge_pages

    def run(self, inputs: Mapping[str, npt.ArrayLike]) -> Arrays:
        """Runs the network once.

        Args:
            inputs: An array for each input, of exactly its dtype, and of exactly its shape in one of the sizes, but for
                those that are padded.

        Returns:
            The outputs by name; the arrays belong to the caller.

        Raises:
            UserInputError: A name, a shape or a dtype is not as the network expects.
        """
        arrays = self._checked(inputs)
        size, padded = self._size_choice.choose(arrays)
        outputs = self._size_choice.cropped(self._machines.run(padded, size), arrays, size)
        return {spec.name: array for spec, array in zip(self.outputs, outputs, strict=True)}

    def seconds_of_parts(self, inputs: Mapping[str, npt.ArrayLike]) -> list[float]:
        """How long each part of the network takes in a call, in the order of `entry.parts`."""
        size, padded = self._size_choice.choose(self._checked(inputs))
        return self._machines.seconds_of_parts(padded, size)

    def seconds_of_kernels(self, inputs: Mapping[str, npt.ArrayLike]) -> list[tuple[str, float]]:
        """The names of the library's functions that a call runs, TVM's own among them, and how long each takes."""
        size, padded = self._size_choice.choose(self._checked(inputs))
        return self._machines.seconds_of_kernels(padded, size)

    def _checked(self, inputs: Mapping[str, npt.ArrayLike]) -> list[npt.NDArray[Any]]:
        if not isinstance(inputs, Mapping):
            raise UserInputError(f"inputs are of the type {type(inputs).__name__}: give {self._expected()}, by name")
        if inputs.keys() != self._dtypes.keys():
            raise UserInputError(f"inputs {sorted(map(str, inputs))}: the model expects {self._expected()}")
        arrays = []
        for spec in self.inputs:
            array = np.asarray(inputs[spec.name])
            if array.dtype != self._dtypes[spec.name] or not _fits(array.shape, spec.shape):
                given = f"{array.dtype} {array.shape}"
                raise UserInputError(f"input {spec.name!r} is {given}: the model expects {self._expected()}")
            arrays.append(array)
        return arrays

    def _expected(self) -> str:
        return ", ".join(f"{spec.name!r}: {spec.dtype} {spec.shape}" for spec in self.inputs)


def _fits(given: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return given == shape or (
        len(given) == len(shape) and all(dim in (size, OPEN) for size, dim in zip(given, shape, strict=True))
    )
