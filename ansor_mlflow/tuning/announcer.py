"""Tells observers what happens while the tuner builds and searches."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal

from ansor_mlflow.trials import TuningObserver

Event = Literal["tuning_started", "round_finished", "tuning_finished"]


class Announcer:
    """Calls observers in order, from one thread, so that a slow server holds up neither search nor builds.

    `wait` comes before every measurement, which is to have the host for itself. To be closed.
    """

    def __init__(self, observers: Sequence[TuningObserver]) -> None:
        self._observers = observers
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="observers")
        self._pending: list[Future[None]] = []

    def tell(self, event: Event, payload: Any) -> None:
        """Has every observer told, soon."""
        self._pending.append(self._executor.submit(self._tell, event, payload))

    def wait(self) -> None:
        """Returns when the observers know everything; raises what one of them raised."""
        pending, self._pending = self._pending, []
        for future in pending:
            future.result()

    def close(self) -> None:
        """Ends the thread; what was not told yet is dropped."""
        self._executor.shutdown(cancel_futures=True)

    def _tell(self, event: Event, payload: Any) -> None:
        for observer in self._observers:
            getattr(observer, event)(payload)
