"""Ctrl-C and SIGTERM, kept until a round is over.

A KeyboardInterrupt that is raised while TVM's C++ calls back into Python can be swallowed there, and one between two
records would tear a round apart.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_log = logging.getLogger("ansor_mlflow")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def deferred_interrupts() -> Iterator[Callable[[], None]]:
    """Defers the first SIGINT or SIGTERM; a second one interrupts at once.

    Yields a function that raises KeyboardInterrupt if a signal came. Outside of the main thread, where Python delivers
    no signals, nothing is deferred.
    """
    received: list[int] = []

    def defer(number: int, _: FrameType | None) -> None:
        received.append(number)
        for other in _SIGNALS:
            signal.signal(other, signal.default_int_handler)
        _log.info("stopping after this round; once more to stop at once")

    def check() -> None:
        if received:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield check
        return
    previous = {number: signal.signal(number, defer) for number in _SIGNALS}
    try:
        yield check
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
