"""The MLflow signature of a network, which decides what a server takes."""

from __future__ import annotations

from typing import Literal

import numpy as np
from mlflow.models import ModelSignature
from mlflow.types import Schema
from mlflow.types import TensorSpec as MlflowTensorSpec

from ansor_mlflow.tensors import TensorSpec

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
