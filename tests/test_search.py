"""The search of one task among MetaSchedule's programs and those of sketches: new programs only, and what it learns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlflow
import pytest

import ansor_mlflow
from ansor_mlflow import names
from ansor_mlflow.errors import UserInputError
from ansor_mlflow.lowering.lower import lower
from ansor_mlflow.lowering.network import LoweredNetwork
from ansor_mlflow.networks.load import load_network
from ansor_mlflow.parameters import TuneOptions
from ansor_mlflow.records.log import RecordLog
from ansor_mlflow.sketches.sketch import ANNOTATION
from ansor_mlflow.tuning.program_search import TaskSearch, is_untrained, make_cost_model
from ansor_mlflow.tuning.sketch_search import (
    MIN_LEARNED,
    ProgramSearch,
    SearchInBoth,
    SketchSearch,
    make_search,
)

if TYPE_CHECKING:
    from tvm.s_tir.meta_schedule.cost_model import CostModel
    from tvm.s_tir.meta_schedule.search_strategy import MeasureCandidate
    from tvm.target import Target


def task_search(
    lowered: LoweredNetwork, target: Target, directory: Path, strategy: str, cost_model: CostModel, per_round: int = 8
) -> TaskSearch:
    return TaskSearch(
        lowered.tasks[0],
        target=target,
        strategy=strategy,
        num_trials_per_round=per_round,
        num_threads=1,
        seed=1,
        log=RecordLog(directory, target.export()),
        cost_model=cost_model,
    )


def hashes(candidates: Sequence[MeasureCandidate]) -> list[str]:
    from tvm.s_tir.meta_schedule.utils import shash2hex

    return [shash2hex(candidate.sch.mod) for candidate in candidates]


def learn(search: TaskSearch | ProgramSearch, candidates: Sequence[MeasureCandidate]) -> None:
    from tvm.s_tir.meta_schedule.runner import RunnerResult

    search.learn(candidates, [RunnerResult([1e-3 * number], None) for number in range(1, len(candidates) + 1)])


@pytest.mark.parametrize(
    ("strategy", "cost_model"), [("random", "none"), ("evolutionary", "none"), ("evolutionary", "xgb")]
)
@pytest.mark.nightly
def test_no_program_of_a_large_space_is_proposed_twice(
    single: LoweredNetwork, host_target: Target, tmp_path: Path, strategy: str, cost_model: str
) -> None:
    """With the cost model, too, when evolution takes over from random programs."""
    search = task_search(single, host_target, tmp_path, strategy, make_cost_model(cost_model, 1, seed=1), per_round=16)
    proposed: list[str] = []
    for _ in range(5):
        candidates = search.propose(16)
        proposed += hashes(candidates)
        learn(search, candidates)
    search.close()
    assert len(set(proposed)) == len(proposed) >= 48


@pytest.mark.parametrize("strategy", ["random", "evolutionary"])
@pytest.mark.nightly
def test_a_program_that_failed_is_tried_again_when_nothing_else_is_left(
    tiny: LoweredNetwork, host_target: Target, tmp_path: Path, strategy: str
) -> None:
    """Its worker may have been killed by someone else."""
    from tvm.s_tir.meta_schedule.runner import RunnerResult

    search = task_search(tiny, host_target, tmp_path, strategy, make_cost_model("none", 1, seed=1))
    proposed: list[str] = []
    while candidates := search.propose(8):
        proposed += hashes(candidates)
        search.learn(candidates, [RunnerResult(None, "the worker process died (SIGKILL)") for _ in candidates])
    search.close()
    assert len(proposed) == 5
    assert len(set(proposed)) == 1


@pytest.mark.parametrize("strategy", ["random", "evolutionary"])
def test_a_proposal_keeps_to_its_limit_and_is_a_round_at_most(
    single: LoweredNetwork, host_target: Target, tmp_path: Path, strategy: str
) -> None:
    search = task_search(single, host_target, tmp_path, strategy, make_cost_model("none", 1, seed=1))
    learn(search, search.propose(8))  # random programs for evolution to start from
    assert [len(search.propose(limit)) for limit in (3, 8, 100)] == [3, 8, 8]
    search.close()


def test_programs_are_random_until_the_cost_model_is_trained(
    single: LoweredNetwork, host_target: Target, tmp_path: Path
) -> None:
    """The same ones that the random strategy proposes."""
    model = make_cost_model("xgb", 1, seed=1)
    evolution = task_search(single, host_target, tmp_path / "evolution", "evolutionary", model)
    random = task_search(single, host_target, tmp_path / "random", "random", make_cost_model("none", 1, seed=1))
    alike: list[bool] = []
    trained: list[bool] = []
    for _ in range(7):
        trained.append(not is_untrained(model))
        proposals = [search.propose(8) for search in (evolution, random)]
        alike.append(hashes(proposals[0]) == hashes(proposals[1]))
        for search, candidates in zip((evolution, random), proposals, strict=True):
            learn(search, candidates)
    evolution.close()
    random.close()
    assert trained == [False] * 6 + [True]
    assert alike == [True] * 6 + [False]


@pytest.mark.nightly
def test_every_round_reaches_the_cost_model_at_once(
    single: LoweredNetwork, host_target: Target, tmp_path: Path
) -> None:
    model: Any = make_cost_model("xgb", 1, seed=1)
    search = task_search(single, host_target, tmp_path, "evolutionary", model)
    for num_rounds in range(1, 10):
        learn(search, search.propose(8))
        assert model.last_train_size == model.data_size == 8 * num_rounds
    search.close()


@pytest.mark.parametrize("kind", ["random", "none"])
def test_a_model_that_does_not_learn_is_never_waited_for(kind: str) -> None:
    assert not is_untrained(make_cost_model(kind, 1, seed=1))


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
