"""The programs that are compared, each in a child process, and what their times say.

A factory makes the call. Imports are inside the factories, so that a process loads only what its contender needs. ONNX
Runtime is the reference for correctness, and the baseline for speed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ansor_mlflow.device import CPU, Platform
from ansor_mlflow.errors import UserInputError, one_line
from ansor_mlflow.settings import Dtype
from ansor_mlflow.tensors import Arrays, Padded, TensorSpec

if TYPE_CHECKING:
    from onnx import NodeProto

    from ansor_mlflow.model import LibraryEntry

Inference = Callable[[Mapping[str, npt.NDArray[Any]]], Arrays]
"""Runs a network once: inputs by name to outputs by name."""
MakeInference = Callable[[], Inference]
_ROUNDING = {"QAttention", "QGemm", "QuantizeLinear"}
_ROUNDS_TO_8_BITS = 4
"""Accuracy level of MatMulNBits (ContribOperators.md of ONNX Runtime) that rounds what weights are multiplied with."""
_RANDOM = {"Bernoulli", "BiasDropout", "BitmaskDropout", "Multinomial"}


@dataclass(frozen=True, kw_only=True)
class RivalTask:
    """What a rival is to compute, and how."""

    network: Path
    """The user's ONNX file."""
    outputs: tuple[str, ...]
    """Names, in their order."""
    num_threads: int
    program: Path | None = None
    """The exported program of PyTorch that the file came from, if there is one."""
    inputs: tuple[TensorSpec, ...] = ()
    """The inputs, with the sizes that a program is compiled for."""
    platform: Platform = CPU
    """The kind of device that it runs on."""
    dtype: Dtype = "float32"
    """What the model computes float32 in; a rival that can takes it, too."""


@dataclass(frozen=True, kw_only=True)
class Rival:
    """A runtime that a user could have taken instead."""

    title: str
    """The name that users read."""
    package: str
    """The Python package that must be installed, whose version is logged."""
    load: Callable[[RivalTask], Callable[[Mapping[str, npt.NDArray[Any]]], Arrays]]
    """Makes what computes the outputs, by name, of inputs, by name; called in a process that does nothing else. An
    error of any class says why it cannot."""
    to_install: str = ""
    """What pip is to install, where that is more than the package."""
    needs_program: bool = False
    """Whether it runs programs of PyTorch, and no ONNX file."""
    has_bfloat16: bool = False
    """Whether it computes in bfloat16 where a task asks for it."""


def timed_call(make_inference: MakeInference, examples: Sequence[Arrays]) -> Callable[[], Any]:
    """A call that runs the network on all examples: one of each of its sizes."""
    run = make_inference()
    if len(examples) == 1:
        return partial(run, examples[0])
    return lambda: [run(inputs) for inputs in examples]


def outputs_call(
    make_inference: MakeInference, examples: Sequence[Mapping[str, npt.NDArray[Any]]]
) -> Callable[[], list[Any]]:
    """A call that returns the outputs for several inputs."""
    run = make_inference()
    return lambda: [run(inputs) for inputs in examples]


def tuned_inference(directory: Path) -> Inference:
    """The model as its users load it."""
    from ansor_mlflow.model import LoadOptions, Manifest, load_package

    manifest = Manifest.read(directory)
    return load_package(directory, manifest, LoadOptions(device=manifest.platform.name)).run


def reference_inference(network: Path, num_threads: int, *, exact: bool = False, optimized: bool = True) -> Inference:
    """ONNX Runtime, as `explained`."""
    load = partial(ReferenceSession, network, num_threads, exact=exact, optimized=optimized)
    return explained("ONNX Runtime", lambda: load().run, "; export the model again")


def explained(runtime: str, load: Callable[[], Inference], advice: str = "") -> Inference:
    """A runtime whose errors have no class in common: what it cannot load, or compute, is a `UserInputError`."""
    try:
        run = load()
    except Exception as err:
        raise UserInputError(f"{runtime} cannot load the network: {one_line(err)}{advice}") from err

    def run_explained(inputs: Mapping[str, npt.NDArray[Any]]) -> Arrays:
        try:
            return run(inputs)
        except Exception as err:
            raise UserInputError(
                f"{runtime} cannot compute the network from the inputs: {one_line(err)}; give others"
            ) from err

    return run_explained


def library_inference(library: Path, network: Padded, entry: LibraryEntry) -> Inference:
    """A library whose digest was checked, or that was just built."""
    from ansor_mlflow.model import load_runtime_alone, open_library

    load_runtime_alone(entry.fingerprint.platform)
    return open_library(library, network, entry).run


# -- ONNX Runtime ------------------------------------------------------------------------------------------------------


class ReferenceSession:
    """A network in ONNX Runtime: the reference on the CPU, a rival where the model runs.

    With `exact`, sums of products of 8 bits are exact, and nothing is rounded that the network does not round: ONNX
    Runtime's fastest kernels for CPUs without VNNI saturate in 16 bits, and those for weights of 4 bits round what they
    are multiplied with to 8. Without `optimized`, every layer is computed as it stands in the file. A RuntimeError says
    that it has nothing to run there with.
    """

    def __init__(
        self,
        network: Path,
        num_threads: int,
        *,
        exact: bool = False,
        optimized: bool = True,
        platform: Platform = CPU,
    ) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = num_threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        if not optimized:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        if exact:
            options.add_session_config_entry("session.x64quantprecision", "1")
            options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")  # float32
        provider, settings = platform.provider, dict(platform.provider_settings)
        self._session = onnxruntime.InferenceSession(str(network), options, providers=[(provider, settings)])
        if provider not in self._session.get_providers():  # it takes the CPU instead, and only warns
            raise RuntimeError(f"this build has no {provider}; pip install onnxruntime-gpu in its place")
        self._outputs = [output.name for output in self._session.get_outputs()]

    def run(self, inputs: Mapping[str, npt.NDArray[Any]]) -> Arrays:
        """Runs the network once; returns the outputs by name."""
        return dict(zip(self._outputs, self._session.run(None, dict(inputs)), strict=True))


