"""The search of one task: new programs only, random ones until the cost model has learned."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ansor_mlflow.lowering.lower import lower
from ansor_mlflow.lowering.network import LoweredNetwork
from ansor_mlflow.networks.graph import GraphBuilder
from ansor_mlflow.records.log import RecordLog
from ansor_mlflow.tuning.program_search import TaskSearch, is_untrained, make_cost_model

if TYPE_CHECKING:
    from tvm.s_tir.meta_schedule.cost_model import CostModel
    from tvm.s_tir.meta_schedule.search_strategy import MeasureCandidate
    from tvm.target import Target


def make_search(
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


def learn(search: TaskSearch, candidates: Sequence[MeasureCandidate]) -> None:
    """Teaches a search that each program is slower than the one before."""
    from tvm.s_tir.meta_schedule.runner import RunnerResult

    search.learn(candidates, [RunnerResult([1e-3 * number], None) for number in range(1, len(candidates) + 1)])


def test_the_cost_model_learns_from_a_round(single: LoweredNetwork, host_target: Target, tmp_path: Path) -> None:
    cost_model = make_cost_model("xgb", 1, seed=1)
    search = make_search(single, host_target, tmp_path, "evolutionary", cost_model)
    learn(search, search.propose(8))
    search.close()
    assert cost_model.booster.num_boosted_rounds() > 0


def test_every_program_of_a_small_space_is_proposed_once(host_target: Target, tmp_path: Path) -> None:
    builder = GraphBuilder(seed=0)
    builder.dense("dense", builder.input("data", (1, 2)), units=1, in_units=2)
    small = lower(builder.build("small", {"dense": (1, 1)}), host_target)
    search = make_search(small, host_target, tmp_path, "random", make_cost_model("none", 1, seed=1), per_round=4)
    proposed: list[str] = []
    while candidates := search.propose(4):
        proposed += hashes(candidates)
        learn(search, candidates)
    search.close()
    assert 4 < len(proposed) < 100
    assert len(set(proposed)) == len(proposed)


@pytest.mark.parametrize(
    ("strategy", "cost_model"), [("random", "none"), ("evolutionary", "none"), ("evolutionary", "xgb")]
)
def test_no_program_of_a_large_space_is_proposed_twice(
    single: LoweredNetwork, host_target: Target, tmp_path: Path, strategy: str, cost_model: str
) -> None:
    """With the cost model, too, when evolution takes over from random programs."""
    search = make_search(single, host_target, tmp_path, strategy, make_cost_model(cost_model, 1, seed=1), per_round=16)
    proposed: list[str] = []
    for _ in range(5):
        candidates = search.propose(16)
        proposed += hashes(candidates)
        learn(search, candidates)
    search.close()
    assert len(set(proposed)) == len(proposed) >= 48


@pytest.mark.parametrize("strategy", ["random", "evolutionary"])
def test_a_program_that_failed_is_tried_again_when_nothing_else_is_left(
    tiny: LoweredNetwork, host_target: Target, tmp_path: Path, strategy: str
) -> None:
    """Its worker may have been killed by someone else."""
    from tvm.s_tir.meta_schedule.runner import RunnerResult

    search = make_search(tiny, host_target, tmp_path, strategy, make_cost_model("none", 1, seed=1))
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
    search = make_search(single, host_target, tmp_path, strategy, make_cost_model("none", 1, seed=1))
    learn(search, search.propose(8))  # random programs for evolution to start from
    assert [len(search.propose(limit)) for limit in (3, 8, 100)] == [3, 8, 8]
    search.close()


def test_programs_are_random_until_the_cost_model_is_trained(
    single: LoweredNetwork, host_target: Target, tmp_path: Path
) -> None:
    """The same ones that the random strategy proposes."""
    model = make_cost_model("xgb", 1, seed=1)
    evolution = make_search(single, host_target, tmp_path / "evolution", "evolutionary", model)
    random = make_search(single, host_target, tmp_path / "random", "random", make_cost_model("none", 1, seed=1))
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


def test_every_round_reaches_the_cost_model_at_once(
    single: LoweredNetwork, host_target: Target, tmp_path: Path
) -> None:
    model: Any = make_cost_model("xgb", 1, seed=1)
    search = make_search(single, host_target, tmp_path, "evolutionary", model)
    for num_rounds in range(1, 10):
        learn(search, search.propose(8))
        assert model.last_train_size == model.data_size == 8 * num_rounds
    search.close()


@pytest.mark.parametrize("kind", ["random", "none"])
def test_a_model_that_does_not_learn_is_never_waited_for(kind: str) -> None:
    assert not is_untrained(make_cost_model(kind, 1, seed=1))
