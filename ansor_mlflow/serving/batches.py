"""Runs batches of any size with a library that was compiled for one.

A library has one batch size. More rows than that are run one batch after the other, and the last one is filled up with
copies of its last row, whose results are thrown away. This is right only where a row of the outputs depends on that row
of the inputs alone: where every input and output has the same first dimension, and, of more than one row, where the
library says so itself when it is asked with rows in another order.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ansor_mlflow.errors import UserInputError
from ansor_mlflow.model import TunedModel
from ansor_mlflow.tensors import OPEN, Arrays, TensorSpec, random_inputs

_ROW_TOLERANCE = 1e-2
"""Difference over the largest value up to which rows are the same: one may be computed in another order."""


class Batches:
    """Runs a model on as many rows as a caller has."""

    def __init__(self, model: TunedModel) -> None:
        self._model = model
        sizes = {spec.shape[:1] for spec in (*model.inputs, *model.outputs)}
        self._size = next(iter(sizes))[0] if len(sizes) == 1 and not sizes & {(), (OPEN,)} else None

    def run(self, inputs: Mapping[str, npt.ArrayLike]) -> Arrays:
        """Runs the network, on several batches if the inputs have another number of rows than it was compiled for.

        Raises:
            UserInputError: The inputs do not fit.
        """
        arrays = {name: np.asarray(array) for name, array in inputs.items()}
        num_rows = self._num_rows(arrays)
        if num_rows is None or num_rows == self._size:
            return self._model.run(arrays)
        if not self._rows_are_independent:
            raise UserInputError(
                f"the inputs have {num_rows} rows: in this network a row's result depends on the other rows or on its "
                f"place, so that it takes exactly the {self._size} that it was compiled for"
            )
        return self._run_parts(arrays, num_rows)

    def _num_rows(self, arrays: Arrays) -> int | None:
        """The rows of a batch; None if it has none that fit, which the model itself then refuses.

        Raises:
            UserInputError: The inputs fit but for their numbers of rows, which differ.
        """
        specs = {spec.name: spec for spec in self._model.inputs}
        if self._size is None or arrays.keys() != specs.keys():
            return None
        if not all(_has_rows_of(specs[name], array) for name, array in arrays.items()):
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
        """Whether each row gets the same result at the next place, and one of them among other rows, too."""
        if self._size == 1:
            return True
        inputs = self._model.sizes[0].inputs
        first = random_inputs(inputs, seed=0)
        moved = {name: np.roll(array, 1, axis=0) for name, array in first.items()}
        other = random_inputs(inputs, seed=1)
        for name, array in other.items():
            array[-1] = first[name][0]
        here, next_, there = self._model.run(first), self._model.run(moved), self._model.run(other)
        return all(
            _is_same(np.roll(here[name], 1, axis=0), next_[name]) and _is_same(here[name][0], there[name][-1])
            for name in here
        )


def _has_rows_of(spec: TensorSpec, array: npt.NDArray[Any]) -> bool:
    """Whether an array has any number of an input's rows."""
    pairs = zip(array.shape[1:], spec.shape[1:], strict=False)
    fits = array.ndim == len(spec.shape) and all(dim in (size, OPEN) for size, dim in pairs)
    return fits and array.dtype == spec.dtype and array.size > 0


def _filled_up(rows: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    missing = size - len(rows)
    return np.concatenate([rows, np.repeat(rows[-1:], missing, axis=0)]) if missing else rows


def _is_same(rows: npt.NDArray[Any], expected: npt.NDArray[Any]) -> bool:
    rows, expected = rows.astype(np.float64), expected.astype(np.float64)
    largest = np.nan_to_num(abs(expected)).max(initial=0)
    return np.allclose(rows, expected, rtol=0, atol=_ROW_TOLERANCE * largest, equal_nan=True)
