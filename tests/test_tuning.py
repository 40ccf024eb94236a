"""The tuner counts and records every trial, tells its observers and the log the truth, and frees its memory."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import logging
import re
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
from helpers.fake_tuning import Notebook, plan_for, read_records, tune
from helpers.fakes import FakeBuilder, FakeRunner

from ansor_mlflow.device.device import Device
from ansor_mlflow.device.threads import available_cpus
from ansor_mlflow.errors import MachineError, TuningError
from ansor_mlflow.lowering.network import LoweredNetwork
from ansor_mlflow.parameters import MeasureOptions, SearchOptions
from ansor_mlflow.processes import Outcome
from ansor_mlflow.trials import (
    Durations,
    StopReason,
    TaskInfo,
    TaskState,
    Trial,
    TrialStatus,
    TuningResult,
    TuningRound,
    estimated_latency_s,
)
from ansor_mlflow.tuning import engine
from ansor_mlflow.tuning.job import TuningJob, tune_job
from ansor_mlflow.tuning.ledger import RoundLog
from ansor_mlflow.tuning.program_search import release_memory
from ansor_mlflow.tuning.stopping import require_valid_trials

if TYPE_CHECKING:
    from tvm.target import Target


def test_every_failure_is_counted_recorded_and_told(dense: LoweredNetwork, host_target: Target, tmp_path: Path) -> None:
    builder = FakeBuilder(
        {
            2: Outcome(failure="failed", error="no such\ninstruction"),
            3: Outcome(failure="timed_out", error="killed after 1 s"),
        }
    )
    runner = FakeRunner(
        [2e-3, 1e-3],
        failures={
            2: Outcome(failure="failed", error="RuntimeError: it runs on 1 thread"),
            3: Outcome(failure="crashed", error="the worker process died (SIGILL)"),
        },
    )
    notebook = Notebook(tmp_path)
    result = tune(dense, host_target, tmp_path, builder=builder, runner=runner, observers=[notebook], trials=12)

    counts = {status: sum(task.num_trials[status] for task in result.tasks) for status in TrialStatus}
    assert counts == {**dict.fromkeys(TrialStatus, 1), TrialStatus.OK: 8}
    assert "build_failed: no such\ninstruction" in [task.first_error for task in result.tasks]
    told = [(trial.step, trial.status, trial.error) for trials in notebook.rounds for trial in trials]
    assert told[:5] == [
        (1, TrialStatus.OK, ""),
        (2, TrialStatus.BUILD_FAILED, "no such\ninstruction"),
        (3, TrialStatus.TIMED_OUT, "killed after 1 s"),
        (4, TrialStatus.RUN_FAILED, "RuntimeError: it runs on 1 thread"),
        (5, TrialStatus.CRASHED, "the worker process died (SIGILL)"),
    ]
    assert [record[1][1] for record in read_records(tmp_path)[:5]] == [[2e-3], [1e10], [1e10], [1e10], [1e10]]


def test_a_task_with_one_program_survives_that_its_worker_is_killed(
    tiny: LoweredNetwork, host_target: Target, tmp_path: Path
) -> None:
    killed: Outcome[Any] = Outcome(failure="crashed", error="the worker process died (SIGKILL)")
    result = tune(tiny, host_target, tmp_path, runner=FakeRunner(failures={1: killed}), trials=10)
    require_valid_trials(result)
    assert result.tasks[0].num_trials == {**dict.fromkeys(TrialStatus, 0), TrialStatus.CRASHED: 1, TrialStatus.OK: 1}
    assert result.stop_reason == StopReason.SPACE_EXHAUSTED


def test_a_tuning_without_a_valid_trial_is_an_error_that_shows_the_first_failure(
    dense: LoweredNetwork, host_target: Target, tmp_path: Path
) -> None:
    failure: Outcome[Any] = Outcome(failure="failed", error="LLVM said\n\tno")
    result = tune(dense, host_target, tmp_path, builder=FakeBuilder(dict.fromkeys(range(1, 9), failure)), trials=8)
    assert result.estimated_latency_s is None
    message = rf"2 of 2 tasks have no valid trial, such as {dense.tasks[0].info.name} after \d trials \(build_failed: "
    with pytest.raises(TuningError, match=message) as caught:
        require_valid_trials(result)
    assert "\n" not in str(caught.value)


def test_libraries_of_slow_programs_are_removed_at_once(
    dense: LoweredNetwork, host_target: Target, tmp_path: Path
) -> None:
    class Watcher(Notebook):
        def round_finished(self, round_: TuningRound) -> None:
            super().round_finished(round_)
            num_libraries.append(sum(job.path.exists() for job in runner.jobs))

    num_libraries: list[int] = []
    runner = FakeRunner([number * 1e-3 for number in range(1, 31)])
    tune(dense, host_target, tmp_path, runner=runner, observers=[Watcher(tmp_path)], trials=20)
    assert len(num_libraries) >= 5
    assert set(num_libraries) == {1, 2}  # of each task that was measured, its first program


def task_info(weight: int = 1) -> TaskInfo:
    return TaskInfo(index=0, name="t", weight=weight, flops=1e6, workload_hash="t")


def test_the_mean_of_the_repeats_is_the_latency() -> None:
    state = TaskState(info=task_info())
    for step, run_s in enumerate([(5e-3, 5e-3), (1e-3, 3e-3), (2.5e-3,)], start=1):
        state.add(Trial(step=step, task="t", status=TrialStatus.OK, run_s=run_s))
    assert state.best_s == 2e-3
    np.testing.assert_allclose(state.gflops, 0.5)


def test_the_estimate_sums_tasks_by_their_weight() -> None:
    tasks = [TaskState(info=replace(task_info(weight), workload_hash=f"0x{weight}"), best_s=1e-3) for weight in (1, 3)]
    assert estimated_latency_s(tuple(tasks)) == 4e-3
    tasks[1].best_s = None
    assert estimated_latency_s(tuple(tasks)) is None
    tasks[1].stop_reason = StopReason.NOTHING_TO_TUNE
    assert estimated_latency_s(tuple(tasks)) == 1e-3


def test_observers_are_told_in_order_with_numbers_that_agree(
    dense: LoweredNetwork, host_target: Target, tmp_path: Path
) -> None:
    first, second = Notebook(tmp_path), Notebook(tmp_path)
    runner = FakeRunner([4e-3, 3e-3, 5e-3, 2e-3, 6e-3])
    tune(dense, host_target, tmp_path, runner=runner, observers=[first, second], trials=22)
    assert first.events == second.events == ["started", *["round"] * len(first.rounds), "finished"]
    assert first.plan == plan_for(dense, 22)
    assert all(len(set(counts.values())) == 1 for counts in first.counts)
    assert first.counts[-1]["total"] == 22
    steps = [trial.step for trials in first.rounds for trial in trials]
    assert steps == list(range(1, 23))
    for task, trials in zip(first.tasks, first.rounds, strict=True):
        assert {trial.task for trial in trials} == {task}
        assert 1 <= len(trials) <= 4


def test_observers_are_told_from_one_thread_of_their_own(
    dense: LoweredNetwork, host_target: Target, tmp_path: Path
) -> None:
    class Witness(Notebook):
        def round_finished(self, round_: TuningRound) -> None:
            threads.add(threading.current_thread())

        def tuning_finished(self, result: TuningResult) -> None:
            threads.add(threading.current_thread())

    threads: set[threading.Thread] = set()
    tune(dense, host_target, tmp_path, observers=[Witness(tmp_path), Witness(tmp_path)], trials=12)
    (thread,) = threads
    assert thread is not threading.main_thread()
    assert not thread.is_alive()


def away_at(event: str, records: Path) -> Notebook:
    """An observer whose server is away at one event."""
    notebook = Notebook(records)
    tell = getattr(notebook, event)

    def fail(told: object) -> None:
        tell(told)
        raise MachineError(f"the server is away at {event}")

    setattr(notebook, event, fail)
    return notebook


@pytest.mark.parametrize(
    ("event", "num_recorded", "events"),
    [
        ("tuning_started", 0, ["started"]),
        ("round_finished", 2, ["started", "round"]),
        ("tuning_finished", 16, ["started", *["round"] * 5, "finished"]),
    ],
)
def test_an_observers_error_ends_the_tuning_before_the_next_measurement(
    dense: LoweredNetwork, host_target: Target, tmp_path: Path, event: str, num_recorded: int, events: list[str]
) -> None:
    """What was measured until then is on disk, and was told to no one else."""
    runner, away, other = FakeRunner(), away_at(event, tmp_path), Notebook(tmp_path)
    with pytest.raises(MachineError, match=f"the server is away at {event}"):
        tune(dense, host_target, tmp_path, runner=runner, observers=[away, other], trials=16)
    assert away.events == events
    assert other.events == events[:-1]
    assert len({job.path for job in runner.jobs}) == num_recorded
    assert num_recorded == 0 or len(read_records(tmp_path)) == num_recorded


def test_an_error_in_the_last_round_is_not_lost(single: LoweredNetwork, host_target: Target, tmp_path: Path) -> None:
    away = away_at("round_finished", tmp_path)
    with pytest.raises(MachineError, match="the server is away at round_finished"):
        tune(single, host_target, tmp_path, observers=[away], trials=1)
    assert len(read_records(tmp_path)) == 1


SEARCHES = [("evolutionary", "xgb"), ("evolutionary", "random"), ("evolutionary", "none"), ("random", "none")]


@pytest.mark.parametrize(("strategy", "cost_model"), SEARCHES)
@pytest.mark.nightly
def test_a_seed_gives_the_same_candidates_again(
    single: LoweredNetwork, host_target: Target, tmp_path: Path, strategy: str, cost_model: str
) -> None:
    def traces(name: str, seed: int) -> list[Any]:
        (tmp_path / name).mkdir()
        runner = FakeRunner([3e-3, 1e-3, 2e-3])
        # the first 48 trials are random, whatever the cost model
        trials = 56 if cost_model == "xgb" else 4
        options = {"trials": trials, "num_trials_per_round": 8, "strategy": strategy, "cost_model": cost_model}
        tune(single, host_target, tmp_path / name, runner=runner, seed=seed, **options)
        return [record[1][0] for record in read_records(tmp_path / name)]

    first, again, other = traces("first", 1), traces("again", 1), traces("other", 2)
    assert first == again
    assert first != other


@pytest.mark.parametrize("strategy", ["evolutionary", "random"])
def test_a_task_with_few_programs_is_exhausted(
    tiny: LoweredNetwork, host_target: Target, tmp_path: Path, strategy: str
) -> None:
    result = tune(tiny, host_target, tmp_path, trials=1000, strategy=strategy)
    assert result.stop_reason == StopReason.SPACE_EXHAUSTED
    assert [task.stop_reason for task in result.tasks] == [StopReason.SPACE_EXHAUSTED]
    assert 0 < result.total_trials < 100


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="PyTorch is installed")
def test_the_mlp_without_pytorch(dense: LoweredNetwork, host_target: Target, tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="cost_model=mlp needs PyTorch: pip install torch, or use cost_model=xgb"):
        tune(dense, host_target, tmp_path, trials=2, cost_model="mlp")


def test_a_network_is_tuned_on_this_host(dense: LoweredNetwork, host_target: Target, tmp_path: Path) -> None:
    notebook = Notebook(tmp_path)
    job = TuningJob(network="dense", lowered=dense, device=Device.of(host_target, available_cpus()), records=tmp_path)
    result = tune_job(job, SearchOptions(trials=4, num_trials_per_round=2), MeasureOptions(min_repeat_ms=1), [notebook])
    require_valid_trials(result)
    assert result.total_trials == 4
    assert notebook.counts[-1] == dict.fromkeys(("told", "total", "of tasks", "on disk"), 4)
    assert 0 < result.estimated_latency_s < 1


NUM_BLOCKS, BLOCK_BYTES = 16_384, 4096


@pytest.fixture
def no_automatic_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


class Cyclic:
    """Refers to itself, so that only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self


