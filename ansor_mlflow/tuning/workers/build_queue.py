"""Builds what several batches wait for in one go, so that all workers have something to do."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from ansor_mlflow.processes import Outcome
from ansor_mlflow.tuning.workers.builder import Builder

if TYPE_CHECKING:
    from tvm.ir import IRModule


Built = tuple[Sequence[Outcome[Path]], float]
"""What became of the modules of a batch, and its share of the builder's time in seconds."""


class BuildQueue:
    """Gives a `Builder` all that waits for it, in a thread of its own. To be closed; the builder is not."""

    def __init__(self, builder: Builder) -> None:
        self._builder = builder
        self._changed = threading.Condition()
        self._orders: list[tuple[Sequence[IRModule], Future[Built]]] = []
        self._is_closed = False
        threading.Thread(target=self._work, name="builder", daemon=True).start()

    def build(self, mods: Sequence[IRModule]) -> Built:
        """Waits for what `Builder.build` returns of some modules. May be called from several threads."""
        built: Future[Built] = Future()
        with self._changed:
            if self._is_closed:
                raise RuntimeError("the builder was closed")
            self._orders.append((mods, built))
            self._changed.notify_all()
        return built.result()

    def close(self) -> None:
        """Builds no more; whoever waits for what was not begun gets an error."""
        with self._changed:
            self._is_closed = True
            orders, self._orders = self._orders, []
            self._changed.notify_all()
        for _, built in orders:
            built.set_exception(RuntimeError("the builder was closed"))

    def _work(self) -> None:
        while orders := self._next_orders():
            all_mods = [mod for mods, _ in orders for mod in mods]
            started_s = time.monotonic()
            try:
                outcomes = iter(self._builder.build(all_mods))
            except Exception as err:  # noqa: BLE001 - whoever waits for it raises it
                for _, built in orders:
                    built.set_exception(err)
                continue
            seconds = (time.monotonic() - started_s) / max(1, len(all_mods))
            for mods, built in orders:
                built.set_result(([next(outcomes) for _ in mods], seconds * len(mods)))

    def _next_orders(self) -> list[tuple[Sequence[IRModule], Future[Built]]]:
        """All that waits; empty when the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._orders)
            orders, self._orders = self._orders, []
            return [] if self._is_closed else orders
