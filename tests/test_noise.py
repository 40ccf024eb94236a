"""A busy machine is noticed, what it disturbed is measured again, and what stays disturbed is not trusted."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import mlflow
import pytest
from helpers.commands import BRIEF, RunCommand, flags
from helpers.fake_tuning import Notebook, tune
from helpers.fakes import FakeRunner
from helpers.runs_here import newest_run

from ansor_mlflow import names
from ansor_mlflow.device.threads import available_cpus
from ansor_mlflow.lowering.network import LoweredNetwork
from ansor_mlflow.measuring.timing import DISTURBED, MachineNoise, ProbeTime, probe_noise, time_probe, watched
from ansor_mlflow.processes import Outcome
from ansor_mlflow.workers.builder import LocalBuilder
from ansor_mlflow.workers.measure import MeasureSettings, RunJob, arg_info
from ansor_mlflow.workers.runner import LocalRunner

if TYPE_CHECKING:
    from tvm.target import Target

QUIET, BUSY = ProbeTime(elapsed_s=0.011, cpu_s=0.010), ProbeTime(elapsed_s=0.040, cpu_s=0.010)


@contextlib.contextmanager
def load(num_processes: int, cpus: set[int]) -> Iterator[None]:
    code = f"import os\nos.sched_setaffinity(0, {cpus})\nprint(flush=True)\nwhile True: pass"
    command = [sys.executable, "-c", code]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(num_processes)]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.fixture
def one_busy_cpu() -> Iterator[int]:
    allowed = os.sched_getaffinity(0)
    cpu = min(allowed)
    os.sched_setaffinity(0, {cpu})
    try:
        with load(3, {cpu}):
            yield cpu
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.usefixtures("one_busy_cpu")
def test_the_time_that_a_thread_waits_for_a_cpu_is_seen() -> None:
    with watched() as waiting:
        until_s = time.perf_counter() + 0.5
        while time.perf_counter() < until_s:
            pass
    assert waiting.share > DISTURBED


@pytest.mark.usefixtures("one_busy_cpu")
def test_the_probe_takes_longer_beside_other_programs() -> None:
    noise = MachineNoise()
    slowdowns = [noise.add(time_probe(1)) for _ in range(10)]
    assert max(slowdowns) > 1.5
    assert noise.spread > 0.5
    assert probe_noise(1, seconds=0.3) > 0.5


def test_the_spread_is_that_of_the_ninth_decile_over_an_undisturbed_probe() -> None:
    noise = MachineNoise()
    assert noise.spread == 0
    for probe in [QUIET] * 9 + [BUSY] * 2:
        noise.add(probe)
    assert noise.slowdown == 4
    assert noise.spread == pytest.approx(3.0)


class Turns:
    """Measurements, by the share of the time that each waited for a CPU; the last one for ever."""

    def __init__(self, *waited: float) -> None:
        self._waited = list(waited)
        self.num_turns = 0

    def __call__(self) -> tuple[list[float], float]:
        self.num_turns += 1
        waited = self._waited.pop(0) if len(self._waited) > 1 else self._waited[0]
        return [1 + waited], waited


def test_a_disturbed_turn_is_measured_again_and_the_quietest_counts() -> None:
    noise, turns = MachineNoise(), Turns(0.9, 0.5)
    assert noise.measure(turns) == [1.5]
    assert turns.num_turns == 2
    assert noise.num_disturbed == 1
    assert "other programs used the CPUs during 1 of 1 measurements" in noise.unreliable


def test_no_more_than_half_of_all_measurements_are_repeated() -> None:
    noise, turns = MachineNoise(), Turns(0.9)
    for _ in range(8):
        noise.measure(turns)
    assert turns.num_turns == 8 + 4
    assert noise.num_disturbed == noise.num_measured == 8


@pytest.fixture
def job(dense: LoweredNetwork, host_target: Target) -> Iterator[RunJob]:
    from tvm.s_tir.meta_schedule.arg_info import ArgInfo

    mod = dense.tasks[0].mod
    with contextlib.closing(LocalBuilder(host_target, max_workers=1, timeout_s=60)) as builder:
        (built,) = builder.build([mod])
        assert built.value is not None, built.error
        yield RunJob(built.value, tuple(arg_info(info) for info in ArgInfo.from_entry_func(mod, remove_preproc=False)))


@contextlib.contextmanager
def runner_on(cpu: int, *, timeout_s: float, min_repeat_ms: int = 200) -> Iterator[LocalRunner]:
    settings = MeasureSettings(
        number=1, repeat=1, min_repeat_ms=min_repeat_ms, cache_flush=False, num_threads=1, timeout_s=timeout_s
    )
    with contextlib.closing(LocalRunner(settings, cpus=frozenset({cpu}))) as runner:
        yield runner


def test_a_program_that_shared_its_cpu_is_measured_again_and_marked(job: RunJob) -> None:
    cpu = min(os.sched_getaffinity(0))
    with runner_on(cpu, timeout_s=60) as runner, load(3, {cpu}):
        outcomes = runner.run([job] * 8)
        assert sum(outcome.is_disturbed for outcome in outcomes) >= 4
        assert all(outcome.value for outcome in outcomes)
        assert runner.noise.spread > 0.5
        assert runner._repeated_s > 0
        runner._repeated_s = spent_s = 1000.0
        runner.run([job])
        assert runner._repeated_s == spent_s, "more than a quarter of the time went into second measurements"


def test_timeouts_stretch_on_a_busy_machine(job: RunJob) -> None:
    with runner_on(min(os.sched_getaffinity(0)), timeout_s=0.4, min_repeat_ms=600) as runner:
        assert runner._measure(job, {}).failure == "timed_out"
        runner.noise.slowdown = 20.0
        assert runner._measure(job, {}).failure == ""


class DisturbedRunner(FakeRunner):
    """A `FakeRunner` on a busy machine."""

    def run(self, jobs: Sequence[RunJob]) -> list[Outcome[tuple[float, ...]]]:
        self.noise.add(BUSY)
        return [Outcome(outcome.value, disturbance=0.5) for outcome in super().run(jobs)]


def test_a_tuning_on_a_busy_machine_is_not_trusted(dense: LoweredNetwork, host_target: Target, tmp_path: Path) -> None:
    notebook = Notebook(tmp_path)
    result = tune(dense, host_target, tmp_path, runner=DisturbedRunner(), observers=[notebook], trials=8)
    assert result.probe_spread == pytest.approx(3.0)
    assert result.unreliable == (
        "other programs used the CPUs during 8 of 8 trials and the second measurements of 2 of 2 tasks; "
        "tune again on a quiet machine"
    )


def test_a_tuning_on_a_quiet_machine_is_trusted(dense: LoweredNetwork, host_target: Target, tmp_path: Path) -> None:
    assert tune(dense, host_target, tmp_path, runner=FakeRunner(), trials=8).unreliable == ""


@pytest.mark.system
@pytest.mark.usefixtures("new_experiment")
@pytest.mark.nightly
def test_runs_on_a_busy_machine_say_that_they_are_not_to_be_trusted(
    run_here: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with load(available_cpus(), os.sched_getaffinity(0)):
        assert run_here("tune", "--network", "dense:1,64,64", "--trials", "2") == 0
        tuned = newest_run()
        assert run_here("compile", "--tune-run", tuned.info.run_id) == 0
        model_uri = newest_run().data.tags[names.TAG_MODEL_URI]
        assert run_here("evaluate", *flags({**BRIEF, "model_uri": model_uri, "rivals": "none"})) == 0
    for run in (tuned, newest_run()):
        assert run.info.status == "FINISHED"
        assert run.data.metrics[names.PROBE_SPREAD] > 0.5
        assert "other programs used the CPUs" in run.data.tags[names.TAG_UNRELIABLE]
        assert mlflow.get_run(run.info.run_id).data.tags[names.TAG_STEP] in ("tune", "evaluate")
    assert capsys.readouterr().err.count("the times cannot be trusted: other programs used the CPUs") == 2
