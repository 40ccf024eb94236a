"""Inputs that a network is checked on: those that a user keeps in a file, or seeded ones."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ansor_mlflow.errors import UserInputError, one_line
from ansor_mlflow.measuring.varied_inputs import seeded_inputs
from ansor_mlflow.tensors import Arrays, NetworkShapes, TensorSpec, stack_cells

_NUM_SEEDED = 3
_PARQUET_MAGIC = b"PAR1"
_FORMATS = "give a .npz, .npy or .parquet file"


def choose_examples(data: str, sizes: Sequence[NetworkShapes], seed: int, network: Path | None = None) -> list[Arrays]:
    """The inputs that outputs are compared on; the first of them, one of each size, are timed."""
    if not data:
        return seeded_inputs(network, sizes, range(seed, seed + _NUM_SEEDED))
    number, (first, *others) = _read_for_a_size(data, sizes)
    seeded = seeded_inputs(network, sizes, [seed]) if len(sizes) > 1 else [first]
    return [*seeded[:number], first, *seeded[number + 1 :], *others]


def require_examples(data: str) -> None:
    """Checks what can be said of a user's file before the network is known."""
    if data and not Path(data).is_file():
        raise UserInputError(f"data={data}: there is no such file; {_FORMATS}")


def read_examples(path: str, inputs: tuple[TensorSpec, ...]) -> list[Arrays]:
    """Reads inputs from a file. Nothing is unpickled.

    Args:
        path: A NumPy file: .npz with an array for each input, or, for a network with one input, .npy. Or a Parquet
            file with a column for each input, and a row of it, as bytes or as a list of numbers, in each cell. There
            may be any number of rows along the first dimension; the last example is filled up with the first rows.
        inputs: The network's.

    Raises:
        UserInputError: The file cannot be read, or its arrays are not inputs of the network.
    """
    expected = ", ".join(f"{spec.name}: {spec.dtype} {spec.shape}" for spec in inputs)
    arrays = _read(path, inputs)
    if set(arrays) != {spec.name for spec in inputs}:
        raise UserInputError(f"data={path}: it holds {', '.join(arrays) or 'nothing'}; it must hold {expected}")
    counts = {_num_examples(arrays[spec.name], spec) for spec in inputs}
    if len(counts) != 1 or not all(counts):
        given = ", ".join(f"{name}: {array.dtype} {array.shape}" for name, array in arrays.items())
        raise UserInputError(
            f"data={path}: it holds {given}; it must hold {expected}, or more rows of each along the first dimension"
        )
    columns = {spec.name: _split(arrays[spec.name], spec) for spec in inputs}
    return [{name: column[index] for name, column in columns.items()} for index in range(ceil(counts.pop()))]


def _read_for_a_size(path: str, sizes: Sequence[NetworkShapes]) -> tuple[int, list[Arrays]]:
    errors = []
    for number, size in enumerate(sizes):
        try:
            return number, read_examples(path, size.inputs)
        except UserInputError as err:
            errors.append(err)
    raise errors[0]


def _read(path: str, inputs: tuple[TensorSpec, ...]) -> Arrays:
    require_examples(path)
    try:
        with Path(path).open("rb") as file:
            is_parquet = file.read(len(_PARQUET_MAGIC)) == _PARQUET_MAGIC
        return _read_parquet(path, inputs) if is_parquet else _read_numpy(path, inputs)
    except (OSError, MemoryError) as err:
        reason = getattr(err, "strerror", None) or one_line(err)
        raise UserInputError(f"data={path}: it cannot be read ({reason}); {_FORMATS}") from err


def _read_numpy(path: str, inputs: tuple[TensorSpec, ...]) -> Arrays:
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return {inputs[0].name: loaded} if len(inputs) == 1 else {"one array": loaded}
        with loaded:
            return dict(loaded)
    except (ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as err:
        raise UserInputError(
            f"data={path}: it is no NumPy file of plain numbers; write one with numpy.savez(path, input=array)"
        ) from err


def _read_parquet(path: str, inputs: tuple[TensorSpec, ...]) -> Arrays:
    import pandas as pd  # it is slow to load, and only this needs it

    try:
        frame = pd.read_parquet(path)
    except (OSError, MemoryError):
        raise
    except Exception as err:  # of pandas, PyArrow or what a damaged schema stands for: there are a dozen kinds
        raise UserInputError(f"data={path}: it is no Parquet file, or cut short; write it again") from err
    by_name = {spec.name: spec for spec in inputs}
    if set(frame.columns) != set(by_name):
        return {str(name): np.empty(0) for name in frame.columns}  # which is refused, by their names
    try:
        return {name: _stacked(frame[name], spec) for name, spec in by_name.items()}
    except UserInputError as err:
        raise UserInputError(f"data={path}: {err}") from err


def _stacked(column: Any, spec: TensorSpec) -> npt.NDArray[Any]:
    """A column of tensors as one array; the lists in its cells may be flat."""
    array = stack_cells(map(_nested, column), spec)
    flat = array.ndim == 2 and array.shape[1:] == (np.prod(spec.shape[1:], dtype=int),)
    return array.reshape(-1, *spec.shape[1:]) if flat else array


def _nested(cell: Any) -> Any:
    """Lists of lists, which pandas reads as arrays of arrays."""
    is_nested = isinstance(cell, np.ndarray) and cell.dtype == object
    return [_nested(inner) for inner in cell] if is_nested else cell


def _num_examples(array: npt.NDArray[Any], spec: TensorSpec) -> Fraction:
    """How often the rows of an array fill the input; 0 where it is not of the network's dtype and shape."""
    if array.dtype != spec.dtype or array.ndim != len(spec.shape) or array.shape[1:] != spec.shape[1:]:
        return Fraction(0)
    return Fraction(len(array), spec.shape[0] or 1) if spec.shape else Fraction(1)


def _split(array: npt.NDArray[Any], spec: TensorSpec) -> list[npt.NDArray[Any]]:
    """The examples in an array; the last one is filled up with the first rows."""
    if not spec.shape:
        return [array]
    rows = np.arange(ceil(_num_examples(array, spec)) * spec.shape[0]) % len(array)
    return list(array[rows].reshape(-1, *spec.shape))