class CyclicNotebook(Notebook):
    """Leaves a cyclic object behind at every round."""

    def __init__(self, records: Path) -> None:
        super().__init__(records)
        self.left: list[weakref.ref[Cyclic]] = []

    def round_finished(self, round_: TuningRound) -> None:
        super().round_finished(round_)
        self.left.append(weakref.ref(Cyclic()))


@pytest.mark.usefixtures("no_automatic_collection")
@pytest.mark.nightly
def test_a_tuning_frees_what_only_the_collector_can_free(
    dense: LoweredNetwork, host_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_TRIALS_PER_RELEASE", 16)
    notebook = CyclicNotebook(tmp_path)
    tune(dense, host_target, tmp_path, observers=[notebook], trials=40, num_trials_per_round=2)
    is_freed = [reference() is None for reference in notebook.left]
    assert len(is_freed) >= 16
    assert all(is_freed[:8])


def test_freed_memory_returns_to_the_system() -> None:
    """Also that below a block which is still used: the C library gives back only what is above, by itself."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    blocks = [libc.malloc(BLOCK_BYTES) for _ in range(NUM_BLOCKS)]
    for block in blocks:
        ctypes.memset(block, 1, BLOCK_BYTES)
    for block in blocks[:-1]:
        libc.free(block)
    before = psutil.Process().memory_info().rss
    release_memory()
    freed = before - psutil.Process().memory_info().rss
    libc.free(blocks[-1])
    assert freed > NUM_BLOCKS * BLOCK_BYTES / 2


CRASH = Trial(step=2, task="conv", status=TrialStatus.CRASHED, error="no\nmemory")


@pytest.fixture
def state() -> TaskState:
    state = TaskState(info=TaskInfo(index=0, name="conv", weight=2, flops=1e6, workload_hash="0x1"))
    state.add(Trial(step=1, task="conv", status=TrialStatus.OK, run_s=(2e-3,)))
    return state


def line_of_round(caplog: pytest.LogCaptureFixture, state: TaskState, *trials: Trial) -> str:
    caplog.set_level(logging.INFO, logger="ansor_mlflow")
    round_ = TuningRound(
        trials=trials, task=state, tasks=(state,), total_trials=30, elapsed_s=90.0, durations=Durations()
    )
    RoundLog().round_finished(round_)
    (line,) = caplog.messages
    assert re.match(r"^ +\d+ trials +[\d.]+ s  ", line)
    return line


def test_a_round(caplog: pytest.LogCaptureFixture, state: TaskState) -> None:
    line = line_of_round(caplog, state)
    assert line == "   30 trials   90.0 s  conv: 2 ms  network: 4 ms  20.0/min"


def test_a_round_that_ended_its_task(caplog: pytest.LogCaptureFixture, state: TaskState) -> None:
    state.stop_reason = StopReason.PLATEAU
    line = line_of_round(caplog, state, CRASH)
    assert line.endswith("  20.0/min  ended by: plateau  (1 failed, first crashed: no memory)")


def test_a_busy_machine_is_said_once(caplog: pytest.LogCaptureFixture, state: TaskState) -> None:
    round_ = TuningRound(
        trials=(), task=state, tasks=(state,), total_trials=30, elapsed_s=90.0, durations=Durations(), probe_spread=2.0
    )
    log = RoundLog()
    for _ in range(3):
        log.round_finished(round_)
    busy = "other programs use the CPUs: what they disturb is measured again, which takes longer"
    assert caplog.messages.count(busy) == 1
