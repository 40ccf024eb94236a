"""A compiled network in memory: which of its sizes a call is for, and how its inputs are padded to it."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ansor_mlflow.device import CPU, HugePages, Platform
from ansor_mlflow.errors import UserInputError
from ansor_mlflow.model.choice import Choice
from ansor_mlflow.model.manifest import LibraryEntry
from ansor_mlflow.model.parts import has_library
from ansor_mlflow.model.sessions import Sessions
from ansor_mlflow.model.virtual_machines import VirtualMachines
from ansor_mlflow.tensors import Arrays, NetworkShapes, Padded, Sized, TensorSpec, all_sizes

Array = npt.NDArray[Any]
Place = tuple[int, int]  # an input and one of its dimensions
_log = logging.getLogger("ansor_mlflow")


class TunedModel:
    """A compiled network in memory. Safe to call from several threads; see `VirtualMachines`."""

    def __init__(
        self,
        library: Path,
        network: Padded,
        choice: Choice,
        *,
        num_threads: int,
        platform: Platform = CPU,
        huge_pages: bool = True,
    ) -> None:
        self.inputs = network.inputs  # the inputs; dimensions of several sizes are `OPEN`
        self.outputs = network.outputs
        self.sizes: tuple[NetworkShapes, ...] = all_sizes(network)  # what it was compiled for
        self.choice = choice
        self.described_sizes = describe_sizes(network)  # the sizes in words; empty where there is one
        self._dtypes = {spec.name: np.dtype(spec.dtype) for spec in self.inputs}
        self._first = [(spec.name, spec.shape, self._dtypes[spec.name]) for spec in self.sizes[0].inputs]
        self._names = [spec.name for spec in self.outputs]
        self._size_choice = SizeChoice(self.sizes, network.pad)
        parts = choice.entry.parts
        self._machines: VirtualMachines | Sessions
        self._whole: Callable[[Sequence[str], Mapping[str, Array]], list[Array]] | None = None
        if has_library(parts):
            self._machines = VirtualMachines(library, self.sizes, parts, num_threads, platform, huge_pages=huge_pages)
        else:
            self._machines = Sessions(library.parent, parts, num_threads)
            self._whole = self._machines.whole

    @property
    def entry(self) -> LibraryEntry:
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
        if self._whole is not None and type(inputs) is dict:
            try:
                return dict(zip(self._names, self._whole(self._names, inputs), strict=True))
            except Exception:  # noqa: BLE001 - another runtime's, of any class; what is wrong is said below
                _log.debug("an error of another runtime", exc_info=True)
        if (exact := self._exact(inputs)) is not None:
            return dict(zip(self._names, self._machines.run(exact), strict=True))
        arrays = self._checked(inputs)
        size, padded = self._size_choice.choose(arrays)
        outputs = self._size_choice.cropped(self._machines.run(padded, size), arrays, size)
        return dict(zip(self._names, outputs, strict=True))

    def _exact(self, inputs: Any) -> list[Array] | None:
        """The arrays of inputs that are exactly those of the first size, which takes a few hundred nanoseconds to know;
        None of any others.
        """
        if type(inputs) is not dict or len(inputs) != len(self._first):
            return None
        arrays = []
        for name, shape, dtype in self._first:
            array = inputs.get(name)
            if type(array) is not np.ndarray or array.shape != shape or array.dtype != dtype:
                return None
            arrays.append(array)
        return arrays

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
            if array.dtype != self._dtypes[spec.name] or not spec.takes(array.shape):
                given = f"{array.dtype} {array.shape}"
                raise UserInputError(f"input {spec.name!r} is {given}: the model expects {self._expected()}")
            arrays.append(array)
        return arrays

    def _expected(self) -> str:
        return ", ".join(f"{spec.name!r}: {spec.dtype} {spec.shape}" for spec in self.inputs)


class SizeChoice:
    """Takes the smallest size that fits. Only inputs with a value to pad with may be smaller than a size's.

    The first request that is padded to a size is logged, with how much of what is computed is padding.
    """

    def __init__(self, sizes: Sequence[NetworkShapes], pad: Mapping[str, float]) -> None:
        self._sizes = sizes
        self._shapes = [tuple(spec.shape for spec in size.inputs) for size in sizes]
        num_elements = [sum(map(math.prod, shapes)) for shapes in self._shapes]
        self._from_small_to_large = sorted(range(len(sizes)), key=num_elements.__getitem__)
        self._pad = [pad.get(spec.name) for spec in sizes[0].inputs]
        self._logged: set[int] = set()
        self._followed = [
            {axis: place for axis in range(len(spec.shape)) if (place := self._place_followed(number, axis))}
            for number, spec in enumerate(sizes[0].outputs)
        ]

    def choose(self, arrays: Sequence[Array]) -> tuple[int, list[Array]]:
        """The size for some inputs, and the inputs with its shapes."""
        given = tuple(array.shape for array in arrays)
        if given in self._shapes:
            return self._shapes.index(given), list(arrays)
        for number in self._from_small_to_large:
            shapes = self._shapes[number]
            if all(map(_fits, given, shapes, self._pad)):
                if number not in self._logged:
                    self._logged.add(number)
                    self._log_padding(given, number)
                return number, [_padded(*pair) for pair in zip(arrays, shapes, self._pad, strict=True)]
        raise UserInputError(self._message(given))

    def cropped(self, outputs: Sequence[Array], arrays: Sequence[Array], size: int) -> list[Array]:
        """Outputs without what stands for padding: along dimensions that have the size of one of an input's."""
        if tuple(array.shape for array in arrays) == self._shapes[size]:
            return list(outputs)
        cropped = []
        for array, followed in zip(outputs, self._followed, strict=True):
            ends = {axis: arrays[number].shape[place] for axis, (number, place) in followed.items()}
            cropped.append(array[tuple(slice(ends.get(axis)) for axis in range(array.ndim))])
        return cropped

    def _place_followed(self, output: int, axis: int) -> Place | None:
        """Where an input is always as large as an output along a dimension; at the same place, if there are several."""
        sizes = [size.outputs[output].shape[axis] for size in self._sizes]
        places = [
            (number, place)
            for number, spec in enumerate(self._sizes[0].inputs)
            for place in range(len(spec.shape))
            if len(set(sizes)) > 1 and sizes == [size.inputs[number].shape[place] for size in self._sizes]
        ]
        return min(places, key=lambda place: place[1] != axis, default=None)

    def __str__(self) -> str:
        padded = ", ".join(self._padded)
        return f"{self._all}; what is between them is {f'padded ({padded})' if padded else 'refused, for want of pad'}"

    @property
    def _all(self) -> str:
        """The sizes; those of inputs that always have the same shape in one line: "ids, mask 1×16, 1×32"."""
        differing = _open_names(self._sizes)
        shapes = [{spec.shape for spec in size.inputs if spec.name in differing} for size in self._sizes]
        if any(len(of_size) != 1 for of_size in shapes):
            return "; ".join(map(str, self._sizes))
        return f"{', '.join(differing)} {', '.join('×'.join(map(str, shape)) for (shape,) in shapes)}"

    @property
    def _padded(self) -> list[str]:
        return [spec.name for spec, value in zip(self._sizes[0].inputs, self._pad, strict=True) if value is not None]

    def _log_padding(self, given: tuple[tuple[int, ...], ...], size: int) -> None:
        share = 1 - sum(map(math.prod, given)) / sum(map(math.prod, self._shapes[size]))
        _log.info("inputs %s are padded to %s: %.0f %% is padding", self._named(given), self._sizes[size], share * 100)

    def _named(self, given: tuple[tuple[int, ...], ...]) -> NetworkShapes:
        specs = zip(self._sizes[0].inputs, given, strict=True)
        return NetworkShapes(tuple(TensorSpec(spec.name, shape, spec.dtype) for spec, shape in specs), ())

    def _message(self, given: tuple[tuple[int, ...], ...]) -> str:
        differing = [name for name in _open_names(self._sizes) if name not in self._padded]
        if not self._padded:
            example = json.dumps(dict.fromkeys(differing, 0))
            rule = f"pad them to one of these, or compile it with pad, such as {example}"
        elif differing:
            rule = f"it pads {', '.join(self._padded)} alone, and not {', '.join(differing)}"
        else:
            rule = "it pads inputs to the next of these, and none is as large; tune it with a larger one"
        return f"inputs {self._named(given)}: the model was compiled for {self._all}; {rule}"


