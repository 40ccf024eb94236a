"""How much other programs disturb a measurement: by the time that threads waited for a CPU, and by a fixed probe."""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ansor_mlflow.device import available_cpus
from ansor_mlflow.processes import DISTURBED

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
class ProbeTime:
    """How long a fixed computation took."""

    elapsed_s: float
    """Of the thread that took longest."""
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


Turn = Callable[[], tuple[list[float], float]]
"""Measures; returns seconds of single calls, and the share of the time that it waited for a CPU."""


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
    """Of every probe."""
    _undisturbed_s: float = math.inf
    """The least CPU time of all probes."""
    _num_repeats: int = 0

    @property
    def spread(self) -> float:
        """By how much the ninth decile of all probes is longer than an undisturbed one: 0.02 is 2 %."""
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
        """Measures between two probes; what is disturbed again, but in total no more than half of all measurements."""
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
    """Probes the machine for a while."""
    noise, until_s = MachineNoise(), time.monotonic() + seconds
    while time.monotonic() < until_s:
        noise.add(time_probe(num_threads))
    return noise.spread
