"""Inputs that get a value for good, such as a sampling rate that decides a branch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

from ansor_mlflow.errors import UserInputError, shortened
from ansor_mlflow.tensors import Arrays, TensorSpec

_IR_VERSION_OF_UNLISTED_WEIGHTS = 4


def typed_values(network: str, dtypes: Mapping[str, str], values: Mapping[str, Any]) -> Arrays:
    """Values in the dtypes of their inputs.

    Args:
        network: What messages call it.
        dtypes: NumPy's name of the dtype of every input.
        values: Numbers or nested lists of them, by the names of the inputs.

    Raises:
        UserInputError: There is no such input, none is left, or a value is not one of its dtype.
    """
    for name in values:
        if name not in dtypes:
            raise UserInputError(
                f"input_values names {name!r}, which is not an input of {network}; its inputs are {', '.join(dtypes)}"
            )
    if values and len(values) == len(dtypes):
        raise UserInputError(
            f"input_values gives all inputs of {network} a value; leave out one that differs between calls"
        )
    return {name: _typed(network, name, dtypes[name], value) for name, value in values.items()}


def require_shape(network: str, name: str, array: npt.NDArray[Any], shape: Sequence[int | str] | None) -> None:
    """Checks that a value can be repeated to the shape of its input, whose dynamic dimensions take any size.

    Raises:
        UserInputError: It cannot.
    """
    if shape is None:
        return
    pairs = zip(reversed(shape), reversed(array.shape), strict=False)
    if array.ndim > len(shape) or not all(size in (1, dim) or isinstance(dim, str) for dim, size in pairs):
        raise UserInputError(
            f"input_values gives {name!r} of {network} a value of shape {list(array.shape)}; it must be a number, or "
            f"of shape ({', '.join(map(str, shape))})"
        )


def fix_values(model: onnx.ModelProto, network: str, specs: Sequence[TensorSpec], values: Arrays) -> None:
    """Makes inputs initializers.

    Args:
        model: Changed.
        network: What messages call it.
        specs: Its inputs.
        values: Values for some of them, which are repeated to their shapes as NumPy does.

    Raises:
        UserInputError: A value does not have the shape of its input.
    """
    kept = [value for value in model.graph.input if value.name not in values]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    for spec in specs:
        if spec.name in values:
            require_shape(network, spec.name, values[spec.name], spec.shape)
            array = np.broadcast_to(values[spec.name], spec.shape).copy()
            add_weights(model, [numpy_helper.from_array(array, spec.name)])


def add_weights(model: onnx.ModelProto, weights: Iterable[onnx.TensorProto]) -> None:
    """Adds initializers to a model, and to the inputs that they are listed among before IR version 4."""
    for weight in weights:
        model.graph.initializer.append(weight)
        if model.ir_version < _IR_VERSION_OF_UNLISTED_WEIGHTS:
            model.graph.input.append(helper.make_tensor_value_info(weight.name, weight.data_type, weight.dims))


def _typed(network: str, name: str, dtype: str, value: Any) -> npt.NDArray[Any]:
    given = f"input_values gives {name!r} of {network} {shortened(str(value), 60)}"
    numbers = np.array(value, dtype=object)
    if not all(isinstance(number, bool | int | float) for number in numbers.flat):
        raise UserInputError(f"{given}; it must be a number, or lists of numbers that form an array")
    with np.errstate(over="ignore", invalid="ignore"):
        try:
            array = numbers.astype(dtype)
        except (OverflowError, ValueError):
            raise UserInputError(f"{given}, which is no {dtype}; give values of that type") from None
    if not all(_is_kept(number, kept.item()) for number, kept in zip(numbers.flat, array.flat, strict=True)):
        raise UserInputError(f"{given}, which is no {dtype}; give values of that type")
    return array


def _is_kept(number: bool | int | float, kept: bool | int | float) -> bool:
    """Whether a dtype has a number; a float may be rounded, but not to infinity."""
    if isinstance(kept, float):
        return bool(np.isfinite(kept)) or not np.isfinite(float(number))
    return number == kept