def describe_sizes(network: Padded) -> str:
    """Which sizes a network has, and whether what is between them is padded; empty where it has one."""
    return str(SizeChoice(network.sizes, network.pad)) if network.sizes else ""


def _open_names(sizes: Sequence[NetworkShapes]) -> list[str]:
    """The inputs that are not the same in all sizes of a network."""
    return [same[0].name for same in zip(*(size.inputs for size in sizes), strict=True) if len(set(same)) > 1]


def require_pad(pad: Mapping[str, float], called: str, network: Sized) -> None:
    """Checks that a network has several sizes and the inputs that are to be padded; else it is a `UserInputError`."""
    if not pad:
        return
    if not network.sizes:
        raise UserInputError(
            f"pad={json.dumps(dict(pad))}, but {called} has one size; give several in input_shapes when it is tuned: "
            '{"ids": [1, [32, 128]]}'
        )
    names = [spec.name for spec in network.inputs]
    if unknown := [name for name in pad if name not in names]:
        raise UserInputError(
            f"pad names {unknown[0]!r}, which is not an input of {called}; its inputs are {', '.join(names)}"
        )


def _fits(given: tuple[int, ...], shape: tuple[int, ...], pad: float | None) -> bool:
    if pad is None:
        return given == shape
    return len(given) == len(shape) and all(size <= limit for size, limit in zip(given, shape, strict=True))


def _padded(array: Array, shape: tuple[int, ...], value: float | None) -> Array:
    if array.shape == shape:
        return array
    padded = np.full(shape, value, array.dtype)
    padded[tuple(map(slice, array.shape))] = array
    return padded
