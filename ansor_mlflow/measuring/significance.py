"""Whether one program is faster than another: turns are added until a confidence interval decides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache

import numpy as np

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

    The ratio of a turn is that of two medians that were measured one after the other, so that what slows down both
    cancels out. The mean of their logarithms has the interval x̄ ± t(n-1) · s/√n (Student, Biometrika 6, 1908).

    Who looks repeatedly and stops at the first success is wrong more often than each look promises. Each of the k
    looks therefore uses the error (1 - confidence) / k; by Bonferroni's inequality one of them is wrong in at most
    1 - confidence of the cases, on either side, wherever the test stops. Times that are not normal do no harm: as both
    programs run on the same machine, the noise of a logarithm is symmetric, and rare outliers widen the interval.

    Args:
        confidence: How sure a verdict must be, between 0.5 and 1.
        margin: Share of the champion's latency that the candidate must save, from 0.
        max_turns: Turns after which the test ends, decided or not.
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
