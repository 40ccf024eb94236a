"""Tries shapes on an ONNX model."""

from __future__ import annotations

import collections
import functools
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

from ansor_mlflow.tensors import Arrays, TensorSpec, random_inputs

_MAX_RUN_S = 4.0
"""Seconds after which a run that has not failed counts as one that will not."""
_FATAL = 4
_IMPLIED_SIZES = range(2, 4097)
_MAX_IMPLIED = 12


def start_session(model: bytes, directory: Path | None, *, optimized: bool = True) -> onnxruntime.InferenceSession:
    """Loads a model in ONNX Runtime, which computes what is constant and raises whatever it likes where it cannot.

    Args:
        model: The message.
        directory: Where its external data is.
        optimized: Whether it may compute what is constant, which shows more of shapes.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = _FATAL
    levels = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_BASIC if optimized else levels.ORT_DISABLE_ALL
    if directory is not None:  # onnxruntime_session_options_config_keys.h
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", str(directory.resolve())
        )
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def run_briefly(session: onnxruntime.InferenceSession, names: Sequence[str] | None, inputs: Arrays) -> list[Any] | None:
    """Outputs of a model, all where none is named; None where they take longer than `_MAX_RUN_S`.

    It raises whatever ONNX Runtime likes.
    """
    options = onnxruntime.RunOptions()
    options.log_severity_level = _FATAL
    is_slow = threading.Event()

    def give_up() -> None:
        is_slow.set()
        options.terminate = True

    timer = threading.Timer(_MAX_RUN_S, give_up)
    timer.start()
    try:
        return list(session.run(names, inputs, options))
    except Exception:
        if is_slow.is_set():
            return None
        raise
    finally:
        timer.cancel()


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
