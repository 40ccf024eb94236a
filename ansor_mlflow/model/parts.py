"""The parts of a network that TVM cannot compute alone: how a library and ONNX Runtime take turns.

A library has a function for each part of TVM's; what stays with ONNX Runtime lies beside it as ONNX files.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from ansor_mlflow.errors import UserInputError, one_line
from ansor_mlflow.names import part_file
from ansor_mlflow.tensors import NetworkShapes, TensorSpec

if TYPE_CHECKING:
    from ansor_mlflow.lowering import LoweredNetwork

_ALIGNMENT_BYTES = 64  # alignment that generated code expects of its arguments (TVM's `kAllocAlignment`)
RUNTIME_TITLES = {"tvm": "TVM", "onnxruntime": "ONNX Runtime", "openvino": "OpenVINO"}
EXPORTED_KINDS = "biuf"
"""NumPy's kinds of types that it shares through DLPack; not among them are those of ml_dtypes, such as bfloat16."""
GIVEN_OUTPUTS = "main_with_outputs"
"""The function of a library that takes tensors for the outputs behind the inputs, where it has such a one."""

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class PartEntry:
    """A part of a model's network, in the order in which they run."""

    runs_in: Literal["tvm", "onnxruntime", "openvino"]
    name: str  # the function in the library, or the file beside it
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    operators: dict[str, int]  # number of nodes of each operator
    flops_share: float  # estimated share of the operations of the network, in this size, from 0 to 1
    reasons: dict[str, str] = field(default_factory=dict)  # why operators stay with ONNX Runtime
    size: int = 0  # which of the network's sizes it is of
    latency_ms: float | None = None  # median time of a call, where it was measured
    latency_share: float | None = None
    """Share of the time of the network, in this size, from 0 to 1, where it was measured."""

    def __str__(self) -> str:
        shares = f"{self.flops_share:.1%} of the operations"
        if self.latency_share is not None:
            shares += f", {self.latency_share:.1%} of the time"
        if self.runs_in == "tvm":
            return f"TVM computes {_nodes(sum(self.operators.values()))}: {shares}"
        title = RUNTIME_TITLES[self.runs_in]
        if self.flops_share == 1.0 and len(reasons := {*self.reasons.values()}) == 1:
            return f"{title} computes all {_nodes(sum(self.operators.values()))} ({reasons.pop()})"
        operators: dict[str, list[str]] = defaultdict(list)
        for operator, reason in self.reasons.items():
            operators[reason].append(operator)
        clauses = ", ".join(f"{' and '.join(of_reason)} ({reason})" for reason, of_reason in operators.items())
        beside = sum(number for operator, number in self.operators.items() if operator not in self.reasons)
        among = f", and {_nodes(beside)} between operators that stay" if beside else ""
        return f"{title} computes {clauses}{among}: {shares}"


def _nodes(number: int) -> str:
    return f"{number} node{'s' if number > 1 else ''}"


def fallback_clauses(parts: Sequence[PartEntry]) -> list[str]:
    """What TVM does not compute and why, in a clause for each part that differs from the others."""
    return list(dict.fromkeys(str(part) for part in parts if part.runs_in != "tvm"))


def part_entries(lowered: LoweredNetwork) -> tuple[PartEntry, ...]:
    """Describes the parts of a network; none where the library has one function alone."""
    flops: dict[int, float] = defaultdict(float)
    for part in lowered.parts:
        flops[part.size] += part.graph.flops
    return tuple(
        PartEntry(
            runs_in=part.graph.runs_in,
            name=part.function or part_file(number),
            inputs=tuple(value.name for value in part.graph.model.graph.input),
            outputs=tuple(value.name for value in part.graph.model.graph.output),
            operators=part.graph.operators,
            flops_share=part.graph.flops / flops[part.size] if flops[part.size] else 1.0,
            reasons=dict(part.graph.reasons),
            size=part.size,
        )
        for number, part in enumerate(lowered.parts)
    )


def timed_parts(parts: Sequence[PartEntry], seconds: Sequence[float]) -> tuple[PartEntry, ...]:
    """Parts with how long each takes in a call, and its share of the time of its size."""
    total: dict[int, float] = defaultdict(float)
    for part, s in zip(parts, seconds, strict=True):
        total[part.size] += s
    return tuple(
        replace(part, latency_ms=s * 1e3, latency_share=s / total[part.size])
        for part, s in zip(parts, seconds, strict=True)
    )


def write_parts(lowered: LoweredNetwork, directory: Path) -> None:
    """Writes what stays with ONNX Runtime to the directory of a library."""
    from ansor_mlflow.networks import write_onnx

    directory.mkdir(parents=True, exist_ok=True)
    for part, entry in zip(lowered.parts, part_entries(lowered), strict=True):
        if entry.runs_in == "onnxruntime":
            write_onnx(part.graph.model, directory / entry.name)


