"""Ctrl-C and SIGTERM, kept until a round is over.

A KeyboardInterrupt that is raised while TVM's C++ calls back into Python can be swallowed there, and one between two
records would tear a round apart.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_log = logging.getLogger("ansor_mlflow")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    def __init__(self) -> None:
        self.received = False
        self._is_guarded = False
        self._is_due = False

    def raise_if_received(self) -> None:
        if self.received:
            raise KeyboardInterrupt

    @contextmanager
    def in_tvm(self) -> Iterator[None]:
        """Lets a second signal wait, too, until what is done inside is over: seconds at most."""
        self._is_guarded = True
        try:
            yield
        finally:
            self._is_guarded = False
        if self._is_due:
            raise KeyboardInterrupt

    def again(self, _: int, __: FrameType | None) -> None:
        if not self._is_guarded:
            raise KeyboardInterrupt
        self._is_due = True


@contextmanager
def deferred_interrupts() -> Iterator[Interrupts]:
    """Defers the first SIGINT or SIGTERM; a second one interrupts at once, but for `Interrupts.in_tvm`.

    Outside of the main thread, where Python delivers no signals, nothing is deferred.
    """
    interrupts = Interrupts()

    def defer(_: int, __: FrameType | None) -> None:
        interrupts.received = True
        for other in _SIGNALS:
            signal.signal(other, interrupts.again)
        _log.info("stopping after this round; once more to stop at once")

    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    previous = {number: signal.signal(number, defer) for number in _SIGNALS}
    try:
        yield interrupts
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: it was not set from Python
