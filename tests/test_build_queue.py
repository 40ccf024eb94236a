"""What waits for a builder is built in one go, and everybody gets their own."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ansor_mlflow.errors import MachineError
from ansor_mlflow.processes import Outcome
from ansor_mlflow.workers import BuildQueue

TIMEOUT_S = 120.0


class SlowBuilder:
    """Builds nothing, and waits until it may; what it takes are names."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.may_go_on = threading.Event()
        self.has_begun = threading.Event()

    def build(self, mods: Sequence[Any]) -> list[Outcome[Path]]:
        self.calls.append(list(mods))
        self.has_begun.set()
        assert self.may_go_on.wait(TIMEOUT_S)
        if "full" in mods:
            raise MachineError("the disk is full")
        return [Outcome(Path(name)) for name in mods]

    def close(self) -> None:
        """Nothing is left."""


def names_of(outcomes: Sequence[Outcome[Path]]) -> list[str]:
    return [str(outcome.value) for outcome in outcomes]


def test_orders_that_wait_are_built_together_and_told_apart() -> None:
    builder: Any = SlowBuilder()
    with closing(BuildQueue(builder)) as queue, ThreadPoolExecutor(3) as executor:
        first = executor.submit(queue.build, ["a"])
        assert builder.has_begun.wait(TIMEOUT_S)
        others = [executor.submit(queue.build, mods) for mods in (["b", "c"], ["d"])]
        while len(queue._orders) < 2:
            pass
        builder.may_go_on.set()
        assert names_of(first.result()[0]) == ["a"]
        assert [names_of(other.result()[0]) for other in others] == [["b", "c"], ["d"]]
    assert [sorted(call) for call in builder.calls] == [["a"], ["b", "c", "d"]]


def test_an_error_is_raised_where_it_is_waited_for_and_the_queue_goes_on() -> None:
    builder: Any = SlowBuilder()
    builder.may_go_on.set()
    with closing(BuildQueue(builder)) as queue:
        with pytest.raises(MachineError, match="the disk is full"):
            queue.build(["full"])
        assert names_of(queue.build(["a"])[0]) == ["a"]


def test_a_queue_that_is_closed_lets_nobody_wait() -> None:
    builder: Any = SlowBuilder()
    queue = BuildQueue(builder)
    with ThreadPoolExecutor(2) as executor:
        executor.submit(queue.build, ["a"])
        assert builder.has_begun.wait(TIMEOUT_S)
        waiting = executor.submit(queue.build, ["b"])
        while not queue._orders:
            pass
        queue.close()
        with pytest.raises(RuntimeError, match="the builder was closed"):
            waiting.result(TIMEOUT_S)
        with pytest.raises(RuntimeError, match="the builder was closed"):
            queue.build(["c"])
        builder.may_go_on.set()
