"""The search of one task: MetaSchedule's sketches, evolution and cost model, driven round by round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ansor_mlflow.errors import MachineError
from ansor_mlflow.lowering import TuningTask
from ansor_mlflow.tvm_import import import_tensor_intrin

if TYPE_CHECKING:
    from tvm.s_tir.meta_schedule.cost_model import CostModel
    from tvm.s_tir.meta_schedule.database import Database
    from tvm.s_tir.meta_schedule.runner import RunnerResult
    from tvm.s_tir.meta_schedule.search_strategy import MeasureCandidate
    from tvm.target import Target

_POPULATION_SIZE = 64
"""Traces in a generation. MetaSchedule's default is 512; the search time grows with it."""
_NUM_WARMUP_SAMPLES = 48
"""Measurements before the cost model is trusted; until then rounds are random. MetaSchedule's default is 100."""
_MAX_EMPTY_ROUNDS = 5
"""Rounds without a new candidate after which a search space counts as exhausted."""
_UNLIMITED = 2**30
"""Trials that MetaSchedule is told to expect: the budget is kept by our own loop."""


def make_cost_model(kind: str, num_threads: int, seed: int) -> CostModel:
    """The cost model of that name; for "none", too, a random one, since evolution needs some order.

    Raises:
        MachineError: `kind` is "mlp" and PyTorch is missing.
    """
    from tvm.s_tir.meta_schedule import cost_model

    if kind == "xgb":
        config = cost_model.xgb_model.XGBConfig(nthread=num_threads)
        return cost_model.XGBModel(config=config, num_warmup_samples=_NUM_WARMUP_SAMPLES)
    if kind == "mlp":
        try:
            from tvm.s_tir.meta_schedule.cost_model.mlp_model import MLPModel
        except ImportError as err:
            raise MachineError("cost_model=mlp needs PyTorch: pip install torch, or use cost_model=xgb") from err
        return MLPModel()
    return cost_model.RandomModel(seed=seed)  # left to itself, the search makes one without a seed


class TaskSearch:
    """Proposes candidates for one task and learns from their measurement.

    Args:
        task: What is tuned.
        target: Device that is tuned for.
        strategy: "evolutionary" or "random".
        num_trials_per_round: Candidates of one proposal.
        num_threads: Threads of the search; with one, a seed gives the same candidates again.
        seed: Seed of the search.
        database: Where the search finds measured schedules to start from.
        cost_model: Ranks candidates and is trained by `learn`.
    """

    def __init__(
        self,
        task: TuningTask,
        *,
        target: Target,
        strategy: str,
        num_trials_per_round: int,
        num_threads: int,
        seed: int,
        database: Database,
        cost_model: CostModel,
    ) -> None:
        from tvm.s_tir.meta_schedule import TuneContext
        from tvm.s_tir.meta_schedule.search_strategy import EvolutionarySearch, ReplayTrace

        import_tensor_intrin()
        self._cost_model = cost_model
        self._context = TuneContext(
            mod=task.mod,
            target=target,
            space_generator="post-order-apply",
            search_strategy=(
                EvolutionarySearch(population_size=_POPULATION_SIZE) if strategy == "evolutionary" else ReplayTrace()
            ),
            task_name=task.info.name,
            rand_state=seed,
            num_threads=num_threads,
            logger=_silent_logger(),
        )
        self._context.pre_tuning(
            max_trials=_UNLIMITED,
            num_trials_per_iter=num_trials_per_round,
            database=database,
            cost_model=cost_model,
        )

    def propose(self, limit: int) -> list[MeasureCandidate]:
        """At most `limit` programs, best guess first; none when the space is exhausted.

        Evolution proposes no program twice; the random strategy may.
        """
        for _ in range(_MAX_EMPTY_ROUNDS):
            candidates = self._context.generate_measure_candidates()
            if candidates is None:
                return []
            if len(candidates):
                return list(candidates)[:limit]
        return []

    def learn(self, candidates: Sequence[MeasureCandidate], results: Sequence[RunnerResult]) -> None:
        """Trains the cost model and moves the search on."""
        self._cost_model.update(self._context, list(candidates), list(results))
        self._context.notify_runner_results(list(candidates), list(results))

    def close(self) -> None:
        """Frees the state of the search."""
        self._context.post_tuning()


def _silent_logger() -> Any:
    """MetaSchedule logs every step of a search; what matters of it reaches our observers."""
    import logging

    logger = logging.getLogger("ansor_mlflow.metaschedule")
    logger.setLevel(logging.ERROR)
    return logger
