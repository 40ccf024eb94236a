"""Signals wait for the end of a round, once."""

from __future__ import annotations

import os
import signal
import threading

import pytest
from helpers.commands import RunCommand

from ansor_mlflow.tuning.interrupt import deferred_interrupts


def test_a_second_signal_waits_for_what_is_done_in_tvm() -> None:
    done = []

    def work() -> None:
        with deferred_interrupts() as interrupts, interrupts.in_tvm():
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGINT)
            done.append(True)

    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        work()
    assert done


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with deferred_interrupts():
        assert signal.getsignal(signal.SIGINT) is not before[0]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_thread_that_gets_no_signals_defers_none() -> None:
    def enter() -> None:
        with deferred_interrupts() as interrupts:
            handlers.append(signal.getsignal(signal.SIGINT))
            interrupts.raise_if_received()

    handlers: list[object] = []
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGINT)]


def test_a_command_that_is_terminated_ends_as_one_that_is_interrupted(
    run_here: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ansor_mlflow.commands.sync.sync", lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert run_here("sync") == 130
