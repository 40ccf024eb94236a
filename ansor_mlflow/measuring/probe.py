"""A short fixed computation whose times say how quiet the machine is."""

from __future__ import annotations

import hashlib
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

_BLOCK = bytes(2**20)


def probe_noise(num_threads: int, seconds: float) -> float:
    """The relative spread of the times of a fixed computation on so many threads; 0.02 is 2 %."""
    with ThreadPoolExecutor(num_threads) as executor:
        times = [time_ for part in executor.map(_times, [seconds] * num_threads) for time_ in part]
    low, middle, high = np.percentile(times, [10, 50, 90])
    return float((high - low) / middle)


def _times(seconds: float) -> list[float]:
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        started = time.perf_counter()
        hashlib.sha256(_BLOCK).digest()
        times.append(time.perf_counter() - started)
    return times
