"""Every experiment of ours gets two saved views, once, whose rows steps fill; what its users make of them stays."""

from __future__ import annotations

import base64
import json
import logging
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlflow
import pytest
from helpers.commands import BRIEF, FAST, flags
from mlflow.entities import Run

from ansor_mlflow import names
from ansor_mlflow.cli.main import main
from ansor_mlflow.parameters import EvaluateOptions
from ansor_mlflow.tracking.report import views
from ansor_mlflow.tracking.report.views import VIEWS, SavedView, ensure_views
from ansor_mlflow.tracking.run import step_run

LEADERBOARD, CHARTS = VIEWS
PAGE = Path(mlflow.__file__).parent / "server" / "js" / "build" / "static" / "js"
"""The programs of MLflow's user interface."""
MAX_CHARS = 20_000


@pytest.fixture(autouse=True)
def _cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def open_a_run() -> None:
    with step_run("evaluate", EvaluateOptions(model_uri="models:/small/1"), "a step"):
        pass


def tags_of(experiment_id: str) -> dict[str, str]:
    tags = mlflow.MlflowClient().get_experiment(experiment_id).tags
    return {key: value for key, value in tags.items() if key.startswith(names.VIEW_PREFIX)}


def decoded(value: str) -> dict[str, Any]:
    """The state in a tag, as MLflow's page reads it."""
    compressed = json.loads(value)["state"].removeprefix("deflate;")
    return dict(json.loads(zlib.decompress(base64.b64decode(compressed))))


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "_seen", set())


def test_a_step_adds_both_views(new_experiment: str) -> None:
    open_a_run()
    tags = tags_of(new_experiment)
    assert set(tags) == {"mlflow.sharedViewState.ansor-leaderboard", "mlflow.sharedViewState.ansor-tuning-charts"}
    for view in VIEWS:
        envelope = json.loads(tags[view.tag])
        assert envelope["name"] == view.name
        assert envelope["createdAt"] == envelope["updatedAt"] > 1.7e12
        assert envelope["state"].startswith("deflate;")
        assert len(tags[view.tag]) < MAX_CHARS
        assert decoded(tags[view.tag]) == view.state


def test_a_process_asks_once_for_each_experiment(new_experiment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    open_a_run()
    for view in VIEWS:
        mlflow.MlflowClient().delete_experiment_tag(new_experiment, view.tag)
    open_a_run()
    assert tags_of(new_experiment) == {}
    forget(monkeypatch)
    open_a_run()
    assert len(tags_of(new_experiment)) == 2


@pytest.mark.parametrize("left", VIEWS, ids=lambda view: view.key)
def test_what_users_made_of_a_view_stays(new_experiment: str, left: SavedView, monkeypatch: pytest.MonkeyPatch) -> None:
    """One was edited, the other deleted."""
    client = mlflow.MlflowClient()
    open_a_run()
    for view in VIEWS:
        client.delete_experiment_tag(new_experiment, view.tag)
    client.set_experiment_tag(new_experiment, left.tag, "edited")
    forget(monkeypatch)
    open_a_run()
    assert tags_of(new_experiment) == {left.tag: "edited"}


def test_views_of_others_are_left_alone(new_experiment: str) -> None:
    theirs = f"{names.VIEW_PREFIX}b7b1c3"
    mlflow.MlflowClient().set_experiment_tag(new_experiment, theirs, "theirs")
    open_a_run()
    tags = tags_of(new_experiment)
    assert tags[theirs] == "theirs"
    assert {view.tag for view in VIEWS} <= tags.keys()


@pytest.mark.usefixtures("experiment_id")
def test_a_failure_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "ansor_mlflow"):
        ensure_views("987654321")
        ensure_views("987654321")
    (message,) = [record.getMessage() for record in caplog.records if record.name == "ansor_mlflow"]
    assert re.match("the experiment 987654321 gets no saved views: .*987654321", message)


def make_run(
    experiment_id: str, tags: dict[str, str], latency_ms: float | None = None, status: str = "FINISHED"
) -> str:
    client = mlflow.MlflowClient()
    run_id = str(client.create_run(experiment_id, tags=tags).info.run_id)
    if latency_ms is not None:
        client.log_metric(run_id, names.LATENCY_MS, latency_ms)
    client.set_terminated(run_id, status)
    return run_id


