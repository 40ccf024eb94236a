"""Tries shapes on an ONNX model."""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

from ansor_mlflow.graphs import run_briefly, start_session
from ansor_mlflow.tensors import Arrays, TensorSpec, random_inputs

_IMPLIED_SIZES = range(2, 4097)
_MAX_IMPLIED = 12


class OnnxTrial:
    """A `ShapeTrial` of an ONNX model whose shapes are not fixed yet.

    Args:
        model: The model.
        dtypes: NumPy's names of the dtypes of its inputs.
        values: Values that inputs get for good.
        directory: Where its external data is.
        infers: What `infers` does.
        is_fixed: Whether all shapes of the model follow from those of its inputs.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        dtypes: Mapping[str, str],
        values: Arrays,
        directory: Path | None,
        infers: Callable[[Mapping[str, tuple[int, ...]]], bool],
        is_fixed: Callable[[Mapping[str, tuple[int, ...]]], bool],
    ) -> None:
        self._model = model
        self._dtypes = dtypes
        self._values = values
        self._directory = directory
        self.infers = infers
        self._is_fixed = is_fixed

    @functools.cached_property
    def integers(self) -> frozenset[str]:
        """See `ShapeTrial`."""
        return frozenset(name for name, dtype in self._dtypes.items() if np.dtype(dtype).kind in "iub")

    @functools.cached_property
    def implied(self) -> Sequence[int]:
        """See `ShapeTrial`: a table's length stands in a network once, numbers of channels everywhere."""
        tables = (weight.dims for weight in self._model.graph.initializer if len(weight.dims) > 1)
        counted = collections.Counter(size for size in itertools.chain(*tables) if size in _IMPLIED_SIZES)
        return sorted(counted, key=lambda size: (counted[size], -size))[:_MAX_IMPLIED]

    def runs(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """See `ShapeTrial`."""
        if self._session is None or not self._is_fixed(shapes):  # which is quicker
            return False
        try:
            run_briefly(self._session, None, self._feeds(shapes))  # a run that is too slow has not failed
        except Exception:  # noqa: BLE001 - ONNX Runtime has an error class for each of its status codes
            return False
        return True

    @functools.cached_property
    def _session(self) -> onnxruntime.InferenceSession | None:
        try:
            return start_session(self._model.SerializeToString(), self._directory)
        except Exception:  # noqa: BLE001 - as above; protobuf has its own where the model is too large
            return None

    def _feeds(self, shapes: Mapping[str, tuple[int, ...]]) -> Arrays:
        specs = [TensorSpec(name, shape, self._dtypes[name]) for name, shape in shapes.items()]
        fixed = {
            spec.name: np.broadcast_to(self._values[spec.name], spec.shape)
            for spec in specs
            if spec.name in self._values
        }
        return {**random_inputs(specs, seed=0), **fixed}
