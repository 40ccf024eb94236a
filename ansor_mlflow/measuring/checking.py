"""Whether what models compute is what ONNX Runtime computes."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ansor_mlflow.errors import AnsorMlflowError, CorrectnessError, UserInputError, one_line
from ansor_mlflow.measuring.compare import (
    MakeInference,
    is_quantized,
    operators_of,
    outputs_call,
    random_operators,
    reference_inference,
)
from ansor_mlflow.measuring.timing import call_once
from ansor_mlflow.processes import in_child_process
from ansor_mlflow.tensors import Arrays

TOLERANCES = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
"""Largest `max_rel_error` that passes, by the type that a network computes in; the reference computes in float32."""
QUANTIZED_TOLERANCE = 1e-1
"""Tolerance for a network that rounds to 8 bits: a value half-way between two steps goes up or down with the order of a
sum, and what follows from the other step is no error."""
_ROUNDINGS = 8.0
"""How many times as far the outputs of a sensitive network may be off as ONNX Runtime's own move with the order of its
sums and the last digit of inputs: a sum in the order of its terms loses up to three bits more than one in blocks."""
_NUM_MOVED = 4
"""How often the last digits of the inputs are drawn: what nearly cancels out depends on them."""
_MOST_SENSITIVE, _MOST_QUANTIZED = 10.0, 3.0
"""How many times the tolerance the error may be at most, however sensitive a network is; and one that is quantised."""
_FEW_DIGITS = 1e-2
"""Error from which two runs have fewer than two digits of the largest output in common."""
_SMALLEST_SCALE = 1e-2
"""Errors of smaller outputs are relative to this. Networks compute with values around 1, and what comes of those is off
by some units of their last place, however small it is: sigmoid(-14.3) is 6.00e-7, or 5.66e-7 and 6.26e-7 in two kernels
of ONNX Runtime. With the tolerance for float32 this allows 1e-6, which are eight such units.
"""
_VARYING = {
    *("ArgMax", "ArgMin", "GlobalMaxPool", "Hardmax", "LRN", "LpPool", "MaxPool", "MaxRoiPool", "NonMaxSuppression"),
    *("QuantizeLinear", "ReduceMax", "ReduceMin", "Resize", "RoiAlign", "Sign", "TopK", "Upsample"),
}
"""Operators of which ONNX Runtime keeps or loses a NaN with its place, the type, and the vectors of its kernels."""
_log = logging.getLogger("ansor_mlflow")


@dataclass(frozen=True)
class Deviation:
    """How far outputs are from a reference, over all outputs."""

    max_abs_error: float
    max_rel_error: float
    """max |output - reference| / max |reference|, the latter at least 0.01; the largest over the outputs. (Dividing
    element by element, or by less, would report the rounding of values near zero.)"""

    @staticmethod
    def worst(differences: list[Deviation]) -> Deviation:
        """The largest errors of several comparisons."""
        return Deviation(max(d.max_abs_error for d in differences), max(d.max_rel_error for d in differences))


_INFINITE = Deviation(float("inf"), float("inf"))


def compare_outputs(actual: Arrays, expected: Arrays) -> Deviation:
    """Compares outputs by name. A missing output, another shape or a NaN is an infinite error.

    An infinity that both have is none: what is left out of a choice is often minus infinity.
    """
    return Deviation.worst([_compare(actual.get(name), output, np.isinf) for name, output in expected.items()])


def compare_tensors(actual: npt.NDArray[Any], expected: npt.NDArray[Any]) -> Deviation:
    """Compares values inside of a network: a NaN or an infinity that both have is no error."""
    return _compare(actual, expected, lambda values: ~np.isfinite(values))


def _compare(
    actual: npt.NDArray[Any] | None,
    expected: npt.NDArray[Any],
    must_be_equal: Callable[[npt.NDArray[Any]], npt.NDArray[np.bool_]],
) -> Deviation:
    """How far values are from others, of which some must be equal: there no difference says how far."""
    if actual is None or actual.shape != expected.shape:
        return _INFINITE
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    exact = must_be_equal(expected)
    if not np.array_equal(actual[exact], expected[exact], equal_nan=True):
        return _INFINITE
    if exact.all():
        return Deviation(0.0, 0.0)
    errors = np.abs(actual[~exact] - expected[~exact])
    if not np.isfinite(errors).all():
        return _INFINITE
    scale, max_abs = float(np.max(np.abs(expected[~exact]))), float(errors.max())
    return Deviation(max_abs, max_abs / max(scale, _SMALLEST_SCALE))


def compare_with_reference(
    runs: Mapping[str, MakeInference], network: Path, num_threads: int, examples: Sequence[Arrays]
) -> dict[str, Deviation]:
    """How far the outputs of models are from ONNX Runtime's, each in a process of its own."""
    expected = expected_of(network, num_threads, examples)
    return {name: deviation_of(make_inference, examples, expected) for name, make_inference in runs.items()}


