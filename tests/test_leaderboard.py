"""The run that evaluates a model stands for its tuning, too: a whole row of the leaderboard for step-by-step work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import mlflow
import pytest
from helpers.commands import BRIEF, FAST, flags
from mlflow.entities import Run

from ansor_mlflow import names
from ansor_mlflow.cli.main import main
from ansor_mlflow.tracking.views import VIEWS

LEADERBOARD = VIEWS[0].state
NETWORK = "dense:4,32,16"
SEARCH = {"strategy": "random", "cost_model": "none"}
pytestmark = pytest.mark.system  # whole pipelines


@dataclass(frozen=True)
class Steps:
    """Runs of a network that was tuned, compiled and evaluated, one step at a time."""

    experiment_id: str
    tuned: Run
    evaluated: Run


def newest(experiment_id: str) -> Run:
    (run,) = mlflow.search_runs([experiment_id], order_by=["start_time DESC"], max_results=1, output_format="list")
    return run


@pytest.fixture(scope="module")
def steps(_mlflow_store: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Steps]:
    directory = tmp_path_factory.mktemp("steps")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", _mlflow_store[0])
        experiment = mlflow.MlflowClient().create_experiment("steps", (directory / "artifacts").as_uri())
        patch.setenv("MLFLOW_EXPERIMENT_ID", experiment)
        patch.chdir(directory)
        main(["tune", *flags({**FAST, **SEARCH, "network": NETWORK, "trials": 4})])
        tuned = newest(experiment)
        main(["compile", "--tune-run", tuned.info.run_id])
        model_uri = newest(experiment).data.tags[names.TAG_MODEL_URI]
        main(["evaluate", "--model-uri", model_uri, *flags(BRIEF)])
        yield Steps(experiment, tuned, newest(experiment))


def test_every_column_of_the_row_is_filled(steps: Steps) -> None:
    (row,) = mlflow.MlflowClient().search_runs([steps.experiment_id], LEADERBOARD["searchFilter"])
    assert row.info.run_id == steps.evaluated.info.run_id
    kinds = {"metrics": row.data.metrics, "params": row.data.params, "tags": row.data.tags}
    for column in LEADERBOARD["selectedColumns"]:
        kind, _, name = column.partition(".")
        if name.strip("`") == names.TAG_UNRELIABLE:  # absent where times can be trusted
            continue
        assert name.strip("`") in kinds[kind], column


def test_it_repeats_what_the_tuning_had(steps: Steps) -> None:
    tuned, evaluated = steps.tuned.data, steps.evaluated.data
    repeated = {name: evaluated.metrics[name] for name in names.TUNING_METRICS}
    assert repeated == {name: tuned.metrics[name] for name in names.TUNING_METRICS}
    assert {name: evaluated.params[name] for name in SEARCH} == SEARCH
    assert evaluated.tags[names.TAG_TUNE_RUN] == steps.tuned.info.run_id
    for tag in (names.TAG_NETWORK, names.TAG_TARGET, names.TAG_NUM_THREADS):
        assert evaluated.tags[tag] == tuned.tags[tag]
