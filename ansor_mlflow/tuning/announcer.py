"""Tells observers what happens while the tuner builds and searches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from ansor_mlflow.trials import TuningObserver


class Announcer:
    """Calls observers in order, from one thread, so that a slow server holds up neither search nor builds.

    `wait` comes before every measurement, which is to have the host for itself. To be closed.
    """

    def __init__(self, observers: Sequence[TuningObserver]) -> None:
        self._observers = observers
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="observers")
        self._pending: list[Future[None]] = []

    def tell(self, call: Callable[[TuningObserver], None]) -> None:
        """Makes a call to every observer, soon."""
        self._pending.append(self._executor.submit(self._tell, call))

    def wait(self) -> None:
        """Returns when the observers know everything; raises what one of them raised."""
        pending, self._pending = self._pending, []
        for future in pending:
            future.result()

    def close(self) -> None:
        """Ends the thread; what was not told yet is dropped."""
        self._executor.shutdown(cancel_futures=True)

    def _tell(self, call: Callable[[TuningObserver], None]) -> None:
        for observer in self._observers:
            call(observer)