def expected_of(network: Path, num_threads: int, examples: Sequence[Arrays]) -> list[Arrays]:
    """What ONNX Runtime computes for several inputs, in a process of its own."""
    return outputs_of(partial(reference_inference, network, num_threads, exact=True), examples)


def deviation_of(make_inference: MakeInference, examples: Sequence[Arrays], expected: Sequence[Arrays]) -> Deviation:
    """How far the outputs of a model, which runs in a process of its own, are from what is expected of some inputs."""
    pairs = zip(outputs_of(make_inference, examples), expected, strict=True)
    return Deviation.worst([compare_outputs(*pair) for pair in pairs])


def outputs_of(
    make_inference: MakeInference, examples: Sequence[Arrays], *, limit_s: float | None = None
) -> list[Arrays]:
    """The outputs of a model for several inputs, computed in a process of its own within `limit_s` seconds."""
    call = partial(outputs_call, make_inference, examples)
    found: list[Arrays] = in_child_process(call_once, call, limit_s=limit_s)
    return found


def is_finite(arrays: Arrays) -> bool:
    """Whether there is neither NaN nor an infinity in any array."""
    return all(bool(np.isfinite(values).all()) for values in arrays.values())


def tolerance_for(tolerance: float | Literal["auto"], network: Path, dtype: str) -> float:
    """The largest `max_rel_error` that passes; auto depends on what the network computes in."""
    if tolerance != "auto":
        return tolerance
    return QUANTIZED_TOLERANCE if is_quantized(network) else TOLERANCES[dtype]


def allowed_error(
    error: float,
    tolerance: float | Literal["auto"],
    network: Path,
    dtype: str,
    num_threads: int,
    examples: Sequence[Arrays],
) -> float:
    """The largest `max_rel_error` that passes for outputs that are off by `error` on some inputs.

    It is that of `tolerance_for`; where a network in float32 fails it, auto allows as much as such numbers can say: a
    logarithm of what nearly cancels out has lost digits in any runtime, and what is quantised layer after layer goes up
    or down with the first of them. ONNX Runtime then computes the network without
    its optimisations from inputs that differ in their last digit, and how far that moves its outputs is the measure.
    """
    allowed = tolerance_for(tolerance, network, dtype)
    if tolerance != "auto" or dtype != "float32" or not examples or error <= allowed:
        return allowed
    most = allowed * (_MOST_QUANTIZED if is_quantized(network) else _MOST_SENSITIVE)
    if not error <= most:
        return allowed
    moved = _sensitivity(network, num_threads, examples)
    _log.info("ONNX Runtime's own outputs differ by %.2g when inputs change in their last digit", moved)
    return max(allowed, min(_ROUNDINGS * moved, most))


def says_nothing(error: float, network: Path, num_threads: int, inputs: Arrays) -> bool:
    """Whether an error on some inputs is one of the inputs: ONNX Runtime itself does not give two digits twice.

    Values far beyond those that a network is made for may grow from layer to layer until only rounding is left.
    """
    return error > _FEW_DIGITS and _sensitivity(network, num_threads, [inputs]) > _FEW_DIGITS


def _sensitivity(network: Path, num_threads: int, examples: Sequence[Arrays]) -> float:
    """How far ONNX Runtime's own outputs are apart, without its optimisations and with inputs of another last digit."""
    beside = partial(reference_inference, network, num_threads, exact=True, optimized=False)
    expected = expected_of(network, num_threads, examples)
    return deviation_of(beside, _moved([*examples] * _NUM_MOVED), [*expected] * _NUM_MOVED).max_rel_error


