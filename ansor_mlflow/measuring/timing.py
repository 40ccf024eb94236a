"""Measures callables against each other, and how much other programs disturb that.

Every contender runs in child processes of its own, because idle thread pools that spin slow down their neighbours, and
in alternating turns, because the machine's speed drifts. The time that its threads waited for a CPU, and a fixed probe,
say whether a measurement was disturbed.
"""

from __future__ import annotations

import hashlib
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ansor_mlflow.device import available_cpus
from ansor_mlflow.processes import DISTURBED, in_child_process

MakeCall = Callable[[], Callable[[], Any]]
"""Prepares a contender and returns the call to time. Must be picklable: it is called in the child process."""

_WARM_UP_S = 0.5
_MEASURE_S = 1.5
_MIN_SAMPLES = 10
_SLOW_S = 1.0
"""A call that takes longer is warm after one, and needs only one sample a turn."""
Turn = Callable[[], tuple[list[float], float]]
"""Measures; returns seconds of single calls, and the share of the time that it waited for a CPU."""

_BUSY = 1.5
"""Slowdown of the probe from which the machine is busy. Clocks alone change by less."""
_MAX_DISTURBED = 0.1
"""Share of the measurements of a run that may be disturbed."""
_MAX_SLOWDOWN = 20.0
"""Most that timeouts are stretched."""
_PROBE_BLOCK = bytes(2**20)
_PROBE_BLOCKS = 8
"""Blocks that each thread of the probe hashes: 5 ms with SHA instructions, 20 ms without. In a shorter time another
program may not get its turn."""
_TASKS = Path("/proc/self/task")


@dataclass(frozen=True)
class Latency:
    """Latency of one contender over all turns, in milliseconds."""

    samples_ms: npt.NDArray[np.float64]
    turns_ms: tuple[float, ...] = ()
    """Median of each turn; none where there were no turns."""

    @property
    def median_ms(self) -> float:
        return float(np.median(self.samples_ms))

    @property
    def p90_ms(self) -> float:
        return float(np.percentile(self.samples_ms, 90))

    @property
    def p99_ms(self) -> float:
        return float(np.percentile(self.samples_ms, 99))

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
    samples: dict[str, list[list[float]]] = {name: [] for name in contenders}
    for _ in range(turns):
        for name, turn in contenders.items():
            samples[name].append(noise.measure(turn))
    return {
        name: Latency(np.concatenate(values) * 1e3, tuple(float(np.median(value)) * 1e3 for value in values))
        for name, values in samples.items()
    }


def turn_in_process(make_call: MakeCall, measure_s: float) -> tuple[list[float], float]:
    """Times one contender for one turn, in a fresh process; see `Turn`."""
    return in_child_process(partial(measure_turn, measure_s=measure_s), make_call)


def time_first_calls(make_call: MakeCall, limit_s: float) -> Latency:
    """Times the first calls of what may be very slow, in a fresh process that has so many seconds for them.

    Raises:
        MachineError: It had not made one call by then, or died.
    """
    work, advice = f"has {limit_s:g} s for its calls", "give baseline=none"
    seconds = in_child_process(_first_calls, (make_call, limit_s), work=work, advice=advice)
    return Latency(np.array(seconds) * 1e3)


def _first_calls(work: tuple[MakeCall, float]) -> list[float]:
    """Seconds of the first call, where it is slow, or of some calls after it."""
    make_call, limit_s = work
    call = make_call()
    signal.setitimer(signal.ITIMER_REAL, limit_s)  # whose signal ends this process, even in a kernel
    first_s = _timed(call)
    if first_s > _WARM_UP_S:
        return [first_s]
    until = time.perf_counter() + _WARM_UP_S
    samples = [_timed(call)]
    while time.perf_counter() < until:
        samples.append(_timed(call))
    return samples


def call_once(make_call: MakeCall) -> Any:
    """Prepares a contender and returns what its call returns."""
    return make_call()()


def measure_turn(make_call: MakeCall, measure_s: float) -> tuple[list[float], float]:
    """Seconds of single calls in this process after a warm-up, and the share of the time that it waited for a CPU."""
    return measure_watched(make_call(), warm_up_s=min(_WARM_UP_S, measure_s), measure_s=measure_s)


def measure_watched(
    call: Callable[[], Any], *, warm_up_s: float = _WARM_UP_S, measure_s: float = _MEASURE_S
) -> tuple[list[float], float]:
    """Seconds of single calls in this process, and the share of the time that it waited for a CPU.

    A slow call is warm after the first one, and only the second counts.
    """
    with watched() as waiting:
        if _timed(call) > _SLOW_S:
            samples = [_timed(call)]
        else:
            samples = []
            warm_until = time.perf_counter() + warm_up_s
            while time.perf_counter() < warm_until:
                call()
            stop_at = time.perf_counter() + measure_s
            while len(samples) < _MIN_SAMPLES or time.perf_counter() < stop_at:
                samples.append(_timed(call))
    return samples, waiting.share


