"""The fastest programs of a task are measured again, in turns, and the truly fastest is written for the compiler."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from helpers.fake_tuning import TaskRunner, read_records, tune
from helpers.fakes import FakeBuilder, FakeRunner

from ansor_mlflow import names
from ansor_mlflow.device.device import Device
from ansor_mlflow.device.threads import available_cpus
from ansor_mlflow.lowering.network import LoweredNetwork
from ansor_mlflow.parameters import TuneOptions
from ansor_mlflow.processes import Outcome
from ansor_mlflow.records.store import RECORD_FILE, WORKLOAD_FILE
from ansor_mlflow.trials import Trial, TrialStatus, TuningResult
from ansor_mlflow.tuning.job import TuningJob, tune_job
from ansor_mlflow.tuning.winners import Winners
from ansor_mlflow.workers.measure import RunJob

if TYPE_CHECKING:
    from tvm.target import Target

NO_CANDIDATE: Any = None
"""Where the schedule does not matter."""


class Stage:
    """Winners of some tasks, and libraries to offer them."""

    def __init__(self, num_tasks: int = 1) -> None:
        self.winners = Winners(num_tasks)
        self.builder = FakeBuilder()
        self.names: dict[Path, str] = {}

    def offer(self, name: str, first_s: float | None, task: int = 0) -> Path:
        """Builds a library and offers it with its first measurement; None for one that failed."""
        (built,) = self.builder.build([NO_CANDIDATE])
        assert built.value is not None
        self.names[built.value] = name
        times = () if first_s is None else (first_s,)
        status = TrialStatus.OK if times else TrialStatus.RUN_FAILED
        trial = Trial(step=len(self.names), task=str(task), status=status, run_s=times, error="" if times else "no")
        self.winners.offer(task, trial, NO_CANDIDATE, RunJob(built.value, ()))
        return built.value

    @property
    def kept(self) -> set[str]:
        return {name for path, name in self.names.items() if path.exists()}

    def winner(self, task: int = 0) -> str | None:
        finalist = self.winners.of_task(task)
        return self.names[finalist.job.path] if finalist else None

    def order(self, runner: FakeRunner) -> str:
        return "".join(self.names[job.path] for job in runner.jobs)


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.builder.close()


@pytest.fixture
def stage_of_two() -> Iterator[Stage]:
    stage = Stage(num_tasks=2)
    yield stage
    stage.builder.close()


class SecondTimes(FakeRunner):
    """A `FakeRunner` that knows the times of each program, one after the other, the last one for ever.

    A negative time is one that other programs disturbed.
    """

    def __init__(self, stage: Stage, run_s: Mapping[str, Sequence[float]]) -> None:
        super().__init__()
        self._stage = stage
        self._times = {name: list(times) for name, times in run_s.items()}

    def run(self, jobs: Sequence[RunJob]) -> list[Outcome[tuple[float, ...]]]:
        self.jobs += jobs
        return [self._next(self._times[self._stage.names[job.path]]) for job in jobs]

    def _next(self, times: list[float]) -> Outcome[tuple[float, ...]]:
        seconds = times.pop(0) if len(times) > 1 else times[0]
        if math.isinf(seconds):
            return Outcome(failure="crashed", error="the worker process died (SIGSEGV)")
        return Outcome((abs(seconds),), disturbance=0.5 if seconds < 0 else 0.0)


@pytest.mark.parametrize(
    ("first_s", "kept"),
    [
        ({"a": 1.0}, "a"),
        ({"a": 1.0, "b": 1.02, "c": 1.03, "d": 1.01}, "abd"),
        ({"a": 1.0, "b": 1.2}, "a"),
        ({"a": 1.22, "b": 1.21, "c": 1.0}, "c"),
        ({"a": 1.02, "b": 1.01, "c": 1.0}, "abc"),
        ({"a": None, "b": 1.0, "c": None}, "b"),
        ({"a": None}, ""),
    ],
    ids=["one", "at most three", "too slow", "overtaken", "within the margin", "failed ones", "all failed"],
)
def test_libraries_of_at_most_three_programs_that_are_about_as_fast_are_kept(
    stage: Stage, first_s: Mapping[str, float | None], kept: str
) -> None:
    for name, seconds in first_s.items():
        stage.offer(name, seconds)
    assert stage.kept == set(kept)


def test_a_task_without_a_valid_trial_has_no_winner(stage_of_two: Stage) -> None:
    stage_of_two.offer("a", None, task=0)
    stage_of_two.offer("b", 1.0, task=1)
    runner = FakeRunner()
    stage_of_two.winners.measure_again(runner)
    assert stage_of_two.winner(0) is None
    assert stage_of_two.winner(1) == "b"
    assert stage_of_two.order(runner) == "bb"


def test_programs_are_measured_in_turns_over_all_tasks(stage_of_two: Stage) -> None:
    for name, first_s, task in (("a", 1.0, 0), ("b", 1.01, 0), ("c", 1.02, 0), ("x", 2.0, 1), ("y", 2.02, 1)):
        stage_of_two.offer(name, first_s, task)
    times = {"a": [1.0], "b": [1.1], "c": [1.2], "x": [2.0], "y": [2.5]}
    runner = SecondTimes(stage_of_two, times)
    stage_of_two.winners.measure_again(runner)
    assert stage_of_two.order(runner) == "axbyc" * 2


def test_programs_that_cannot_be_told_apart_are_measured_at_most_three_times(stage_of_two: Stage) -> None:
    """The other task is decided after two passes."""
    for name, first_s, task in (("a", 1.0, 0), ("b", 1.0, 0), ("x", 2.0, 1), ("y", 2.0, 1)):
        stage_of_two.offer(name, first_s, task)
    runner = SecondTimes(stage_of_two, {"a": [1.0], "b": [1.0], "x": [2.0], "y": [2.2]})
    stage_of_two.winners.measure_again(runner)
    assert stage_of_two.order(runner) == "axby" * 2 + "ab"


def test_a_disturbed_measurement_is_made_up_for(stage: Stage) -> None:
    """Of the task's two programs the first is measured three times: once while another program ran."""
    stage.offer("a", 1.0)
    stage.offer("b", 1.0)
    stage.winners.measure_again(runner := SecondTimes(stage, {"a": [-4.0, 1.0], "b": [1.2]}))
    assert stage.order(runner) == "ab" * 3
    winner = stage.winners.of_task(0)
    assert winner is not None
    assert stage.winner() == "a"
    assert winner.confirmed_s == 1.0
    assert stage.winners.num_disturbed == (0, 1)


