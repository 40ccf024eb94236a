"""While a remote runner measures, the next batch is built; a local one has the host for itself; signals wait."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import onnx
import pytest
from helpers.commands import RunCommand
from helpers.fake_tuning import Notebook, read_records, tune
from helpers.fakes import FakeBuilder, FakeRunner

from ansor_mlflow.lowering.lower import lower
from ansor_mlflow.lowering.network import LoweredNetwork
from ansor_mlflow.networks.graph import GraphBuilder
from ansor_mlflow.processes import Outcome
from ansor_mlflow.trials import StopReason
from ansor_mlflow.tuning.stopping import deferred_interrupts
from ansor_mlflow.workers.measure import RunJob

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.target import Target

TIMEOUT_S = 120.0


class CountingBuilder(FakeBuilder):
    """A `FakeBuilder` that others can wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.num_batches = 0
        self._changed = threading.Condition()

    def build(self, mods: Sequence[IRModule]) -> list[Outcome[Path]]:
        outcomes = super().build(mods)
        with self._changed:
            self.num_batches += 1
            self._changed.notify_all()
        return outcomes

    def wait_for_batch(self, number: int, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.num_batches >= number, timeout_s)


class ObservedRunner(FakeRunner):
    """A `FakeRunner` that calls a function before each batch, with the batch's number, counted from 1."""

    def __init__(self, before_batch: Callable[[int], None], *, is_remote: bool) -> None:
        super().__init__(is_remote=is_remote)
        self._before_batch = before_batch
        self._num_batches = 0

    def run(self, jobs: Sequence[RunJob]) -> list[Outcome[tuple[float, ...]]]:
        self._num_batches += 1
        self._before_batch(self._num_batches)
        return super().run(jobs)


def test_while_a_remote_runner_measures_another_task_is_searched_and_built(
    dense: LoweredNetwork, host_target: Target, tmp_path: Path
) -> None:
    def wait_for_next(number: int) -> None:
        if len(builder.mods) < 24:
            in_time.append(builder.wait_for_batch(number + 1, TIMEOUT_S))

    in_time: list[bool] = []
    builder, notebook = CountingBuilder(), Notebook(tmp_path)
    runner = ObservedRunner(wait_for_next, is_remote=True)
    result = tune(dense, host_target, tmp_path, builder=builder, runner=runner, observers=[notebook], trials=24)
    assert in_time == [True] * (len(notebook.rounds) - 1)
    assert all(task != following for task, following in pairwise(notebook.tasks))
    assert result.total_trials == len(builder.mods) == len(read_records(tmp_path)) == 24
    assert result.stop_reason == StopReason.TRIALS
    assert [trial.step for trials in notebook.rounds for trial in trials] == list(range(1, 25))


@pytest.mark.parametrize(("network", "is_remote"), [("single", True), ("single", False), ("dense", False)])
def test_nothing_else_is_built_while_a_local_runner_measures_or_when_there_is_one_task(
    network: str, is_remote: bool, host_target: Target, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    def wait_in_vain(number: int) -> None:
        if len(builder.mods) < 6:
            overlapped.append(builder.wait_for_batch(number + 1, 0.05))

    overlapped: list[bool] = []
    builder, lowered = CountingBuilder(), request.getfixturevalue(network)
    runner = ObservedRunner(wait_in_vain, is_remote=is_remote)
    result = tune(lowered, host_target, tmp_path, builder=builder, runner=runner, trials=6, num_trials_per_round=2)
    assert len(overlapped) >= 2
    assert not any(overlapped)
    assert result.total_trials == len(read_records(tmp_path)) == 6
    assert result.stop_reason == StopReason.TRIALS


@pytest.mark.parametrize("is_remote", [False, True])
@pytest.mark.parametrize("number", [1, 3])
def test_an_interrupt_finishes_and_records_what_is_in_flight(
    dense: LoweredNetwork, host_target: Target, tmp_path: Path, number: int, is_remote: bool
) -> None:
    def interrupt(batch: int) -> None:
        if batch == number:
            if is_remote:
                assert builder.wait_for_batch(number + 1, TIMEOUT_S)
            os.kill(os.getpid(), signal.SIGINT)

    builder, notebook = CountingBuilder(), Notebook(tmp_path)
    runner = ObservedRunner(interrupt, is_remote=is_remote)
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        tune(dense, host_target, tmp_path, builder=builder, runner=runner, observers=[notebook], trials=1000)
    assert len(notebook.rounds) == builder.num_batches == number + is_remote
    assert len(read_records(tmp_path)) == len(builder.mods)
    assert notebook.result is not None
    assert notebook.result.stop_reason == StopReason.INTERRUPTED
    assert notebook.result.total_trials == len(builder.mods)
    assert notebook.events[-1] == "finished"


def interrupt_twice() -> None:
    """Sends SIGINT, and once more when Python has handled the first: to this thread, so that the main one sleeps on."""
    deferred = signal.getsignal(signal.SIGINT)
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)
    deadline = time.monotonic() + TIMEOUT_S
    while signal.getsignal(signal.SIGINT) is deferred:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_second_interrupt_does_not_wait_for_the_measurement(
    dense: LoweredNetwork, host_target: Target, tmp_path: Path, is_remote: bool
) -> None:
    def hang(batch: int) -> None:
        if batch == 1:  # one that follows may begin when the tuner is gone, whose handler the signals then miss
            interrupt_twice()
        hung.append(not released.wait(5))

    released, hung = threading.Event(), list[bool]()
    runner = ObservedRunner(hang, is_remote=is_remote)
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        tune(dense, host_target, tmp_path, runner=runner, trials=1000)
    assert not hung, "the tuner waited for the runner"
    released.set()


class ManyDevices(FakeRunner):
    """A remote `FakeRunner` with three devices, whose first batch waits until others were built."""

    num_batches = 8

    def __init__(self, wait: Callable[[], bool]) -> None:
        super().__init__(is_remote=True)
        self.waited: list[bool] = []
        self._wait = wait
        self._lock = threading.Lock()
        self._first = threading.Lock()

    @property
    def num_devices(self) -> int:
        return 3

    def run(self, jobs: Sequence[RunJob]) -> list[Outcome[tuple[float, ...]]]:
        if self._first.acquire(blocking=False):
            self.waited.append(self._wait())
        with self._lock:
            return super().run(jobs)


def layers(*units: int) -> onnx.ModelProto:
    builder = GraphBuilder(seed=0)
    data, in_units = builder.input("data", (4, 32)), 32
    for number, size in enumerate(units):
        data = builder.relu(f"relu{number}", builder.dense(f"dense{number}", data, units=size, in_units=in_units))
        in_units = size
    return builder.build("layers", {data: (4, in_units)})


def test_several_devices_have_programs_that_wait_for_them(host_target: Target, tmp_path: Path) -> None:
    """Batches of two programs: the oldest, and three more with two programs for each device."""
    builder, notebook = CountingBuilder(), Notebook(tmp_path)
    runner = ManyDevices(lambda: builder.wait_for_batch(4, TIMEOUT_S))
    result = tune(
        lower(layers(8, 16, 24, 40, 48), host_target),
        host_target,
        tmp_path,
        builder=builder,
        runner=runner,
        observers=[notebook],
        trials=24,
        num_trials_per_round=2,
    )
    assert runner.waited == [True]
    assert result.total_trials == len(builder.mods) == len(read_records(tmp_path)) == 24
    assert [trial.step for trials in notebook.rounds for trial in trials] == list(range(1, 25))


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
