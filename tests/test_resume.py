"""A tuning that was stopped goes on: its trials count, and none of its programs is measured again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from helpers.fake_tuning import Notebook, read_records, tune
from helpers.fakes import FakeRunner

from ansor_mlflow import names
from ansor_mlflow.lowering.network import LoweredNetwork
from ansor_mlflow.processes import Outcome
from ansor_mlflow.records.damage import repair
from ansor_mlflow.records.log import Journal, read_durations, read_journal
from ansor_mlflow.records.store import JOURNAL_FILE, RECORD_FILE, WORKLOAD_FILE, RecordPair
from ansor_mlflow.trials import Durations, TrialStatus, TuningRound
from ansor_mlflow.workers.measure import RunJob

if TYPE_CHECKING:
    from tvm.target import Target


class StopError(Exception):
    """Ends a tuning in the middle."""


class StopAfter(Notebook):
    """Ends the tuning after some rounds."""

    def __init__(self, records: Path, num_rounds: int) -> None:
        super().__init__(records)
        self._num_rounds = num_rounds

    def round_finished(self, round_: TuningRound) -> None:
        super().round_finished(round_)
        if len(self.rounds) == self._num_rounds:
            raise StopError


class EveryThirdFails(FakeRunner):
    """A `FakeRunner` by which every third program crashes."""

    def run(self, jobs: Sequence[RunJob]) -> list[Outcome[tuple[float, ...]]]:
        outcomes = super().run(jobs)
        return [
            Outcome(failure="crashed", error="it died") if number % 3 == 0 else outcome
            for number, outcome in enumerate(outcomes)
        ]


def stop_after(lowered: LoweredNetwork, target: Target, records: Path, num_rounds: int, **options: Any) -> None:
    with pytest.raises(StopError):
        tune(lowered, target, records, observers=[StopAfter(records, num_rounds)], **options)


@pytest.mark.system
@pytest.mark.parametrize(
    ("strategy", "cost_model"), [("random", "none"), pytest.param("evolutionary", "xgb", marks=pytest.mark.nightly)]
)
def test_a_tuning_that_is_stopped_again_and_again_has_exactly_its_trials(
    single: LoweredNetwork, host_target: Target, tmp_path: Path, strategy: str, cost_model: str
) -> None:
    options = {"strategy": strategy, "cost_model": cost_model, "trials": 80, "num_trials_per_round": 8}
    runner = FakeRunner()
    stop_after(single, host_target, tmp_path, 3, runner=runner, **options)
    for num_rounds in (1, 4):
        stop_after(single, host_target, tmp_path, num_rounds, runner=runner, resume=True, **options)
    notebook = Notebook(tmp_path)
    result = tune(single, host_target, tmp_path, runner=runner, observers=[notebook], resume=True, **options)
    measured = {job.path for job in runner.jobs}  # winners are measured again
    assert result.total_trials == len(read_records(tmp_path)) == len(measured) == 80
    assert [trial.step for trials in notebook.rounds for trial in trials] == list(range(65, 81))
    assert len({json.dumps(trace) for _, (trace, *_) in read_records(tmp_path)}) == 80  # no program twice


@pytest.mark.parametrize("space", ["sketches", "metaschedule"])
def test_what_made_the_programs_is_known_again(
    single: LoweredNetwork, host_target: Target, tmp_path: Path, space: str
) -> None:
    before, after = Notebook(tmp_path), Notebook(tmp_path)
    tune(single, host_target, tmp_path, space=space, observers=[before], trials=6)
    tune(single, host_target, tmp_path, space=space, observers=[after], trials=8, resume=True)
    assert after.plan is not None
    past = [trial for round_ in after.plan.past for trial in round_.trials]
    told = [trial for trials in (*before.rounds, *after.rounds) for trial in trials]
    assert past == told[:6]
    rounds = enumerate([*before.rounds, *after.rounds], start=1)
    assert [trial.round_ for trial in told] == [number for number, trials in rounds for _ in trials]
    assert len({trial.decision for trial in told}) == 8
    assert {trial.decision.partition(": ")[0] == "metaschedule" for trial in told} == {space == "metaschedule"}


@pytest.mark.nightly
def test_what_was_known_of_the_tasks_is_known_again(
    small_lowered: LoweredNetwork, host_target: Target, tmp_path: Path
) -> None:
    whole, parts = Notebook(tmp_path / "whole"), Notebook(tmp_path / "parts")
    runner = EveryThirdFails()
    trials = 8 * len(small_lowered.tasks)
    tune(small_lowered, host_target, tmp_path / "whole", runner=runner, observers=[whole], trials=trials)
    stop_after(small_lowered, host_target, tmp_path / "parts", 3, runner=EveryThirdFails(), trials=trials)
    result = tune(
        small_lowered,
        host_target,
        tmp_path / "parts",
        runner=EveryThirdFails(),
        observers=[parts],
        trials=trials,
        resume=True,
    )
    assert whole.result is not None
    assert result.total_trials == whole.result.total_trials == trials
    num_tasks = len(small_lowered.tasks)
    assert parts.tasks[: num_tasks - 3] == whole.tasks[3:num_tasks]  # the first pass goes on
    for task in result.tasks:
        assert task.total_trials > 0
        assert task.num_trials[TrialStatus.CRASHED] > 0
        assert task.first_error == "crashed: it died"
    journal = read_journal(tmp_path / "parts")
    assert [entry.step for entry in journal] == list(range(1, trials + 1))
    assert [entry.elapsed_s for entry in journal] == sorted(entry.elapsed_s for entry in journal)


def test_a_finished_tuning_goes_on_with_a_larger_budget(
    single: LoweredNetwork, host_target: Target, tmp_path: Path
) -> None:
    tune(single, host_target, tmp_path, trials=8)
    assert tune(single, host_target, tmp_path, trials=8, resume=True).total_trials == 8
    assert tune(single, host_target, tmp_path, trials=20, resume=True).total_trials == 20
    assert len(read_records(tmp_path)) == 20


def test_the_time_goes_on_from_where_it_was(single: LoweredNetwork, host_target: Target, tmp_path: Path) -> None:
    first = tune(single, host_target, tmp_path, trials=8)
    assert read_durations(tmp_path) == first.durations
    assert first.durations.search_s > 0
    spent = Durations(search_s=1e6, build_s=2e6, run_s=3e6, confirm_s=4e6, log_s=5e6)
    Journal(tmp_path).append((), spent)
    stop_after(single, host_target, tmp_path, 1, trials=20, resume=True)
    result = tune(single, host_target, tmp_path, trials=20, resume=True)
    for name, seconds in asdict(spent).items():
        assert seconds < getattr(result.durations, name) < seconds + 1e5
    assert result.total_trials == 20


def test_a_tuning_whose_journal_says_nothing_of_the_time_goes_on(
    single: LoweredNetwork, host_target: Target, tmp_path: Path
) -> None:
    """An earlier version wrote it, or the line is damaged."""
    tune(single, host_target, tmp_path, trials=8)
    lines = (tmp_path / JOURNAL_FILE).read_text().splitlines(keepends=True)
    kept = [line for line in lines if '"durations"' not in line]
    assert len(kept) == 1 + 8 < len(lines)  # the header, and the trials
    (tmp_path / JOURNAL_FILE).write_text(
        "".join([*kept, '{"durations": {"search_s": "long"}}\n', '{"durations": 3}\n'])
    )
    assert read_durations(tmp_path) == Durations()
    result = tune(single, host_target, tmp_path, trials=12, resume=True)
    assert (result.total_trials, result.tasks[0].num_trials[TrialStatus.OK]) == (12, 12)


def test_records_of_an_earlier_tuning_do_not_count(single: LoweredNetwork, host_target: Target, tmp_path: Path) -> None:
    tune(single, host_target, tmp_path, trials=8)
    stop_after(single, host_target, tmp_path, 1, trials=8, seed=7)
    assert tune(single, host_target, tmp_path, trials=8, seed=7, resume=True).total_trials == 8
    assert len(read_records(tmp_path)) == 16


@pytest.mark.parametrize("kept", [b"", b'{"step": 1}\nno JSON\n'], ids=["no journal", "a damaged one"])
def test_without_a_journal_the_records_count(
    single: LoweredNetwork, host_target: Target, tmp_path: Path, kept: bytes
) -> None:
    """The process may have died between the two, or a file was lost."""
    tune(single, host_target, tmp_path, runner=EveryThirdFails(), trials=8)
    (tmp_path / JOURNAL_FILE).write_bytes(kept)
    statuses = [entry.status for entry in read_journal(tmp_path)]
    assert statuses.count(TrialStatus.RUN_FAILED) == 4
    assert tune(single, host_target, tmp_path, trials=12, resume=True).total_trials == 12


def test_a_round_that_was_cut_off_is_measured_again(
    single: LoweredNetwork, host_target: Target, tmp_path: Path
) -> None:
    stop_after(single, host_target, tmp_path, 2, trials=16)
    records = (tmp_path / RECORD_FILE).read_bytes()
    (tmp_path / RECORD_FILE).write_bytes(records[:-100])
    repair(RecordPair.in_directory(tmp_path))
    assert len(read_journal(tmp_path)) == 7
    assert tune(single, host_target, tmp_path, trials=16, resume=True).total_trials == 16


def test_a_record_without_an_entry_has_the_hash_that_tvm_writes(tmp_path: Path) -> None:
    """With sixteen digits, leading zeros too, by which the tuner knows its tasks."""
    (tmp_path / WORKLOAD_FILE).write_text('["123","bW9kdWxl"]\n["456","bW9kdWxl"]\n')
    records = "".join(f'[{index},[[],[0.001],{{"kind":"llvm"}},[]]]\n' for index in (0, 0, 1))
    (tmp_path / RECORD_FILE).write_text(records)
    entries = read_journal(tmp_path)
    assert [entry.workload_hash for entry in entries] == [f"0x{hash_:016x}" for hash_ in (123, 123, 456)]
    assert [entry.round_ for entry in entries] == [1, 1, 2]  # a round is one task's


def test_a_line_that_was_cut_off_does_not_take_the_next_one_along(
    single: LoweredNetwork, host_target: Target, tmp_path: Path
) -> None:
    stop_after(single, host_target, tmp_path, 2, trials=16)
    journal = (tmp_path / JOURNAL_FILE).read_bytes()
    (tmp_path / JOURNAL_FILE).write_bytes(journal[:-20])
    tune(single, host_target, tmp_path, runner=EveryThirdFails(), trials=16, resume=True)
    statuses = [entry.status for entry in read_journal(tmp_path)]
    assert statuses[8:].count(TrialStatus.CRASHED) == 4
    assert TrialStatus.RUN_FAILED not in statuses  # which is what a record alone would say


def test_winners_of_an_earlier_process_are_measured_again(
    dense: LoweredNetwork, host_target: Target, tmp_path: Path
) -> None:
    best = tmp_path / names.BEST_DIR
    tune(dense, host_target, tmp_path, runner=FakeRunner([1e-3]), trials=8, best=best)
    runner = FakeRunner([2e-3])
    result = tune(dense, host_target, tmp_path, runner=runner, trials=8, best=best, resume=True)
    assert runner.jobs  # though there was no trial left
    assert [task.confirmed_s for task in result.tasks] == [2e-3] * 2
    assert [set(record[1][1]) for record in read_records(best)] == [{2e-3}] * 2
    traces = [record[1][0] for record in read_records(tmp_path)]
    assert all(record[1][0] in traces for record in read_records(best))
