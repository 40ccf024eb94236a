"""Whether what models compute is what ONNX Runtime computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from ansor_mlflow.measuring.comparison import QUANTIZED_TOLERANCE, TOLERANCES, Deviation, compare_outputs
from ansor_mlflow.measuring.contenders import MakeInference, outputs_call, reference_inference
from ansor_mlflow.measuring.reference import is_quantized, random_operators
from ansor_mlflow.measuring.timing import call_once
from ansor_mlflow.processes import in_child_process
from ansor_mlflow.tensors import Arrays


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
    found: list[Arrays] = in_child_process(call_once, partial(outputs_call, make_inference, examples))
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
    first, second = (expected_of(network, num_threads, examples) for _ in range(2))
    itself = Deviation.worst([compare_outputs(*pair) for pair in zip(second, first, strict=True)])
    if (drawing := random_operators(network)) and not itself.max_rel_error <= tolerance:
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