def test_the_leaderboard_has_what_was_measured_and_nothing_else(new_experiment: str) -> None:
    """A pipeline is one row; so is an evaluation of step-by-step work."""
    main = make_run(new_experiment, {names.TAG_STEP: "main"}, 2.0)
    for step, latency_ms in (("tune", None), ("compile", None), ("evaluate", 2.0), ("promote", 2.1)):
        make_run(new_experiment, {names.TAG_STEP: step, "mlflow.parentRunId": main}, latency_ms)
    evaluated = make_run(new_experiment, {names.TAG_STEP: "evaluate"}, 1.0)
    for step in ("tune", "compile", "evaluate"):
        make_run(new_experiment, {names.TAG_STEP: step})
    for promotion in ("lost", "promoted", "rolled_back"):
        make_run(new_experiment, {names.TAG_STEP: "promote", names.TAG_PROMOTION: promotion}, 0.5)
    make_run(new_experiment, {}, 0.1)  # of mlflow.models.evaluate
    for step in ("main", "evaluate"):
        make_run(new_experiment, {names.TAG_STEP: step}, 0.2, "FAILED")
        make_run(new_experiment, {names.TAG_STEP: step}, 0.2, "KILLED")
    state = LEADERBOARD.state
    found = mlflow.MlflowClient().search_runs(
        [new_experiment], state["searchFilter"], order_by=[f"{state['orderByKey']} ASC"]
    )
    assert [run.info.run_id for run in found] == [evaluated, main]


def test_the_charts_have_every_tuning(new_experiment: str) -> None:
    main = make_run(new_experiment, {names.TAG_STEP: "main"}, 2.0)
    nested = make_run(new_experiment, {names.TAG_STEP: "tune", "mlflow.parentRunId": main})
    alone = make_run(new_experiment, {names.TAG_STEP: "tune"})
    found = mlflow.MlflowClient().search_runs([new_experiment], CHARTS.state["searchFilter"])
    assert {run.info.run_id for run in found} == {nested, alone}


def test_the_installed_page_knows_every_field() -> None:
    """The format is not documented: this fails when a release of MLflow changes it."""
    programs = "\n".join(path.read_text(errors="ignore") for path in sorted(PAGE.glob("*.js")))
    page_fields = fields_beside(programs, "compareRunSections") | fields_beside(programs, "searchFilter")
    for view in VIEWS:
        assert set(view.state) <= page_fields
    chart_fields = set(re.findall(r"this\.(\w+)=", programs))
    for chart in CHARTS.state["compareRunCharts"]:
        assert set(chart) <= chart_fields
    for text in (
        '"mlflow.sharedViewState."',
        '"viewStateShareKey"',
        '"compareRunsMode"',
        '"deflate;"',
        '"FIRST_10_RUNS"',
    ):
        assert text in programs
    envelope = re.search(r"JSON\.stringify\({name:\w+,createdAt:\w+,updatedAt:\w+,state:\w+}\)", programs)
    assert envelope
    section = re.search(r"{uuid:[^{}]{1,9},name:\w+,display:!0,isReordered:!1,deleted:!1,isGenerated:!0}", programs)
    assert section
    for field in ("columns", "cardHeight"):  # of a section that users have changed
        assert re.search(rf"=\w+\.{field}\)", programs)


def fields_beside(programs: str, field: str) -> set[str]:
    lists = re.findall(r'\["\w+"(?:,"\w+")*\]', programs)
    return {name for text in lists if f'"{field}"' in text for name in re.findall(r"\w+", text)}


NETWORK = "dense:4,32,16"
SEARCH = {"strategy": "random", "cost_model": "none"}


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


@pytest.mark.nightly
@pytest.mark.system
def test_every_column_of_the_row_is_filled(steps: Steps) -> None:
    (row,) = mlflow.MlflowClient().search_runs([steps.experiment_id], LEADERBOARD.state["searchFilter"])
    assert row.info.run_id == steps.evaluated.info.run_id
    kinds = {"metrics": row.data.metrics, "params": row.data.params, "tags": row.data.tags}
    for column in LEADERBOARD.state["selectedColumns"]:
        kind, _, name = column.partition(".")
        if name.strip("`") == names.TAG_UNRELIABLE:  # absent where times can be trusted
            continue
        assert name.strip("`") in kinds[kind], column


@pytest.mark.nightly
@pytest.mark.system
def test_it_repeats_what_the_tuning_had(steps: Steps) -> None:
    tuned, evaluated = steps.tuned.data, steps.evaluated.data
    repeated = {name: evaluated.metrics[name] for name in names.TUNING_METRICS}
    assert repeated == {name: tuned.metrics[name] for name in names.TUNING_METRICS}
    assert {name: evaluated.params[name] for name in SEARCH} == SEARCH
    assert evaluated.tags[names.TAG_TUNE_RUN] == steps.tuned.info.run_id
    for tag in (names.TAG_NETWORK, names.TAG_TARGET, names.TAG_NUM_THREADS):
        assert evaluated.tags[tag] == tuned.tags[tag]
