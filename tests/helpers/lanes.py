"""Which lane a case of a parametrised test belongs to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def every_second(cases: Iterable[Any]) -> list[Any]:
    """Cases of one kind, of which every second one, beginning with the second, is left to `make test-nightly`."""
    return [
        case
        if number % 2 == 0
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.nightly)
        for number, case in enumerate(cases)
    ]
