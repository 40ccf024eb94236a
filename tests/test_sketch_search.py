"""The search among the programs of sketches: the order of trials, what it learns, and the tuning around it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlflow
import pytest

import ansor_mlflow
from ansor_mlflow import names
from ansor_mlflow.commands.explain import explain_task
from ansor_mlflow.errors import UserInputError
from ansor_mlflow.lowering.lower import lower
from ansor_mlflow.lowering.network import LoweredNetwork
from ansor_mlflow.networks.load import load_network
from ansor_mlflow.parameters import ExplainOptions, TuneOptions
from ansor_mlflow.records.log import RecordLog
from ansor_mlflow.sketches.sketch import ANNOTATION
from ansor_mlflow.tuning.program_search import TaskSearch, make_cost_model
from ansor_mlflow.tuning.sketch_search import MIN_LEARNED, ProgramSearch, SearchInBoth, SketchSearch, make_search

if TYPE_CHECKING:
    from tvm.s_tir.meta_schedule.search_strategy import MeasureCandidate
    from tvm.target import Target


@pytest.fixture(scope="module")
def conv(host_target: Target) -> LoweredNetwork:
    return lower(load_network("conv2d:1,14,14,64,32,3,3,1,1,relu").model, host_target)


def search_of(conv: LoweredNetwork, target: Target, directory: Path, cost_model: str = "xgb", **options: Any) -> Any:
    task = max(conv.tasks, key=lambda task: task.info.flops)
    return make_search(
        task,
        target=target,
        options=TuneOptions(network="conv", **{"space": "sketches", **options}),
        num_threads=1,
        seed=1,
        log=RecordLog(directory, target.export()),
        cost_model=make_cost_model(cost_model, 1, seed=1),
    )


def learn(search: ProgramSearch, candidates: Sequence[MeasureCandidate]) -> None:
    """Teaches a search that each program is slower than the one before."""
    from tvm.s_tir.meta_schedule.runner import RunnerResult

    search.learn(candidates, [RunnerResult([1e-3 * number], None) for number in range(1, len(candidates) + 1)])


def decisions(candidates: Sequence[MeasureCandidate]) -> list[str]:
    roots = [candidate.sch.get(candidate.sch.get_sblock("root")) for candidate in candidates]
    return [str(root.annotations[ANNOTATION]) for root in roots]


def kind(decision: str) -> str:
    """The tile in registers, which is named first."""
    return decision.partition("channel tiles")[0]


@pytest.mark.parametrize(
    ("space", "expected"), [("sketches", SketchSearch), ("metaschedule", TaskSearch), ("both", SearchInBoth)]
)
def test_the_space_decides_on_the_search(
    conv: LoweredNetwork, host_target: Target, tmp_path: Path, space: str, expected: type
) -> None:
    assert isinstance(search_of(conv, host_target, tmp_path, space=space), expected)


def test_the_first_trials_are_of_different_kinds(conv: LoweredNetwork, host_target: Target, tmp_path: Path) -> None:
    found = decisions(search_of(conv, host_target, tmp_path).propose(4))
    assert len({kind(decision) for decision in found}) == 4


def test_later_trials_are_also_of_the_kind_that_was_fastest(
    conv: LoweredNetwork, host_target: Target, tmp_path: Path
) -> None:
    search = search_of(conv, host_target, tmp_path)
    first = search.propose(4)
    learn(search, first)
    later = {kind(decision) for decision in decisions(search.propose(4))}
    assert kind(decisions(first)[0]) in later
    assert len(later) > 1


@pytest.mark.parametrize(
    ("options", "num_rounds"), [({"strategy": "random"}, 4), ({"strategy": "evolutionary"}, 16), ({"space": "both"}, 2)]
)
@pytest.mark.nightly
def test_no_program_is_proposed_twice(
    conv: LoweredNetwork, host_target: Target, tmp_path: Path, options: dict[str, Any], num_rounds: int
) -> None:
    """With the cost model, too, when it has learned enough to choose."""
    from tvm.s_tir.meta_schedule.utils import shash2hex

    search = search_of(conv, host_target, tmp_path, **options)
    proposed = []
    for _ in range(num_rounds):
        candidates = search.propose(12)
        assert candidates
        proposed += [shash2hex(candidate.sch.mod) for candidate in candidates]
        learn(search, candidates)
    search.close()
    assert len(proposed) > MIN_LEARNED
    assert len(set(proposed)) == len(proposed)


def test_a_small_space_ends_and_failures_have_a_second_chance(host_target: Target, tmp_path: Path) -> None:
    from tvm.s_tir.meta_schedule.runner import RunnerResult

    small = lower(load_network("dense:1,2,2").model, host_target)
    search = search_of(small, host_target, tmp_path, cost_model="none")
    candidates = search.propose(100)
    search.learn(candidates, [RunnerResult(None, "it died") for _ in candidates])
    again = search.propose(100)
    assert 0 < len(again) <= len(candidates)
    learn(search, again)
    while more := search.propose(100):
        learn(search, more)


@pytest.mark.usefixtures("experiment_id")
@pytest.mark.nightly
def test_records_of_sketches_are_resumed_and_compiled(tmp_path: Path) -> None:
    """Real trials: tuned, gone on with in MetaSchedule's space, explained and compiled."""
    quick = {"cost_model": "xgb", "min_repeat_ms": 0, "number": 1}
    network = "conv2d:1,8,8,16,8,3,3,1,1,relu"
    first = ansor_mlflow.tune(network, trials=8, space="sketches", **quick)
    second = ansor_mlflow.tune(network, trials=8, space="both", warm_start=[first.run_id], **quick)
    records = mlflow.artifacts.download_artifacts(run_id=second.run_id, artifact_path=names.RECORDS_DIR)
    assert "register tile" in Path(records, "database_tuning_record.json").read_text()
    explained = explain_task(ExplainOptions(source=first.run_id))
    assert explained.sketch.startswith("register tile: lanes ")
    assert explained.own_ratio is not None
    assert explained.sketch in "".join(explained.schedule)
    report = mlflow.artifacts.load_text(f"runs:/{first.run_id}/{names.REPORT_FILE}")
    assert explained.sketch in report
    compiled = ansor_mlflow.compile(tune_run=second.run_id)
    assert compiled.coverage.task_share == 1.0


