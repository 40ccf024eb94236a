"""What a process that loads a model by itself sees: load time, `predict`, and the library below it."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from ansor_mlflow.tensors import TensorSpec


def measurement(directory: Path, inputs: tuple[TensorSpec, ...], seed: int) -> Callable[[], dict[str, float]]:
    """A call that loads and runs a model; for `evaluate.in_child_process`."""
    return partial(_measure, directory, inputs, seed)


def prediction(directory: Path, inputs: tuple[TensorSpec, ...], seed: int) -> Callable[[], Any]:
    """A call that returns what `predict` returns; for `evaluate.in_child_process`."""
    return lambda: _load(directory).predict(_inputs(inputs, seed))


def _measure(directory: Path, specs: tuple[TensorSpec, ...], seed: int) -> dict[str, float]:
    import mlflow.pyfunc  # noqa: F401 - not a part of the load time

    from ansor_mlflow.measuring import measure_watched

    inputs = _inputs(specs, seed)
    began_s = time.perf_counter()
    model = _load(directory)
    loaded_s = time.perf_counter()
    model.predict(inputs)
    first_s = time.perf_counter()
    _load(directory)
    again_s = time.perf_counter()
    raw = model.get_raw_model()
    bare = partial(raw.run, inputs) if hasattr(raw, "entry") else partial(raw.run, None, inputs)
    return {
        "load_s": loaded_s - began_s,
        "load_again_s": again_s - first_s,
        "first_predict_ms": (first_s - loaded_s) * 1e3,
        "library_ms": median(measure_watched(bare)[0]) * 1e3,
        "predict_ms": median(measure_watched(partial(model.predict, inputs))[0]) * 1e3,
    }


def _load(directory: Path) -> Any:
    import mlflow.pyfunc

    return mlflow.pyfunc.load_model(str(directory))


def _inputs(specs: tuple[TensorSpec, ...], seed: int) -> dict[str, Any]:
    from ansor_mlflow.tensors import random_inputs

    return random_inputs(specs, seed)
