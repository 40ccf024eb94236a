"""Inputs of a network that a user keeps in a file."""

from __future__ import annotations

import zipfile
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from ansor_mlflow.errors import UserInputError
from ansor_mlflow.tensors import Arrays, TensorSpec


def read_examples(path: str, inputs: tuple[TensorSpec, ...]) -> list[Arrays]:
    """Reads inputs from a NumPy file. Nothing is unpickled.

    Args:
        path: A .npz file with an array for each input, or, for a network with one input, a .npy file. The first
            dimension may be a multiple of the network's: then these are several examples.
        inputs: The network's.

    Raises:
        UserInputError: The file cannot be read, or its arrays are not inputs of the network.
    """
    expected = ", ".join(f"{spec.name}: {spec.dtype} {spec.shape}" for spec in inputs)
    arrays = _read(path, inputs)
    if set(arrays) != {spec.name for spec in inputs}:
        raise UserInputError(f"data={path}: it holds {', '.join(arrays) or 'nothing'}; it must hold {expected}")
    columns = {spec.name: _split(arrays[spec.name], spec) for spec in inputs}
    counts = {len(column) for column in columns.values()}
    if len(counts) != 1 or 0 in counts:
        given = ", ".join(f"{name}: {array.dtype} {array.shape}" for name, array in arrays.items())
        raise UserInputError(
            f"data={path}: it holds {given}; it must hold {expected}, or as many examples of each along the first "
            "dimension"
        )
    return [{name: column[index] for name, column in columns.items()} for index in range(counts.pop())]


def _read(path: str, inputs: tuple[TensorSpec, ...]) -> Arrays:
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return {inputs[0].name: loaded} if len(inputs) == 1 else {"one array": loaded}
        with loaded:
            return dict(loaded)
    except (OSError, MemoryError) as err:
        reason = getattr(err, "strerror", None) or err
        raise UserInputError(f"data={path}: it cannot be read ({reason}); give a .npz file") from err
    except (ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as err:
        raise UserInputError(
            f"data={path}: it is no NumPy file of plain numbers; write one with numpy.savez(path, input=array)"
        ) from err


def _split(array: npt.NDArray[Any], spec: TensorSpec) -> list[npt.NDArray[Any]]:
    """The examples in an array; none where it is not of the network's dtype and shape."""
    if array.dtype != spec.dtype or array.shape[1:] != spec.shape[1:] or array.ndim != len(spec.shape):
        return []
    if not spec.shape:
        return [array]
    batch = spec.shape[0]
    return list(array.reshape(-1, *spec.shape)) if batch and array.shape[0] % batch == 0 else []