@pytest.mark.usefixtures("experiment_id")
def test_without_trials_the_sketches_choose(caplog: pytest.LogCaptureFixture) -> None:
    """Unscheduled, this convolution takes some hundred times as long, however busy the machine is."""
    tuned = ansor_mlflow.tune("conv2d:1,28,28,128,64,3,3,1,1", trials=0)
    assert mlflow.get_run(tuned.run_id).info.status == "FINISHED"
    compiled = ansor_mlflow.compile(tune_run=tuned.run_id)
    assert not compiled.coverage.covered
    assert not compiled.coverage.unscheduled
    assert "they run as chosen without a measurement; tune this network" in caplog.text
    evaluated = ansor_mlflow.evaluate(model_uri=compiled.model_uri, turns=1, measure_s=0.1, rivals="none", instant=True)
    assert evaluated.metrics[names.MAX_REL_ERROR] <= 1e-4
    assert evaluated.metrics[names.LATENCY_MS] < evaluated.metrics[names.UNTUNED_LATENCY_MS]
    assert evaluated.metrics[names.INSTANT_LATENCY_MS] < evaluated.metrics[names.UNTUNED_LATENCY_MS]


def test_a_budget_that_is_neither_none_nor_enough_is_refused() -> None:
    with pytest.raises(UserInputError, match="each needs a trial; give at least 4, or auto, or 0 to measure nothing"):
        ansor_mlflow.tune("mlp", trials=2)
