"""Times for people: the unit suits the value, and four digits are enough."""

from __future__ import annotations

import pytest

from ansor_mlflow.foreign import duration, time_unit


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 µs"),
        (4.2e-8, "0.042 µs"),
        (1.234e-5, "12.34 µs"),
        (9.9994e-4, "999.9 µs"),
        (9.9996e-4, "1 ms"),
        (9.856e-3, "9.856 ms"),
        (0.99996, "1 s"),
        (3.841, "3.841 s"),
        (1234.5, "1234 s"),
    ],
)
def test_a_time(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_column_of_times_has_one_unit() -> None:
    assert [time_unit(seconds) for seconds in (2e-6, 2e-3, 2.0)] == [(1e-6, "µs"), (1e-3, "ms"), (1.0, "s")]