def test_on_a_machine_that_stays_busy_the_fastest_measurement_counts_and_is_not_trusted(stage: Stage) -> None:
    stage.offer("a", 1.0)
    stage.winners.measure_again(runner := SecondTimes(stage, {"a": [-4.0, -2.0, -3.0]}))
    assert stage.order(runner) == "a" * 6
    winner = stage.winners.of_task(0)
    assert winner is not None
    assert winner.confirmed_s == 2.0
    assert stage.winners.standard_error(winner) is None
    assert stage.winners.num_disturbed == (1, 1)


def test_an_interrupt_is_looked_for_after_every_pass(stage: Stage) -> None:
    stage.offer("a", 1.0)
    runner = FakeRunner()

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        stage.winners.measure_again(runner, interrupt)
    assert stage.order(runner) == "a"


@pytest.mark.parametrize(
    ("times", "winner", "confirmed_s"),
    [
        ({"a": [1.2], "b": [1.06]}, "b", 1.06),
        ({"a": [1.0], "b": [1.06]}, "a", 1.0),
        ({"a": [9.0, 1.0, 1.0, 1.0, 1.0], "b": [1.1]}, "a", 1.0),
        ({"a": [math.inf], "b": [1.1]}, "b", 1.1),
        ({"a": [1.0, math.inf], "b": [1.1]}, "b", 1.1),
        ({"a": [math.inf], "b": [math.inf]}, "a", None),
    ],
    ids=["the first was lucky", "the first is right", "one disturbance", "crashes", "crashes later", "both crash"],
)
def test_the_truly_faster_one_wins(
    stage: Stage, times: Mapping[str, Sequence[float]], winner: str, confirmed_s: float | None
) -> None:
    stage.offer("a", 1.0)
    stage.offer("b", 1.02)
    stage.winners.measure_again(SecondTimes(stage, times))
    assert stage.winner() == winner
    finalist = stage.winners.of_task(0)
    assert finalist is not None
    assert finalist.confirmed_s == confirmed_s


HIDDEN, LOGITS = (4, 32), (4, 16)
"""The tasks of `dense`, by the shape of their first argument."""


