"""Whether what models compute is what ONNX Runtime computes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ansor_mlflow.errors import AnsorMlflowError, CorrectnessError
from ansor_mlflow.measuring.comparison import QUANTIZED_TOLERANCE, TOLERANCES, Deviation, compare_outputs
from ansor_mlflow.measuring.contenders import MakeInference, outputs_call, reference_inference
from ansor_mlflow.measuring.reference import is_quantized, operators_of, random_operators
from ansor_mlflow.measuring.timing import call_once
from ansor_mlflow.processes import call_in_process
from ansor_mlflow.tensors import Arrays

_VARYING = {
    *("ArgMax", "ArgMin", "GlobalMaxPool", "Hardmax", "LRN", "LpPool", "MaxPool", "MaxRoiPool", "NonMaxSuppression"),
    *("QuantizeLinear", "ReduceMax", "ReduceMin", "Resize", "RoiAlign", "Sign", "TopK", "Upsample"),
}
"""Operators of which ONNX Runtime keeps or loses a NaN with its place, the type, and the vectors of its kernels."""
_log = logging.getLogger("ansor_mlflow")


def compare_with_reference(
    runs: Mapping[str, MakeInference], network: Path, num_threads: int, examples: Sequence[Arrays]
) -> dict[str, Deviation]:
    """How far the outputs of models are from ONNX Runtime's, each in a process of its own.

    Args:
        runs: The models.
        network: ONNX file of the reference.
        num_threads: Threads of the reference.
        examples: Inputs.

    Raises:
        MachineError: A process died.
    """
    expected = expected_of(network, num_threads, examples)
    return {name: deviation_of(make_inference, examples, expected) for name, make_inference in runs.items()}


def expected_of(network: Path, num_threads: int, examples: Sequence[Arrays]) -> list[Arrays]:
    """What ONNX Runtime computes for several inputs, in a process of its own.

    Raises:
        MachineError: The process died.
        UserInputError: It cannot compute it.
    """
    return outputs_of(partial(reference_inference, network, num_threads, exact=True), examples)


def deviation_of(make_inference: MakeInference, examples: Sequence[Arrays], expected: Sequence[Arrays]) -> Deviation:
    """How far the outputs of a model, which runs in a process of its own, are from what is expected of some inputs.

    Raises:
        MachineError: The process died.
    """
    pairs = zip(outputs_of(make_inference, examples), expected, strict=True)
    return Deviation.worst([compare_outputs(*pair) for pair in pairs])


def outputs_of(make_inference: MakeInference, examples: Sequence[Arrays]) -> list[Arrays]:
    """The outputs of a model for several inputs, computed in a process of its own.

    Raises:
        MachineError: The process died.
    """
    found: list[Arrays] = call_in_process(call_once, partial(outputs_call, make_inference, examples))
    return found


def _is_finite(arrays: Arrays) -> bool:
    return all(bool(np.isfinite(values).all()) for values in arrays.values())


def tolerance_for(tolerance: float | Literal["auto"], network: Path, dtype: str) -> float:
    """The largest `max_rel_error` that passes; auto depends on what the network computes in."""
    if tolerance != "auto":
        return tolerance
    return QUANTIZED_TOLERANCE if is_quantized(network) else TOLERANCES[dtype]


def what_to_do(network: Path, num_threads: int, examples: Sequence[Arrays], tolerance: float) -> str:
    """What a user whose model's outputs differ from ONNX Runtime's should know, and do.

    Args:
        network: ONNX file of the reference.
        num_threads: Threads of the reference.
        examples: Inputs.
        tolerance: What was allowed.

    Raises:
        MachineError: A process died.
    """
    first = expected_of(network, num_threads, examples)
    if drawing := random_operators(network):
        second = expected_of(network, num_threads, examples)
        itself = Deviation.worst([compare_outputs(*pair) for pair in zip(second, first, strict=True)])
        if not itself.max_rel_error <= tolerance:
            return (
                f"ONNX Runtime's own outputs differ from call to call, because {' and '.join(drawing)} draws random "
                "numbers, so that nothing can be compared: make an input of what is drawn, or export the network for "
                "inference"
            )
    of_finite = (outputs for inputs, outputs in zip(examples, first, strict=True) if _is_finite(inputs))
    if not all(map(_is_finite, of_finite)):
        return (
            "ONNX Runtime's outputs hold NaN or infinities on these inputs: give data, or input_values, for which they "
            "do not; if they differ there, too, do not deploy this model"
        )
    return "do not deploy this model: compile it again, or raise tolerance if the network is that sensitive to rounding"


def broken(inputs: Arrays) -> Arrays | None:
    """The inputs with a NaN and both infinities in each that is of floats; None where there is no such input."""
    floats = {name: values.copy() for name, values in inputs.items() if values.dtype.kind == "f" and values.size}
    for values in floats.values():
        for position, value in ((2, np.inf), (3, -np.inf), (1, np.nan)):
            values.flat[values.size * position // 4] = value
    return {**inputs, **floats} if floats else None


def swallowing(actual: Arrays, expected: Arrays) -> list[str]:
    """The outputs that hold a number, or the other infinity, where NaN or an infinity is expected.

    NaN for an infinity is none, for sums of infinities depend on their order, and a layer may spread NaN: transformed
    tiles have it wherever one element has. The largest finite numbers, which bounds leave, are as infinities. Outputs
    whose shape depends on values, and then differs, say nothing.
    """
    found = []
    for name, values in expected.items():
        if values.dtype.kind != "f" or actual[name].shape != values.shape:
            continue
        given, wanted = (_with_infinities(array) for array in (actual[name], values))
        passes = np.isfinite(wanted) | np.isnan(given) | (given == wanted)
        if not passes.all():
            found.append(name)
    return found


def require_broken_stays_broken(
    compute: Callable[[Sequence[Arrays]], Sequence[Arrays]], network: Path, num_threads: int, inputs: Arrays
) -> None:
    """Compares a model with ONNX Runtime on inputs with NaN and infinities.

    An input that ONNX Runtime refuses, as where a NaN becomes an index, is not tried.

    Args:
        compute: Computes the model's outputs, in a process of its own.
        network: ONNX file of the reference.
        num_threads: Threads of the reference.
        inputs: Ordinary inputs.

    Raises:
        CorrectnessError: A number takes the place of a NaN or an infinity, and no operator is there of which that
            depends on the kernel in ONNX Runtime, too; otherwise that is a warning.
        MachineError: A process died.
    """
    if (tried := broken(inputs)) is None:
        return
    try:
        expected = expected_of(network, num_threads, [tried])
    except AnsorMlflowError as err:
        _log.warning("NaN and infinities are not tried: %s", err)
        return
    if not (lost := swallowing(compute([tried])[0], expected[0])):
        return
    what = f"NaN or infinities in an input are numbers in {', '.join(lost)}, which ONNX Runtime's outputs are not"
    if not (operators := sorted(_VARYING.intersection(operators_of(network)))):
        raise CorrectnessError(
            f"{what}: a broken input would look like a good one; do not deploy this model, report it"
        )
    _log.warning(
        "%s; the network has %s, where what becomes of them differs between ONNX Runtime's own kernels: check inputs "
        "before the model",
        *(what, ", ".join(operators)),
    )


def _with_infinities(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The values, with infinities in place of the largest finite numbers of their type."""
    info = np.finfo(values.dtype)
    return np.where(values >= info.max, np.inf, np.where(values <= info.min, -np.inf, values.astype(np.float64)))
