"""The programs that `evaluate` runs and times, each in a child process: a factory makes the call.

Imports are inside the factories, so that a process loads only what its contender needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ansor_mlflow.errors import UserInputError, one_line
from ansor_mlflow.tensors import Arrays, Padded

if TYPE_CHECKING:
    from ansor_mlflow.model import LibraryEntry

Inference = Callable[[Mapping[str, npt.NDArray[Any]]], Arrays]
"""Runs a network once: inputs by name to outputs by name."""
MakeInference = Callable[[], Inference]


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


def reference_inference(network: Path, num_threads: int, *, exact: bool = False) -> Inference:
    """ONNX Runtime, as `explained`."""
    from ansor_mlflow.measuring.reference import ReferenceSession

    advice = "; export the model again"
    return explained("ONNX Runtime", lambda: ReferenceSession(network, num_threads, exact=exact).run, advice)


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
    from ansor_mlflow.model import open_library

    return open_library(library, network, entry).run


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
