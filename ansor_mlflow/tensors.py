"""Names, shapes and dtypes of a network's inputs and outputs, and values for them: seeded, or in a table's cells."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ansor_mlflow.errors import UserInputError

Arrays = dict[str, npt.NDArray[Any]]  # values of a network's inputs or outputs by their names
OPEN = -1  # A dimension that has several sizes, or, of an output, depends on values; as MLflow's signatures write it


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's name, shape and NumPy dtype name such as "float32"."""

    name: str
    shape: tuple[int, ...]  # static, but for dimensions that are `OPEN`
    dtype: str

    def takes(self, shape: tuple[int, ...]) -> bool:
        """Whether an array of a shape is such a tensor."""
        return shape == self.shape or (  # which it mostly is, and this is part of each call of a model
            len(shape) == len(self.shape)
            and all(dim in (size, OPEN) for size, dim in zip(shape, self.shape, strict=True))
        )


@dataclass(frozen=True)
class NetworkShapes:
    """Inputs and outputs of a network in one of its sizes; also of a network that has no other size."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    @property
    def sizes(self) -> tuple[NetworkShapes, ...]:
        return ()

    @property
    def pad(self) -> Mapping[str, float]:
        return {}

    def __str__(self) -> str:
        return ", ".join(f"{spec.name} {'×'.join(map(str, spec.shape)) or 'scalar'}" for spec in self.inputs)


class Sized(Protocol):
    """What describes a network: with no sizes where it has but one; else dimensions that differ in them are `OPEN`."""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]: ...
    @property
    def outputs(self) -> tuple[TensorSpec, ...]: ...
    @property
    def sizes(self) -> tuple[NetworkShapes, ...]: ...


class Padded(Sized, Protocol):
    """What describes a network whose inputs may be padded to the next larger size, with a value by their names."""

    @property
    def pad(self) -> Mapping[str, float]: ...


def all_sizes(network: Sized) -> tuple[NetworkShapes, ...]:
    """The sizes of a network, one at least."""
    return network.sizes or (NetworkShapes(network.inputs, network.outputs),)


def open_where_different(specs: Sequence[tuple[TensorSpec, ...]]) -> tuple[TensorSpec, ...]:
    """The tensors of several sizes of a network, with dimensions open that are not the same in all of them."""
    opened = []
    for same in zip(*specs, strict=True):
        all_dims = zip(*(spec.shape for spec in same), strict=True)
        shape = tuple(dims[0] if len(set(dims)) == 1 else OPEN for dims in all_dims)
        opened.append(TensorSpec(same[0].name, shape, same[0].dtype))
    return tuple(opened)


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


def stack_cells(cells: Iterable[Any], spec: TensorSpec) -> npt.NDArray[Any]:
    """A column of tensors as one array: a row in each cell, or all of the input in a single one. Bytes are those of the
    tensor, little-endian and in C order, and text is their base64.
    """
    cells = list(cells)
    try:
        if cells and all(isinstance(cell, (str, bytes)) for cell in cells):
            rows = np.concatenate([_rows(cell, spec) for cell in cells])
            return rows.reshape(-1, *spec.shape[1:]) if spec.shape else rows.reshape(())
        array = np.stack([_converted(cell, spec) for cell in cells])
    except (ValueError, TypeError, OverflowError) as err:
        raise UserInputError(_rule(spec)) from err
    return array[0] if len(array) == 1 and array.shape[1:] == spec.shape else array


def from_objects(array: npt.NDArray[Any], spec: TensorSpec) -> npt.NDArray[Any]:
    """The tensor in an array of objects, which MLflow makes of JSON without knowing its dtype: numbers, or cells."""
    if array.ndim == 1 and len(array) and isinstance(array[0], (str, bytes, list, np.ndarray)):
        return stack_cells(array, spec)
    try:
        return _converted(array, spec)
    except (ValueError, TypeError, OverflowError) as err:
        raise UserInputError(_rule(spec)) from err


def _converted(values: Any, spec: TensorSpec) -> npt.NDArray[Any]:
    """Numbers in the input's dtype. An integer is not rounded, nor taken modulo the size of its type."""
    if np.dtype(spec.dtype).kind not in "iu":
        return np.asarray(values, dtype=spec.dtype)
    given = np.asarray(values)
    with np.errstate(invalid="ignore"):
        array = given.astype(spec.dtype)
    if not np.array_equal(given, array):
        raise ValueError(f"not all of them are numbers that {spec.dtype} has")
    return array


def _rows(cell: str | bytes, spec: TensorSpec) -> npt.NDArray[Any]:
    if OPEN in spec.shape[1:]:
        raise UserInputError(
            f"column {spec.name!r}: its tensors have several sizes, which bytes do not tell; give lists"
        )
    try:
        data = base64.b64decode("".join(cell.split()), validate=True) if isinstance(cell, str) else cell
    except ValueError as err:  # of which binascii.Error is one
        raise UserInputError(f"{_rule(spec)}; one is no base64 ({err})") from err
    row_bytes = math.prod(spec.shape[1:]) * np.dtype(spec.dtype).itemsize
    if not data or len(data) % (row_bytes or 1):
        raise UserInputError(f"{_rule(spec)}; one has {len(data)} bytes")
    return np.frombuffer(data, spec.dtype)


def _rule(spec: TensorSpec) -> str:
    num_bytes = math.prod(spec.shape[1:]) * np.dtype(spec.dtype).itemsize
    return (
        f"column {spec.name!r}: its cells must be tensors of one shape and {spec.dtype}, as arrays, lists, or the "
        f"base64 of {num_bytes} bytes, which are {spec.dtype} {spec.shape[1:]} in C order, little-endian"
    )
