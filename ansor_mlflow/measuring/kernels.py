"""How long each part of a network takes, in its library and in ONNX Runtime."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from ansor_mlflow.files import scratch_directory
from ansor_mlflow.names import PART_WRITER
from ansor_mlflow.processes import in_child_process
from ansor_mlflow.tensors import NetworkShapes, Padded, Sized, all_sizes, random_inputs

if TYPE_CHECKING:
    from ansor_mlflow.lowering import LoweredNetwork
    from ansor_mlflow.model import LibraryEntry, PartEntry, TunedModel

Examples = Sequence[Mapping[str, npt.NDArray[Any]]]
"""An input of each size of a network."""

_NUM_CALLS = 9


def time_parts(library: Path, network: Padded, entry: LibraryEntry, examples: Examples) -> list[float]:
    """Median seconds of each part of a network in a process of its own, as `entry` lists them."""
    return in_child_process(_time_parts, (library, network, entry, examples))


def time_parts_in_onnxruntime(lowered: LoweredNetwork, network: Sized, num_threads: int, seed: int) -> list[float]:
    """Median seconds of each part where ONNX Runtime computes TVM's parts, too, on seeded inputs."""
    from ansor_mlflow.model import write_all_parts

    sizes = all_sizes(network)
    with scratch_directory() as directory:
        parts = write_all_parts(lowered, Path(directory))
        work = (Path(directory), parts, sizes, num_threads, seeded_examples(network, seed))
        return in_child_process(_time_parts_in_onnxruntime, work)


def seeded_examples(network: Sized, seed: int) -> Examples:
    """A seeded input of each size of a network."""
    return [random_inputs(size.inputs, seed) for size in all_sizes(network)]


def _time_parts(work: tuple[Path, Padded, LibraryEntry, Examples]) -> list[float]:
    from ansor_mlflow.model import load_runtime_alone, open_library

    library, network, entry, examples = work
    load_runtime_alone(entry.fingerprint.platform)
    model = open_library(library, network, entry)
    return _medians(lambda: [s for inputs in examples for s in model.seconds_of_parts(inputs)])


def _time_parts_in_onnxruntime(
    work: tuple[Path, Sequence[PartEntry], Sequence[NetworkShapes], int, Examples],
) -> list[float]:
    from ansor_mlflow.model import PartRunner, open_sessions

    directory, parts, sizes, num_threads, examples = work
    sessions = open_sessions(directory, parts, num_threads, may_spin=False)  # as beside parts of TVM's
    runners = [
        PartRunner([part for part in parts if part.size == number], {}, sessions, size, None)
        for number, size in enumerate(sizes)
    ]

    def seconds() -> list[float]:
        for runner, inputs in zip(runners, examples, strict=True):
            runner(*inputs.values())
        return [s for runner in runners for s in runner.seconds]

    return _medians(seconds)


def _medians(seconds: Callable[[], list[float]]) -> list[float]:
    """The median of each part over several calls."""
    return [median(of_part) for of_part in zip(*(seconds() for _ in range(_NUM_CALLS)), strict=True)]


_NUM_TURNS, _CALLS_IN_A_TURN = 5, 5
_TURN_S = 1.0
"""A slow network is called less often in a turn."""
_OF_TVM = "vm.builtin."
"""Begins the names of functions that allocate memory and pass values on."""
_PACKED = "_prepacked"
"""Ends the name of a function that reads constants in an order of its own."""


@dataclass(frozen=True, kw_only=True)
class KernelTime:
    """A function of the library."""

    name: str
    num_calls: int
    """In a call of the network in each of its sizes."""
    us: float
    """Microseconds of all these calls, the median over calls of the network."""
    estimated_us: float | None
    """The same as its record says; None where it has none."""

    @property
    def difference_us(self) -> float:
        """By how much it takes longer than its record says; 0 where it has none."""
        return 0.0 if self.estimated_us is None else self.us - self.estimated_us


@dataclass(frozen=True, kw_only=True)
class KernelTimes:
    """Where the time of a network goes."""

    latency_us: float
    """Latency of one uninstrumented call per input size, in µs."""
    kernels: tuple[KernelTime, ...]
    """In the order of their first calls."""

    @property
    def between_us(self) -> float:
        """What no kernel takes: memory, launches, the way into the network and out of it, and ONNX Runtime's parts."""
        return max(0.0, self.latency_us - sum(kernel.us for kernel in self.kernels))

    @property
    def without_record_us(self) -> float:
        """What kernels without a record take."""
        return sum(kernel.us for kernel in self.kernels if kernel.estimated_us is None)

    @property
    def furthest(self) -> list[KernelTime]:
        """The kernels, the one that is furthest from its record first."""
        return sorted(self.kernels, key=lambda kernel: -abs(kernel.difference_us))

    def to_dict(self) -> dict[str, object]:
        """The figures, for `kernels.json`, the kernel that is furthest from its record first."""
        return {
            "latency_us": self.latency_us,
            "between_us": self.between_us,
            "without_record_us": self.without_record_us,
            "kernels": [{**asdict(kernel), "difference_us": kernel.difference_us} for kernel in self.furthest],
        }


def time_kernels(library: Path, network: Padded, entry: LibraryEntry, examples: Examples) -> KernelTimes:
    """Times the kernels of a library in a process of its own."""
    return in_child_process(_time_kernels, (library, network, entry, examples))


def _time_kernels(work: tuple[Path, Padded, LibraryEntry, Examples]) -> KernelTimes:
    from ansor_mlflow.model import load_runtime_alone, open_library

    library, network, entry, examples = work
    load_runtime_alone(entry.fingerprint.platform)
    return _time(open_library(library, network, entry), examples)


def _time(model: TunedModel, examples: Examples) -> KernelTimes:
    """Calls with and without somebody who looks on, some of each in turns: the machine's speed drifts."""

    def call() -> float:
        started = time.perf_counter()
        for inputs in examples:
            model.run(inputs)
        return time.perf_counter() - started

    def look_on() -> dict[str, tuple[int, float]]:
        return _by_name(function for inputs in examples for function in model.seconds_of_kernels(inputs))

    first_s, _ = call(), look_on()  # they take the memory
    in_a_turn = min(_CALLS_IN_A_TURN, max(1, int(_TURN_S / first_s)))
    latencies, calls = [], []
    for _ in range(_NUM_TURNS):
        latencies += [call() for _ in range(in_a_turn)]
        calls += [look_on() for _ in range(in_a_turn)]
    estimates = model.entry.coverage.get("kernels_us", {})
    kernels = tuple(
        KernelTime(
            name=name,
            num_calls=num_calls,
            us=median(call[name][1] for call in calls) * 1e6,
            estimated_us=None if (estimate := estimates.get(name)) is None else num_calls * estimate,
        )
        for name, (num_calls, _) in calls[0].items()
    )
    return KernelTimes(latency_us=median(latencies) * 1e6, kernels=kernels)


def _by_name(timed: Iterable[tuple[str, float]]) -> dict[str, tuple[int, float]]:
    found: dict[str, tuple[int, float]] = {}
    for function, seconds in timed:
        if not function.startswith(_OF_TVM):
            name = function.partition(PART_WRITER)[0].removesuffix(_PACKED)
            num_calls, total = found.get(name, (0, 0.0))
            found[name] = num_calls + 1, total + seconds
    return found