class Lucky(TaskRunner):
    """A `TaskRunner` whose second library of each task was lucky the first time: later it takes a third longer."""

    def __init__(self) -> None:
        super().__init__({shape: [1e-3, 0.98e-3, 2e-3] for shape in (HIDDEN, LOGITS)})
        self._measured: set[Path] = set()

    def run(self, jobs: Sequence[RunJob]) -> list[Outcome[tuple[float, ...]]]:
        outcomes = super().run(jobs)
        later = {job.path for job in jobs if job.path in self._measured}
        self._measured.update(job.path for job in jobs)
        return [
            Outcome((1.33e-3,)) if job.path in later and outcome.value == (0.98e-3,) else outcome
            for job, outcome in zip(jobs, outcomes, strict=True)
        ]


@pytest.fixture(scope="module")
def lucky(dense: LoweredNetwork, host_target: Target, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Records of a tuning with `Lucky` times and their `best/`, and the tuning's result."""
    directory = tmp_path_factory.mktemp("lucky")
    result = tune(dense, host_target, directory, runner=Lucky(), best=directory / names.BEST_DIR, trials=16)
    return directory, result


def test_the_result_has_both_measurements(lucky: tuple[Path, TuningResult]) -> None:
    _, result = lucky
    assert [task.best_s for task in result.tasks] == [0.98e-3] * 2
    assert [task.confirmed_s for task in result.tasks] == [1e-3] * 2
    np.testing.assert_allclose([task.optimism for task in result.tasks], 1 / 0.98)
    np.testing.assert_allclose(result.estimated_latency_s, 2 * 0.98e-3)
    np.testing.assert_allclose(result.confirmed_latency_s, 2 * 1e-3)
    assert result.durations.confirm_s > 0


def test_the_winners_are_a_database_that_tvm_reads(
    lucky: tuple[Path, TuningResult], dense: LoweredNetwork, host_target: Target
) -> None:
    from tvm.s_tir.meta_schedule.database import JSONDatabase

    best = lucky[0] / names.BEST_DIR
    assert {path.name for path in best.iterdir()} == {WORKLOAD_FILE, RECORD_FILE}
    database = JSONDatabase(work_dir=str(best), allow_missing=False)
    assert len(database) == len(dense.tasks)
    for task in dense.tasks:
        record = database.query_tuning_record(task.mod, host_target, task.info.name)
        assert {float(seconds) for seconds in record.run_secs} == {1e-3}
        all_records = JSONDatabase(work_dir=str(lucky[0])).get_top_k(database.commit_workload(task.mod), 2)
        lucky_one, true_one = (str(found.trace) for found in all_records)
        assert str(record.trace) == true_one != lucky_one


def test_a_winner_whose_second_measurement_failed_keeps_its_first(
    single: LoweredNetwork, host_target: Target, tmp_path: Path
) -> None:
    failure: Outcome[Any] = Outcome(failure="crashed", error="no")
    runner = FakeRunner([1e-3, 5e-3], failures=dict.fromkeys(range(3, 20), failure))
    result = tune(single, host_target, tmp_path, runner=runner, best=tmp_path / names.BEST_DIR, trials=2)
    assert result.tasks[0].confirmed_s is None
    assert result.tasks[0].optimism is None
    assert result.confirmed_latency_s is None
    assert result.estimated_latency_s == 1e-3
    assert [record[1][1] for record in read_records(tmp_path / names.BEST_DIR)] == [[1e-3]]


def test_winners_of_a_real_tuning_replace_older_ones(
    single: LoweredNetwork, host_target: Target, tmp_path: Path
) -> None:
    best = tmp_path / names.BEST_DIR
    best.mkdir()
    (best / "of a tuning before").touch()
    job = TuningJob(network="single", lowered=single, device=Device.of(host_target, available_cpus()), records=tmp_path)
    options = TuneOptions(trials=3, strategy="random", cost_model="none", min_repeat_ms=1)
    result = tune_job(job, options, options)
    assert result.tasks[0].confirmed_s is not None
    assert {path.name for path in best.iterdir()} == {WORKLOAD_FILE, RECORD_FILE}
    (record,) = read_records(best)
    assert 1 <= len(record[1][1]) <= 3  # where other programs disturbed all measurements, one
    np.testing.assert_allclose(np.median(record[1][1]), result.tasks[0].confirmed_s)
    traces = [json.dumps(measured[1][0]) for measured in read_records(tmp_path)]
    assert json.dumps(record[1][0]) in traces