def _timed(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


# -- how quiet the machine is ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProbeTime:
    """How long a fixed computation took."""

    elapsed_s: float
    """Seconds of the thread that took longest."""
    cpu_s: float
    """CPU time of a thread, the least of them."""


def time_probe(num_threads: int) -> ProbeTime:
    """Hashes the same bytes in several threads at once, each on a CPU of its own; Python's lock is free meanwhile."""
    cpus = sorted(os.sched_getaffinity(0))[:num_threads]
    with ThreadPoolExecutor(len(cpus), thread_name_prefix="probe") as executor:
        times = list(executor.map(_hash_blocks, cpus))
    return ProbeTime(max(elapsed_s for elapsed_s, _ in times), min(cpu_s for _, cpu_s in times))


def _hash_blocks(cpu: int) -> tuple[float, float]:
    os.sched_setaffinity(0, {cpu})  # this thread alone: two that begin on one CPU stay there for a while
    started_s, started_cpu_s = time.perf_counter(), time.thread_time()
    for _ in range(_PROBE_BLOCKS):
        hashlib.sha256(_PROBE_BLOCK).digest()
    return time.perf_counter() - started_s, time.thread_time() - started_cpu_s


@dataclass
class Waiting:
    """The time that this process waited for a CPU."""

    share: float = 0.0
    """Share of the time that the thread which waited longest did; 0 where Linux does not tell."""


@contextmanager
def watched() -> Iterator[Waiting]:
    """Watches how long threads of this process wait for a CPU inside of the block; the result is there after it.

    From the second number of `/proc/<pid>/task/<tid>/schedstat` (Linux, Documentation/scheduler/sched-stats.rst):
    nanoseconds in which a thread could have run, and another one did.
    """
    waiting, before, started_s = Waiting(), _waited_s(), time.perf_counter()
    yield waiting
    elapsed_s, after = time.perf_counter() - started_s, _waited_s()
    waiting.share = max((after[thread] - before.get(thread, 0.0) for thread in after), default=0.0) / elapsed_s


def _waited_s() -> dict[str, float]:
    waited = {}
    for task in _TASKS.iterdir():
        try:
            waited[task.name] = int((task / "schedstat").read_text().split()[1]) / 1e9
        except (OSError, IndexError):  # the thread has ended, or the kernel was built without
            continue
    return waited


def is_disturbed(num_disturbed: int, num_measured: int) -> bool:
    """Whether so many measurements were disturbed that what follows from all of them cannot be trusted."""
    return num_disturbed > _MAX_DISTURBED * num_measured


@dataclass(kw_only=True)
class MachineNoise:
    """How quiet the machine was while a run measured. Not safe for use from several threads."""

    server: str = ""
    """The server of a fleet that measures, which is not probed; empty for this host."""
    num_measured: int = 0
    """Measurements by `measure`."""
    num_disturbed: int = 0
    """Those that were disturbed, and again when they were repeated."""
    slowdown: float = 1.0
    """What the last probe took, over what an undisturbed one takes; 1 or more."""
    _elapsed_s: list[float] = field(default_factory=list)
    """Seconds that each probe took."""
    _undisturbed_s: float = math.inf
    """The least CPU time of all probes."""
    _num_repeats: int = 0

    @property
    def spread(self) -> float:
        """The ninth decile of all probes over an undisturbed one, less 1: 0.02 is 2 %."""
        return max(0.0, float(np.percentile(self._elapsed_s, 90)) / self._undisturbed_s - 1) if self._elapsed_s else 0.0

    @property
    def unreliable(self) -> str:
        """Why what `measure` returned cannot be trusted, as a clause; empty where it can."""
        if not is_disturbed(self.num_disturbed, self.num_measured):
            return ""
        where = f" of server {self.server}" if self.server else ""
        return (
            f"other programs used the CPUs{where} during {self.num_disturbed} of {self.num_measured} measurements; "
            "measure again on a quiet machine"
        )

    def add(self, probe: ProbeTime) -> float:
        """Takes a probe; returns the new `slowdown`."""
        self._elapsed_s.append(probe.elapsed_s)
        self._undisturbed_s = min(self._undisturbed_s, probe.cpu_s)
        self.slowdown = min(_MAX_SLOWDOWN, max(1.0, probe.elapsed_s / self._undisturbed_s))
        return self.slowdown

    def measure(self, turn: Turn) -> list[float]:
        """Measures between two probes; what is disturbed again, but in total no more than half of all measurements.

        The seconds are those of the turn that was disturbed least.
        """
        disturbance, samples = self._measure(turn)
        while disturbance > DISTURBED and self._num_repeats < max(1, self.num_measured / 2):
            self._num_repeats += 1
            disturbance, samples = min((disturbance, samples), self._measure(turn))
        self.num_measured += 1
        self.num_disturbed += disturbance > DISTURBED
        return samples

    def _measure(self, turn: Turn) -> tuple[float, list[float]]:
        if self.server:
            samples, waited = turn()
            return waited, samples
        before = self.add(time_probe(available_cpus()))
        samples, waited = turn()
        return max(waited, lost_share(before, self.add(time_probe(available_cpus())))), samples


def lost_share(before: float, after: float) -> float:
    """Share of the time between two probes that was lost, by their slowdowns, where both say that the machine is busy.

    The time that threads wait for a CPU is more exact; this one also sees what a hypervisor or a quota takes.
    """
    slowdown = min(before, after)
    return 1 - 1 / slowdown if slowdown > _BUSY else 0.0


def probe_noise(num_threads: int, seconds: float) -> float:
    """Probes the machine for a while; returns `MachineNoise.spread`."""
    noise, until_s = MachineNoise(), time.monotonic() + seconds
    while time.monotonic() < until_s:
        noise.add(time_probe(num_threads))
    return noise.spread
