"""How MetaSchedule is listened to: a callback after each batch, and its profiler."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tvm.s_tir.meta_schedule.measure_callback import MeasureCallback

Times = Callable[[], Mapping[str, float]]
"""Seconds that parts of MetaSchedule took so far, by the names that its profiler gives them; 0 for other names."""


def as_callback(function: Callable[..., None]) -> MeasureCallback:
    """A callback of MetaSchedule that calls `function` with what it is called with."""
    from tvm.ir.utils import derived_object
    from tvm.s_tir.meta_schedule.measure_callback import PyMeasureCallback

    @derived_object
    class _Callback(PyMeasureCallback):  # type: ignore[misc]
        def apply(self, *args: Any) -> None:
            function(*args)

    return _Callback()


@contextlib.contextmanager
def profiled() -> Iterator[Times]:
    """Times what happens inside, with the user's profiler where there is one: only the innermost one is told."""
    from tvm.s_tir.meta_schedule import Profiler

    current = Profiler.current()
    with contextlib.nullcontext(current) if current is not None else Profiler() as profiler:
        before = _read(profiler)
        yield lambda: defaultdict(float, {name: s - before[name] for name, s in _read(profiler).items()})


def _read(profiler: Any) -> defaultdict[str, float]:
    return defaultdict(float, {str(name): float(seconds) for name, seconds in profiler.get().items()})
