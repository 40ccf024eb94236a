"""The test that decides which of two programs is faster errs as rarely as it promises, however the times scatter."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from ansor_mlflow.measuring.compare import Ratio, SequentialTest, Verdict

Draw = Callable[[np.random.Generator, int], np.ndarray]
"""Latencies of turns."""
NUM_CONTESTS = 800


def _normal(rng: np.random.Generator, turns: int) -> np.ndarray:
    return np.exp(rng.normal(0, 0.03, turns))


def _heavy_tailed(rng: np.random.Generator, turns: int) -> np.ndarray:
    return np.exp(0.02 * rng.standard_t(2, turns))


def _with_spikes(rng: np.random.Generator, turns: int) -> np.ndarray:
    """One turn in ten is slowed down by another program."""
    return _normal(rng, turns) * np.where(rng.random(turns) < 0.1, 1 + rng.random(turns), 1)


def _with_two_speeds(rng: np.random.Generator, turns: int) -> np.ndarray:
    """Each process is fast or slow, depending on where its memory lies."""
    return np.exp(rng.normal(0, 0.005, turns)) * rng.choice([1.0, 1.1], turns)


def _drifting(rng: np.random.Generator, turns: int) -> np.ndarray:
    return _normal(rng, turns) * np.linspace(1, 1.5, turns)


DRAWS = [_normal, _heavy_tailed, _with_spikes, _with_two_speeds, _drifting]


def contest(test: SequentialTest, candidate: np.ndarray, champion: np.ndarray) -> tuple[Verdict, Ratio]:
    """Looks as a promotion does, and stops at the first decision."""
    for look in test.looks:
        ratio = test.ratio(list(candidate[:look]), list(champion[:look]))
        verdict = test.verdict(ratio)
        if verdict is not Verdict.OPEN:
            break
    return verdict, ratio


def verdicts(test: SequentialTest, draw: Draw, true_ratio: float, num: int = NUM_CONTESTS) -> list[Verdict]:
    rng = np.random.default_rng(0)
    turns = test.max_turns
    return [contest(test, true_ratio * draw(rng, turns), draw(rng, turns))[0] for _ in range(num)]


def limit(share: float) -> float:
    """The largest share that is to be expected with a true share of `share`: one seed in a thousand exceeds it."""
    return float(stats.binom.isf(1e-3, NUM_CONTESTS, share)) / NUM_CONTESTS


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("margin", [0.0, 0.02])
def test_what_is_no_faster_than_the_margin_seldom_wins(draw: Draw, margin: float) -> None:
    """The worst case: a candidate that saves exactly the margin."""
    test = SequentialTest(confidence=0.95, margin=margin, max_turns=32)
    assert verdicts(test, draw, 1 - margin).count(Verdict.FASTER) / NUM_CONTESTS <= limit(0.05)


@pytest.mark.parametrize("draw", DRAWS)
def test_what_saves_more_than_the_margin_seldom_loses(draw: Draw) -> None:
    test = SequentialTest(confidence=0.95, margin=0.02, max_turns=32)
    assert verdicts(test, draw, 0.9799).count(Verdict.NOT_FASTER) / NUM_CONTESTS <= limit(0.05)


@pytest.mark.parametrize(
    ("true_ratio", "verdict"), [(0.5, Verdict.FASTER), (0.9, Verdict.FASTER), (1.1, Verdict.NOT_FASTER)]
)
def test_clear_cases_are_decided(true_ratio: float, verdict: Verdict) -> None:
    test = SequentialTest(confidence=0.95, margin=0.02, max_turns=32)
    assert verdicts(test, _normal, true_ratio, 200).count(verdict) >= 195


def test_the_interval_holds_the_true_ratio() -> None:
    test = SequentialTest(confidence=0.95, margin=0.02, max_turns=16)
    rng = np.random.default_rng(0)
    ratios = [contest(test, 0.7 * _normal(rng, 16), _normal(rng, 16))[1] for _ in range(NUM_CONTESTS)]
    assert sum(ratio.upper < 0.7 for ratio in ratios) / NUM_CONTESTS <= limit(0.05)
    assert sum(ratio.lower > 0.7 for ratio in ratios) / NUM_CONTESTS <= limit(0.05)
    assert np.median([ratio.estimate for ratio in ratios]) == pytest.approx(0.7, rel=0.01)


def test_the_interval_is_that_of_the_textbook() -> None:
    """One look, so that its error is not divided."""
    candidate, champion = np.array([9.0, 8.0, 8.5, 9.5]), np.array([10.0, 10.5, 9.5, 10.0])
    ratio = SequentialTest(confidence=0.95, margin=0.0, max_turns=4).ratio(list(candidate), list(champion))
    paired = stats.ttest_rel(np.log(candidate), np.log(champion)).confidence_interval(0.9)
    np.testing.assert_allclose([ratio.lower, ratio.upper], np.exp([paired.low, paired.high]))


@pytest.mark.parametrize(
    ("max_turns", "looks"), [(4, (4,)), (5, (4, 5)), (8, (4, 8)), (32, (4, 8, 16, 32)), (40, (4, 8, 16, 32, 40))]
)
def test_looks_are_fixed_beforehand(max_turns: int, looks: tuple[int, ...]) -> None:
    assert SequentialTest(confidence=0.95, margin=0.02, max_turns=max_turns).looks == looks
