"""Which of a network's sizes a call is for, and how its inputs are padded to it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ansor_mlflow.errors import UserInputError
from ansor_mlflow.tensors import NetworkShapes, Sized, TensorSpec

Array = npt.NDArray[Any]
Place = tuple[int, int]
"""An input and one of its dimensions."""


class SizeChoice:
    """Takes the smallest size that fits. Only inputs with a value to pad with may be smaller than a size's."""

    def __init__(self, sizes: Sequence[NetworkShapes], pad: Mapping[str, float]) -> None:
        self._sizes = sizes
        self._shapes = [tuple(spec.shape for spec in size.inputs) for size in sizes]
        self._from_small_to_large = sorted(range(len(sizes)), key=lambda number: _num_elements(self._shapes[number]))
        self._pad = [pad.get(spec.name) for spec in sizes[0].inputs]
        self._followed = [
            {axis: place for axis in range(len(spec.shape)) if (place := self._place_followed(number, axis))}
            for number, spec in enumerate(sizes[0].outputs)
        ]

    def choose(self, arrays: Sequence[Array]) -> tuple[int, list[Array]]:
        """The size for some inputs, and the inputs with its shapes.

        Raises:
            UserInputError: They fit none.
        """
        given = tuple(array.shape for array in arrays)
        if given in self._shapes:
            return self._shapes.index(given), list(arrays)
        for number in self._from_small_to_large:
            shapes = self._shapes[number]
            if all(map(_fits, given, shapes, self._pad)):
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

    def _message(self, given: tuple[tuple[int, ...], ...]) -> str:
        specs = self._sizes[0].inputs
        inputs = tuple(TensorSpec(spec.name, shape, spec.dtype) for spec, shape in zip(specs, given, strict=True))
        padded = [spec.name for spec, value in zip(specs, self._pad, strict=True) if value is not None]
        rule = f"it pads {', '.join(padded)} alone" if padded else "pad them to one of these, or compile it with pad"
        sizes = "; ".join(map(str, self._sizes))
        return f"inputs {NetworkShapes(inputs, ())}: the model was compiled for {sizes}; {rule}"


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


def _num_elements(shapes: tuple[tuple[int, ...], ...]) -> int:
    return sum(map(math.prod, shapes))


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
