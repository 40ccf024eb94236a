"""How long each part of a network takes, in its library and in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from ansor_mlflow.files import scratch_directory
from ansor_mlflow.measuring.timing import call_once
from ansor_mlflow.processes import call_in_process
from ansor_mlflow.tensors import NetworkShapes, Padded, Sized, all_sizes, random_inputs

if TYPE_CHECKING:
    from ansor_mlflow.lowering import LoweredNetwork
    from ansor_mlflow.model import LibraryEntry, PartEntry

Examples = Sequence[Mapping[str, npt.NDArray[Any]]]
"""An input of each size of a network."""

_NUM_CALLS = 9


def time_parts(library: Path, network: Padded, entry: LibraryEntry, examples: Examples) -> list[float]:
    """Median seconds of each part of a network in a process of its own, as `entry` lists them."""
    seconds: list[float] = call_in_process(call_once, partial(_library_call, library, network, entry, examples))
    return seconds


def time_parts_in_onnxruntime(lowered: LoweredNetwork, network: Sized, num_threads: int, seed: int) -> list[float]:
    """Median seconds of each part where ONNX Runtime computes TVM's parts, too, on seeded inputs."""
    from ansor_mlflow.model import write_all_parts

    sizes = all_sizes(network)
    with scratch_directory() as directory:
        parts = write_all_parts(lowered, Path(directory))
        call = partial(_onnxruntime_call, Path(directory), parts, sizes, num_threads, seeded_examples(network, seed))
        seconds: list[float] = call_in_process(call_once, call)
    return seconds


def seeded_examples(network: Sized, seed: int) -> Examples:
    """A seeded input of each size of a network."""
    return [random_inputs(size.inputs, seed) for size in all_sizes(network)]


def _library_call(library: Path, network: Padded, entry: LibraryEntry, examples: Examples) -> Callable[[], list[float]]:
    from ansor_mlflow.model import open_library

    model = open_library(library, network, entry)
    return lambda: _medians(lambda: [s for inputs in examples for s in model.seconds_of_parts(inputs)])


def _onnxruntime_call(
    directory: Path, parts: Sequence[PartEntry], sizes: Sequence[NetworkShapes], num_threads: int, examples: Examples
) -> Callable[[], list[float]]:
    from ansor_mlflow.model import PartRunner, open_sessions

    sessions = open_sessions(directory, parts, num_threads)
    runners = [
        PartRunner([part for part in parts if part.size == number], {}, sessions, size, None)
        for number, size in enumerate(sizes)
    ]

    def seconds() -> list[float]:
        for runner, inputs in zip(runners, examples, strict=True):
            runner(*inputs.values())
        return [s for runner in runners for s in runner.seconds]

    return lambda: _medians(seconds)


def _medians(seconds: Callable[[], list[float]]) -> list[float]:
    """The median of each part over several calls."""
    return [median(of_part) for of_part in zip(*(seconds() for _ in range(_NUM_CALLS)), strict=True)]
