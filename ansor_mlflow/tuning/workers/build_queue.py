"""Builds what several batches wait for in one go, so that all workers have something to do."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ansor_mlflow.processes import Outcome
from ansor_mlflow.tuning.workers.builder import Builder

if TYPE_CHECKING:
    from tvm.ir import IRModule


@dataclass(frozen=True)
class BuiltBatch:
    """What became of the modules of a batch."""

    outcomes: Sequence[Outcome[Path]]
    seconds: float
    """Its share of the builder's time."""


@dataclass
class _Order:
    mods: Sequence[IRModule]
    built: Future[BuiltBatch] = field(default_factory=Future)


class BuildQueue:
    """Gives a `Builder` all that waits for it, in a thread of its own. To be closed; the builder is not.

    Args:
        builder: Builds.
    """

    def __init__(self, builder: Builder) -> None:
        self._builder = builder
        self._changed = threading.Condition()
        self._orders: list[_Order] = []
        self._is_closed = False
        threading.Thread(target=self._work, name="builder", daemon=True).start()

    def build(self, mods: Sequence[IRModule]) -> BuiltBatch:
        """Waits for what `Builder.build` returns of some modules. May be called from several threads.

        Raises:
            Exception: What the builder raises.
        """
        order = _Order(mods)
        with self._changed:
            if self._is_closed:
                raise RuntimeError("the builder was closed")
            self._orders.append(order)
            self._changed.notify_all()
        return order.built.result()

    def close(self) -> None:
        """Builds no more; whoever waits for what was not begun gets an error."""
        with self._changed:
            self._is_closed = True
            orders, self._orders = self._orders, []
            self._changed.notify_all()
        for order in orders:
            order.built.set_exception(RuntimeError("the builder was closed"))

    def _work(self) -> None:
        while orders := self._next_orders():
            mods = [mod for order in orders for mod in order.mods]
            started_s = time.monotonic()
            try:
                outcomes = iter(self._builder.build(mods))
            except Exception as err:  # noqa: BLE001 - whoever waits for it raises it
                for order in orders:
                    order.built.set_exception(err)
                continue
            seconds = (time.monotonic() - started_s) / max(1, len(mods))
            for order in orders:
                order.built.set_result(BuiltBatch([next(outcomes) for _ in order.mods], seconds * len(order.mods)))

    def _next_orders(self) -> list[_Order]:
        """All that waits; empty when the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._orders)
            orders, self._orders = self._orders, []
            return [] if self._is_closed else orders