def write_all_parts(lowered: LoweredNetwork, directory: Path) -> tuple[PartEntry, ...]:
    """Writes all parts as ONNX files, and describes them as if none were TVM's."""
    from ansor_mlflow.networks import write_onnx

    entries = []
    for number, (part, entry) in enumerate(zip(lowered.parts, part_entries(lowered), strict=True)):
        write_onnx(part.graph.model, directory / part_file(number))
        entries.append(replace(entry, runs_in="onnxruntime", name=part_file(number)))
    return tuple(entries)


def has_library(parts: Sequence[PartEntry]) -> bool:
    """Whether TVM computes anything of a network."""
    return not parts or any(part.runs_in == "tvm" for part in parts)


def computed_by(parts: Sequence[PartEntry]) -> str:
    """The runtimes that compute a network, separated by commas."""
    return ",".join(sorted({part.runs_in for part in parts}, reverse=True)) or "tvm"


class PartRunner:
    """Runs the parts of a network one after the other, for one call at a time; the device is None where ONNX Runtime
    runs all parts.

    A tensor is handed over without a copy where the memory is aligned as generated code wants it.
    """

    def __init__(
        self,
        parts: Sequence[PartEntry],
        functions: Mapping[str, Any],
        sessions: Mapping[str, Any],
        network: NetworkShapes,
        device: Any,
    ) -> None:
        self._inputs = [spec.name for spec in network.inputs]
        self._outputs = [spec.name for spec in network.outputs]
        self._device = device
        self._is_on_gpu = device is not None and device.type != "cpu"
        self._steps = [
            partial(self._run_function, functions[part.name], part)
            if part.runs_in == "tvm"
            else partial(self._run_session, sessions[part.name], part)
            for part in parts
        ]
        self._values: dict[str, Any] = {}
        self.seconds = [0.0] * len(parts)  # how long each part took in the last call

    def __call__(self, *tensors: Any) -> list[Any]:
        """Runs the network on TVM's tensors; an output is a tensor of TVM's or an array."""
        self._values = dict(zip(self._inputs, tensors, strict=True))
        for number, step in enumerate(self._steps):
            start = time.perf_counter()
            step()
            if self._is_on_gpu:
                self._device.sync()  # a GPU may only have begun
            self.seconds[number] = time.perf_counter() - start
        outputs = [self._values[name] for name in self._outputs]
        self._values = {}
        return outputs

    def _run_function(self, function: Any, part: PartEntry) -> None:
        result = function(*(self._tensor(name) for name in part.inputs))
        self._values.update(zip(part.outputs, outputs_of_call(result), strict=True))

    def _run_session(self, session: Any, part: PartEntry) -> None:
        arrays = {name: as_array(self._values[name]) for name in part.inputs}
        try:
            results = session.run(part.outputs, arrays)
        except Exception as err:  # runtimes have error classes without a common base
            raise UserInputError(
                f"{RUNTIME_TITLES[part.runs_in]} cannot compute its part of the network: {one_line(err)}; give other "
                "inputs"
            ) from err
        self._values.update(zip(part.outputs, results, strict=True))

    def _tensor(self, name: str) -> Any:
        value = self._values[name]
        if isinstance(value, np.ndarray):
            value = self._values[name] = as_tensor(value, self._device)
        return value


def outputs_of_call(result: Any) -> Sequence[Any]:
    """The outputs of a function of TVM's, which returns one tensor alone, and several as a sequence of its own.

    To iterate over that takes three times as long, as TVM says where it ends by an error.
    """
    if isinstance(result, list):
        return result
    return [result[place] for place in range(len(result))] if isinstance(result, Sequence) else [result]


def as_array(tensor: Any) -> Array:
    """An array of a tensor of TVM's, in the same memory where that can be; an array as it is."""
    if isinstance(tensor, np.ndarray):
        return tensor
    if tensor.device.dlpack_device_type() == 1:
        try:
            return np.from_dlpack(tensor)
        except (RuntimeError, BufferError):
            pass  # it is of a type that NumPy does not share
    array: Array = tensor.numpy()
    return array


def as_tensor(array: Array, device: Any) -> Any:
    """A tensor of TVM's of an array, in the same memory where generated code may read it."""
    from tvm import runtime

    if device != runtime.cpu() or array.dtype.kind not in EXPORTED_KINDS:
        return runtime.tensor(array, device)
    if not is_aligned(array):
        copy = aligned_array(TensorSpec("", array.shape, str(array.dtype)))
        np.copyto(copy, array)
        array = copy
    return runtime.from_dlpack(array)


def aligned_array(spec: TensorSpec) -> Array:
    """An array in memory that generated code may read; its elements are not set."""
    dtype = np.dtype(spec.dtype)
    num_bytes = math.prod(spec.shape) * dtype.itemsize
    memory = np.empty(num_bytes + _ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT_BYTES
    return memory[start : start + num_bytes].view(dtype).reshape(spec.shape)


def is_aligned(array: Array) -> bool:
    """Whether generated code may read an array where it is. NumPy exports none that is read-only."""
    flags = array.flags
    return bool(flags.c_contiguous and flags.writeable and array.ctypes.data % _ALIGNMENT_BYTES == 0)
