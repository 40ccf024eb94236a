"""A tuned model as MLflow serves it: its signature, what it takes, and batches of any size with a library for one.

A library has one batch size. More rows than that are run one batch after the other, and the last one is filled up with
copies of its last row, whose results are thrown away. This is right only where a row of the outputs depends on that row
of the inputs alone: where every input and output has the same first dimension, and, of more than one row, where the
network's graph says so. Where that does not decide it, the library is asked with rows in another order and among other
rows; not of integers, of which nobody knows which ones the network can use. In doubt other sizes are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd
from mlflow.exceptions import MlflowException
from mlflow.models import ModelSignature
from mlflow.types import Schema
from mlflow.types import TensorSpec as MlflowTensorSpec

from ansor_mlflow.errors import UserInputError
from ansor_mlflow.model import TunedModel
from ansor_mlflow.tensors import OPEN, Arrays, TensorSpec, from_objects, random_inputs, stack_cells

SignatureKind = Literal["tensor", "binary"]
_ROW_TOLERANCE = 1e-3
"""Difference over the largest value up to which rows are the same: one may be computed in another order."""
_SCALES = (1.0, 0.1, 10.0)  # what the floats of other rows are multiplied with


def get_signature(
    inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], kind: SignatureKind = "tensor"
) -> ModelSignature:
    """The MLflow signature with every tensor's name.

    The kind "tensor" names every dtype and shape. The first dimension is open (-1), because MLflow takes a DataFrame
    for a tensor only then; the model itself checks the exact shape. But MLflow then refuses base64 in the cells of a
    request's DataFrame. The kind "binary" lets it pass: inputs are objects of any shape, along one dimension, the one
    tensor that MLflow's `_enforce_tensor_spec` does not look into and takes anything for. The model checks them alone.
    """
    if kind == "binary":
        opaque = Schema([MlflowTensorSpec(np.dtype(object), (-1,), spec.name) for spec in inputs])
        return ModelSignature(inputs=opaque, outputs=_exact(outputs))
    return ModelSignature(inputs=_exact(inputs), outputs=_exact(outputs))


def _exact(specs: tuple[TensorSpec, ...]) -> Schema:
    shapes = [(-1, *spec.shape[1:]) if spec.shape else () for spec in specs]
    return Schema([MlflowTensorSpec(np.dtype(s.dtype), shape, s.name) for s, shape in zip(specs, shapes, strict=True)])


class PyfuncModel:
    """The pyfunc face of a `TunedModel`. Safe to call from several threads, as the model is."""

    def __init__(self, model: TunedModel, rows: str = "") -> None:
        self._model = model
        self._batches = Batches(model, rows)

    def get_raw_model(self) -> TunedModel:
        return self._model

    def predict(self, data: Any, params: dict[str, Any] | None = None) -> Any:  # noqa: ARG002 - MLflow passes params
        """Runs the network, as often as a batch of another size than its own needs.

        Args:
            data: An array (for a network with one input), a mapping from input names to arrays, or a DataFrame with a
                column for each input, whose rows hold the tensors along the first dimension: as arrays, lists, bytes
                or base64.
            params: Not used.

        Returns:
            The output array; a dictionary of arrays by name if the network has several.
        """
        try:
            outputs = self._batches.run(_as_arrays(data, self._model.inputs))
        except UserInputError as err:
            raise MlflowException.invalid_parameter_value(str(err)) from err
        return next(iter(outputs.values())) if len(outputs) == 1 else outputs


def _as_arrays(data: Any, inputs: tuple[TensorSpec, ...]) -> Mapping[str, npt.ArrayLike]:
    """The network's inputs from what pyfunc was given; shapes and dtypes are checked later."""
    names = [spec.name for spec in inputs]
    if isinstance(data, pd.DataFrame):
        if set(data.columns) != set(names):
            raise UserInputError(f"columns {[str(name) for name in data.columns]}: the model expects {names}")
        return {spec.name: stack_cells(data[spec.name], spec) for spec in inputs}
    if isinstance(data, np.ndarray):
        if len(names) > 1:
            raise UserInputError(f"one array was given: the model expects a dictionary with {names}")
        data = {names[0]: data}
    if not isinstance(data, Mapping):
        raise UserInputError(f"{type(data).__name__} was given: the model takes an array, a dictionary or a DataFrame")
    given = [(spec, data.get(spec.name)) for spec in inputs]
    objects = [(spec, array) for spec, array in given if isinstance(array, np.ndarray) and array.dtype.kind == "O"]
    return {**data, **{spec.name: from_objects(array, spec) for spec, array in objects}} if objects else data


