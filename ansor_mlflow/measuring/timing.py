"""Measures callables against each other.

Every contender runs in child processes of its own, because idle thread pools that spin slow down their neighbours, and
in alternating turns, because the machine's speed drifts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ansor_mlflow.measuring.noise import MachineNoise, Turn, watched
from ansor_mlflow.processes import in_child_process

MakeCall = Callable[[], Callable[[], Any]]
"""Prepares a contender and returns the call to time. Must be picklable: it is called in the child process."""

_WARM_UP_S = 0.5
_MEASURE_S = 1.5
_MIN_SAMPLES = 10
_SLOW_S = 1.0
"""A call that takes longer is warm after one, and needs only one sample a turn."""


@dataclass(frozen=True)
class Latency:
    """Latency of one contender over all turns, in milliseconds."""

    samples_ms: npt.NDArray[np.float64]

    @property
    def median_ms(self) -> float:
        return float(np.median(self.samples_ms))

    @property
    def p90_ms(self) -> float:
        return float(np.percentile(self.samples_ms, 90))

    @property
    def std_ms(self) -> float:
        return float(np.std(self.samples_ms))


def measure_in_turns(
    contenders: Mapping[str, MakeCall], turns: int, noise: MachineNoise | None = None, measure_s: float = _MEASURE_S
) -> dict[str, Latency]:
    """Times every contender once per turn, each time in a fresh process."""
    calls = {name: partial(turn_in_process, make_call, measure_s) for name, make_call in contenders.items()}
    return take_turns(calls, turns, noise or MachineNoise())


def take_turns(contenders: Mapping[str, Turn], turns: int, noise: MachineNoise) -> dict[str, Latency]:
    """Times every contender once per turn, wherever it runs; again where other programs disturb it."""
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(turns):
        for name, turn in contenders.items():
            samples[name] += noise.measure(turn)
    return {name: Latency(np.array(values) * 1e3) for name, values in samples.items()}


def turn_in_process(make_call: MakeCall, measure_s: float) -> tuple[list[float], float]:
    """Times one contender for one turn, in a fresh process; see `Turn`."""
    return in_child_process(partial(measure_turn, measure_s=measure_s), make_call)


def call_once(make_call: MakeCall) -> Any:
    """Prepares a contender and returns what its call returns."""
    return make_call()()


def measure_turn(make_call: MakeCall, measure_s: float) -> tuple[list[float], float]:
    """Seconds of single calls in this process after a warm-up, and the share of the time that it waited for a CPU."""
    return measure_watched(make_call(), warm_up_s=min(_WARM_UP_S, measure_s), measure_s=measure_s)


def measure_watched(call: Callable[[], Any], *, warm_up_s: float, measure_s: float) -> tuple[list[float], float]:
    """As `measure_call`, and the share of the time that this process waited for a CPU."""
    with watched() as waiting:
        samples = measure_call(call, warm_up_s=warm_up_s, measure_s=measure_s)
    return samples, waiting.share


def measure_call(
    call: Callable[[], Any], *, warm_up_s: float = _WARM_UP_S, measure_s: float = _MEASURE_S
) -> list[float]:
    """Seconds of single calls in this process, after a warm-up; of a slow call only the second."""
    if _timed(call) > _SLOW_S:
        return [_timed(call)]
    warm_until = time.perf_counter() + warm_up_s
    while time.perf_counter() < warm_until:
        call()
    samples: list[float] = []
    stop_at = time.perf_counter() + measure_s
    while len(samples) < _MIN_SAMPLES or time.perf_counter() < stop_at:
        samples.append(_timed(call))
    return samples


def _timed(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
