"""The MLflow signature of a network, which decides what a server takes."""

from __future__ import annotations

from collections.abc import Mapping
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
from ansor_mlflow.serving.batches import Batches
from ansor_mlflow.tensors import TensorSpec, from_objects, stack_cells

SignatureKind = Literal["tensor", "binary"]


def get_signature(
    inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], kind: SignatureKind = "tensor"
) -> ModelSignature:
    """The MLflow signature with every tensor's name.

    Args:
        inputs: The network's inputs.
        outputs: The network's outputs.
        kind: "tensor" names every dtype and shape. The first dimension is open (-1), because MLflow takes a DataFrame
            for a tensor only then; the model itself checks the exact shape. But MLflow then refuses base64 in the
            cells of a request's DataFrame. "binary" lets it pass: inputs are objects of any shape, which MLflow does
            not look into and the model checks alone.
    """
    return ModelSignature(inputs=_opaque(inputs) if kind == "binary" else _exact(inputs), outputs=_exact(outputs))


def _exact(specs: tuple[TensorSpec, ...]) -> Schema:
    shapes = [(-1, *spec.shape[1:]) if spec.shape else () for spec in specs]
    return Schema([MlflowTensorSpec(np.dtype(s.dtype), shape, s.name) for s, shape in zip(specs, shapes, strict=True)])


def _opaque(specs: tuple[TensorSpec, ...]) -> Schema:
    """Objects along one dimension: the one tensor that MLflow's `_enforce_tensor_spec` takes anything for."""
    return Schema([MlflowTensorSpec(np.dtype(object), (-1,), spec.name) for spec in specs])


class PyfuncModel:
    """The pyfunc face of a `TunedModel`. Safe to call from several threads, as the model is.

    Args:
        model: The model.
        rows: What its manifest says of the rows of a batch.
    """

    def __init__(self, model: TunedModel, rows: str = "") -> None:
        self._model = model
        self._batches = Batches(model, rows)

    def get_raw_model(self) -> TunedModel:
        """Returns the underlying model."""
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
    """The network's inputs from what pyfunc was given; shapes and dtypes are checked later.

    Raises:
        UserInputError: An array was given to a network with several inputs, or the type is none of the three.
    """
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
    objects = [spec for spec in inputs if _is_of_objects(data.get(spec.name))]
    return {**data, **{spec.name: from_objects(data[spec.name], spec) for spec in objects}} if objects else data


def _is_of_objects(array: Any) -> bool:
    return isinstance(array, np.ndarray) and array.dtype.kind == "O"