def _load(task: RivalTask) -> Callable[[Mapping[str, npt.NDArray[Any]]], Arrays]:
    return ReferenceSession(task.network, task.num_threads, platform=task.platform).run


ONNXRUNTIME = Rival(title="ONNX Runtime", package="onnxruntime", load=_load)


def is_quantized(network: Path) -> bool:
    """Whether the network of an ONNX file rounds values to 8 bits between its layers; weights do not count."""
    return any(map(_rounds, _nodes(network)))


def operators_of(network: Path) -> set[str]:
    """The operators of an ONNX file."""
    return {node.op_type for node in _nodes(network)}


def random_operators(network: Path) -> list[str]:
    """The operators of an ONNX file that draw random numbers."""
    return list(dict.fromkeys(node.op_type for node in _nodes(network) if _is_random(node)))


def _nodes(network: Path) -> Iterator[NodeProto]:
    """All nodes of an ONNX file, also those in branches and functions."""
    import onnx

    from ansor_mlflow.graphs import nodes_of

    model = onnx.load(network, format="protobuf", load_external_data=False)
    for nodes in (model.graph.node, *(function.node for function in model.functions)):
        yield from nodes_of(nodes)


def _rounds(node: NodeProto) -> bool:
    if node.op_type == "MatMulNBits":
        return any(
            attribute.name == "accuracy_level" and attribute.i == _ROUNDS_TO_8_BITS for attribute in node.attribute
        )
    return node.op_type in _ROUNDING or node.op_type.startswith(("DynamicQuantize", "QLinear"))


def _is_random(node: NodeProto) -> bool:
    if node.op_type == "Dropout":
        return len(node.input) > 2 and node.input[2] != ""
    return node.op_type in _RANDOM or node.op_type.startswith(("RandomNormal", "RandomUniform"))


# -- which is faster ---------------------------------------------------------------------------------------------------


FIRST_LOOK = 4
"""Turns before the first decision."""


class Verdict(str, Enum):
    """What the turns say."""

    FASTER = "faster"
    """The candidate is faster by more than the margin."""
    NOT_FASTER = "not_faster"
    """The candidate is faster by the margin at most, or slower."""
    OPEN = "open"
    """The interval holds the margin: more turns are needed."""


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """A ratio of latencies, candidate over champion, with the interval that it lies in."""

    estimate: float
    lower: float
    upper: float
    num_turns: int


@dataclass(frozen=True, kw_only=True)
class SequentialTest:
    """A paired t-test on the logarithms of ratios, looked at after 4, 8, 16, … turns and after the last.

    A verdict is as sure as `confidence`; `margin` is the share of the champion's latency that the candidate must save.

    The ratio of a turn is that of two medians that were measured one after the other, so that what slows down both
    cancels out. The mean of their logarithms has the interval x̄ ± t(n-1) · s/√n (Student, Biometrika 6, 1908).

    Who looks repeatedly and stops at the first success is wrong more often than each look promises. Each of the k
    looks therefore uses the error (1 - confidence) / k; by Bonferroni's inequality one of them is wrong in at most
    1 - confidence of the cases, on either side, wherever the test stops. Times that are not normal do no harm: as both
    programs run on the same machine, the noise of a logarithm is symmetric, and rare outliers widen the interval.
    """

    confidence: float
    margin: float
    max_turns: int

    @property
    def looks(self) -> tuple[int, ...]:
        """The numbers of turns after which the test may stop."""
        doubled = (FIRST_LOOK << power for power in range(self.max_turns.bit_length()))
        return (*(look for look in doubled if look < self.max_turns), self.max_turns)

    def ratio(self, candidate: Sequence[float], champion: Sequence[float]) -> Ratio:
        """The ratio of two latencies from two turns at least; the medians of each turn, in any unit."""
        logs = np.log(np.asarray(candidate) / np.asarray(champion))
        error = (1 - self.confidence) / len(self.looks)
        mean, half = float(logs.mean()), _quantile(error, len(logs) - 1) * float(logs.std(ddof=1)) / len(logs) ** 0.5
        return Ratio(
            estimate=math.exp(mean), lower=math.exp(mean - half), upper=math.exp(mean + half), num_turns=len(logs)
        )

    def verdict(self, ratio: Ratio) -> Verdict:
        """What the interval of a look says."""
        if ratio.upper < 1 - self.margin:
            return Verdict.FASTER
        return Verdict.NOT_FASTER if ratio.lower >= 1 - self.margin else Verdict.OPEN


@cache
def _quantile(error: float, degrees: int) -> float:
    """The value that Student's t exceeds with a probability of `error`."""
    from scipy import stats

    return float(stats.t.isf(error, degrees))