def _moved(examples: Sequence[Arrays]) -> list[Arrays]:
    """The inputs with floats that are one unit of their last place larger or smaller."""
    signs = np.random.default_rng(0)

    def moved(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if values.dtype.kind != "f":
            return values
        towards = signs.choice([-np.inf, np.inf], values.shape).astype(values.dtype)
        return np.asarray(np.nextafter(values, towards))

    return [{name: moved(values) for name, values in inputs.items()} for inputs in examples]


def what_to_do(network: Path, num_threads: int, examples: Sequence[Arrays], tolerance: float) -> str:
    """What a user whose model's outputs differ from ONNX Runtime's should know, and do."""
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
    of_finite = (outputs for inputs, outputs in zip(examples, first, strict=True) if is_finite(inputs))
    if not all(map(is_finite, of_finite)):
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

    def with_infinities(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        info = np.finfo(array.dtype)
        return np.where(array >= info.max, np.inf, np.where(array <= info.min, -np.inf, array.astype(np.float64)))

    found = []
    for name, values in expected.items():
        if values.dtype.kind != "f" or actual[name].shape != values.shape:
            continue
        given, wanted = with_infinities(actual[name]), with_infinities(values)
        passes = np.isfinite(wanted) | np.isnan(given) | (given == wanted)
        if not passes.all():
            found.append(name)
    return found


Computed = Arrays | AnsorMlflowError | None
"""Outputs for broken inputs, or why there are none; None where nothing can be broken."""


def with_broken(
    compute: Callable[[Sequence[Arrays]], Sequence[Arrays]], examples: Sequence[Arrays], inputs: Arrays
) -> tuple[Sequence[Arrays], Computed]:
    """The outputs for some inputs, and those for others with NaN and infinities in them: of one process, which takes
    half as long as two, unless the broken ones end it.
    """
    if (tried := broken(inputs)) is None:
        return compute(examples), None
    try:
        *outputs, of_broken = compute([*examples, tried])
    except AnsorMlflowError as err:
        return compute(examples), err
    return outputs, of_broken


def require_broken_stays_broken(expected: Computed, computed: Computed, network: Path) -> None:
    """Compares what ONNX Runtime and a model compute from NaN and infinities.

    What ONNX Runtime refuses, as where a NaN becomes an index, is not compared.
    """
    if expected is None or computed is None:
        return
    if isinstance(expected, AnsorMlflowError):
        _log.warning("NaN and infinities are not tried: %s", expected)
        return
    if isinstance(computed, UserInputError):  # a model that refuses them hides none
        _log.info("NaN and infinities are refused: %s", computed)
        return
    if isinstance(computed, AnsorMlflowError):
        raise computed
    if not (lost := swallowing(computed, expected)):
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


# -- what a quantised network loses ------------------------------------------------------------------------------------

Loss = Callable[[Sequence[Arrays], Sequence[Arrays]], float]
"""Takes the outputs of the float network and those of the quantised one, by name, for several inputs; 0 is no loss."""


def cosine(floats: Sequence[Arrays], quantized: Sequence[Arrays]) -> float:
    """One less the cosine of the angle between both outputs, the mean over the inputs; of the worst output."""
    return _worst(floats, quantized, lambda a, b: float(np.mean([_angle(*pair) for pair in zip(a, b, strict=True)])))


def relative_error(floats: Sequence[Arrays], quantized: Sequence[Arrays]) -> float:
    """The root mean square of the difference over that of the float outputs, all inputs together; of the worst."""
    return _worst(floats, quantized, lambda a, b: _length(a - b) / max(_length(a), np.finfo(np.float64).tiny))


def disagreement(floats: Sequence[Arrays], quantized: Sequence[Arrays]) -> float:
    """The share of rows whose largest class is another one; of the worst output with classes along its last axis."""
    return _worst(floats, quantized, lambda a, b: float(np.mean(a.argmax(-1) != b.argmax(-1))))


LOSSES: dict[str, Loss] = {loss.__name__: loss for loss in (cosine, relative_error, disagreement)}


def find_loss(name: str) -> Loss:
    """One of `LOSSES`, or a function of the user's, `module:function`, which takes and returns what they do."""
    if name in LOSSES:
        return LOSSES[name]
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except Exception as err:
        raise UserInputError(
            f"quantize_loss={name}: there is no such function ({one_line(err)}); give one of {', '.join(LOSSES)}, or "
            "module:function"
        ) from err
    return lambda floats, quantized: _number(name, found, floats, quantized)


def _number(name: str, loss: Loss, floats: Sequence[Arrays], quantized: Sequence[Arrays]) -> float:
    try:
        return float(loss(floats, quantized))
    except Exception as err:
        raise UserInputError(
            f"quantize_loss={name}: it ended with {one_line(err)}; it takes two lists of outputs by name, and returns "
            "a number"
        ) from err


def _worst(
    floats: Sequence[Arrays],
    quantized: Sequence[Arrays],
    loss: Callable[[npt.NDArray[np.float64], npt.NDArray[np.float64]], float],
) -> float:
    """The largest loss of the outputs, each stacked over the inputs; a NaN that the float network has not is all."""
    found = []
    for name, first in floats[0].items():
        if first.dtype.kind not in "fiu" or first.size == 0:
            continue
        a, b = (np.stack([_as_floats(arrays[name]) for arrays in outputs]) for outputs in (floats, quantized))
        known = np.isfinite(a)
        found.append(loss(np.where(known, a, 0.0), np.where(known, b, 0.0)) if np.isfinite(b[known]).all() else np.inf)
    return max(found, default=0.0)


def _as_floats(array: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    return np.atleast_1d(array).astype(np.float64)


def _angle(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> float:
    lengths = _length(a) * _length(b)
    return 1.0 - float(np.vdot(a, b)) / lengths if lengths else float(_length(a) != _length(b))


def _length(values: npt.NDArray[np.float64]) -> float:
    return float(np.linalg.norm(values.ravel()))