class Batches:
    """Runs a model on as many rows as a caller has; `rows` is what its manifest says of the rows of a batch."""

    def __init__(self, model: TunedModel, rows: str = "") -> None:
        self._model = model
        self._rows = rows
        sizes = {spec.shape[:1] for spec in (*model.inputs, *model.outputs)}
        self._size = next(iter(sizes))[0] if len(sizes) == 1 and not sizes & {(), (OPEN,)} else None

    def run(self, inputs: Mapping[str, npt.ArrayLike]) -> Arrays:
        """Runs the network, on several batches if the inputs have another number of rows than it was compiled for."""
        arrays = {name: np.asarray(array) for name, array in inputs.items()}
        num_rows = self._num_rows(arrays)
        if num_rows is None or num_rows == self._size:
            return self._model.run(arrays)
        if not self._rows_are_independent:
            depends = "depends" if self._rows == "dependent" else "may depend"
            raise UserInputError(
                f"the inputs have {num_rows} rows: in this network a row's result {depends} on the other rows or on "
                f"its place, so that it takes exactly the {self._size} that it was compiled for"
            )
        return self._run_parts(arrays, num_rows)

    def _num_rows(self, arrays: Arrays) -> int | None:
        """The rows of a batch; None if it has none that fit, which the model itself then refuses."""
        specs = {spec.name: spec for spec in self._model.inputs}
        if self._size is None or arrays.keys() != specs.keys():
            return None
        for name, array in arrays.items():
            spec = specs[name]  # which has rows, of which any number is right
            if (
                array.dtype != spec.dtype
                or 0 in (array.ndim, array.size)
                or not spec.takes((*spec.shape[:1], *array.shape[1:]))
            ):
                return None
        counts = {name: len(array) for name, array in arrays.items()}
        if len(set(counts.values())) > 1:
            raise UserInputError(f"the inputs have different numbers of rows, {counts}: give all of them the same")
        return next(iter(counts.values()))

    def _run_parts(self, arrays: Arrays, num_rows: int) -> Arrays:
        assert self._size is not None
        batches = []
        for start in range(0, num_rows, self._size):
            batch = {name: _filled_up(array[start : start + self._size], self._size) for name, array in arrays.items()}
            batches.append(self._model.run(batch))
        return {name: np.concatenate([batch[name] for batch in batches])[:num_rows] for name in batches[0]}

    @cached_property
    def _rows_are_independent(self) -> bool:
        """Whether a row of the outputs depends on that row of the inputs alone, as far as anybody can tell."""
        if self._size == 1 or self._rows:
            return self._size == 1 or self._rows == "independent"
        inputs = self._model.sizes[0].inputs
        if any(np.dtype(spec.dtype).kind in "iu" for spec in inputs):
            return False
        return all(self._are_the_same_elsewhere(inputs, seed, scale) for seed, scale in enumerate(_SCALES))

    def _are_the_same_elsewhere(self, inputs: Sequence[TensorSpec], seed: int, scale: float) -> bool:
        """Whether each row gets the same result at the next place, and at the last one among other rows, too."""
        first = random_inputs(inputs, seed=2 * seed)
        moved = {name: np.roll(array, 1, axis=0) for name, array in first.items()}
        here, next_ = self._model.run(first), self._model.run(moved)
        if not all(_is_same(np.roll(here[name], 1, axis=0), next_[name]) for name in here):
            return False
        other = random_inputs(inputs, seed=2 * seed + 1)
        for name, array in other.items():
            other[name] = array if array.dtype == bool else (array * scale).astype(array.dtype)
            other[name][-1] = first[name][0]
        there = self._model.run(other)
        return all(_is_same(here[name][0], there[name][-1]) for name in here)


def _filled_up(rows: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    missing = size - len(rows)
    return np.concatenate([rows, np.repeat(rows[-1:], missing, axis=0)]) if missing else rows


def _is_same(rows: npt.NDArray[Any], expected: npt.NDArray[Any]) -> bool:
    rows, expected = rows.astype(np.float64), expected.astype(np.float64)
    largest = np.nan_to_num(abs(expected)).max(initial=0)
    return np.allclose(rows, expected, rtol=0, atol=_ROW_TOLERANCE * largest, equal_nan=True)
