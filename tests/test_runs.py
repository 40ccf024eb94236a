"""Runs are found on the server, in the order that was asked for, and below them is where to look at them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import mlflow
import pytest
from helpers.commands import ANSOR_MLFLOW, RunCommand, environment
from helpers.commands import run as run_process
from helpers.servers import mlflow_server

from ansor_mlflow import names
from ansor_mlflow.options import RunsOptions
from ansor_mlflow.steps.reports.runs import FoundRuns, find_runs
from ansor_mlflow.tracking.views import ensure_views

ZNVER4, SKYLAKE = "llvm znver4 ×2", "llvm skylake-avx512 ×8"


def make_run(experiment_id: str, name: str, step: str = "tune", **values: object) -> str:
    """A run with tags, and with metrics, which are numbers."""
    tags = {names.TAG_STEP: step, names.TAG_NETWORK: "resnet-18", names.TAG_TARGET: ZNVER4}
    tags |= {f"ansor.{key}": value for key, value in values.items() if isinstance(value, str)}
    client = mlflow.MlflowClient()
    run_id = client.create_run(experiment_id, run_name=name, tags=tags, start_time=next(CLOCK)).info.run_id
    for key, value in values.items():
        if isinstance(value, (int, float)):
            client.log_metric(run_id, key, value)
    return str(run_id)


def ticks() -> Iterator[int]:
    yield from range(1_790_000_000_000, 1_800_000_000_000, 60_000)


CLOCK = ticks()


@pytest.fixture
def five_runs(new_experiment: str) -> str:
    """ID of an experiment with runs from "a", the oldest, to "e", and one of somebody else."""
    make_run(new_experiment, "a", latency_ms=3.0, best_latency_ms=2.5, speedup_vs_untuned=10.0, step="main")
    make_run(new_experiment, "b", best_latency_ms=2.0, **{names.TRIALS_MEASURED: 640})
    make_run(new_experiment, "c", latency_ms=1.0, speedup_vs_untuned=30.0, network="bert-base", step="evaluate")
    make_run(new_experiment, "d", target=SKYLAKE, best_latency_ms=4.0, **{names.TRIALS_MEASURED: 1280})
    make_run(new_experiment, "e", latency_ms=2.0, speedup_vs_untuned=20.0, step="evaluate")
    mlflow.MlflowClient().create_run(new_experiment, run_name="of somebody else")
    return new_experiment


def found(**options: object) -> str:
    """The names of the runs that are found, in their order."""
    return "".join(run.name for run in find_runs(RunsOptions(**options)).runs)


@pytest.mark.parametrize(
    ("sort", "order"),
    [
        ("started", "edcba"),
        ("latency_ms", "ceadb"),
        ("best_latency_ms", "badec"),
        ("speedup_vs_untuned", "ceadb"),
        ("trials", "dbeca"),
    ],
)
@pytest.mark.usefixtures("five_runs")
def test_the_order_and_runs_without_the_figure_come_last(sort: str, order: str) -> None:
    assert found(sort=sort) == order


@pytest.mark.parametrize(
    ("wanted", "names_found"),
    [
        ({"network": "bert-base"}, "c"),
        ({"network": "bert"}, ""),
        ({"network": "bert%"}, "c"),
        ({"target": "skylake"}, "d"),
        ({"target": ZNVER4}, "ecba"),
        ({"step": "tune"}, "db"),
        ({"step": "main"}, "a"),
        ({"step": "evaluate", "network": "resnet-18", "target": "znver4"}, "e"),
        ({"step": "recompile"}, ""),
    ],
)
@pytest.mark.usefixtures("five_runs")
def test_filters(wanted: dict[str, object], names_found: str) -> None:
    assert found(**wanted) == names_found


@pytest.mark.parametrize(
    "network",
    [
        "it's",
        'a "b"',
        "a`b",
        "x' OR 'y' = 'y",
        "tags.`ansor.step` = 'main'",
        "a\\b",
        "é ×",
        "a;b",
        "a -- b",
        "a\nb",
        "_",
    ],
)
def test_names_are_searched_for_as_they_are(new_experiment: str, network: str) -> None:
    make_run(new_experiment, "this", network=network)
    make_run(new_experiment, "another")
    assert found(network=network, target="llvm") == "this"


@pytest.mark.parametrize("text", ["""both ' and \"""", "a\\"])
@pytest.mark.parametrize("parameter", ["network", "target"])
@pytest.mark.usefixtures("new_experiment")
def test_what_mlflow_cannot_search_for_is_said(
    parameter: str, text: str, run_here: RunCommand, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here("runs", f"--{parameter}", text) == 2
    assert f"Error: {parameter}={text}: MLflow cannot search for text with both kinds of q" in capsys.readouterr().err


@pytest.mark.usefixtures("five_runs")
def test_a_limit(run_here: RunCommand, capsys: pytest.CaptureFixture[str]) -> None:
    limited = find_runs(RunsOptions(limit=2, sort="latency_ms"))
    assert ("".join(run.name for run in limited.runs), limited.are_all) == ("ce", False)
    assert find_runs(RunsOptions(limit=5)).are_all
    assert run_here("runs", "--limit", "2") == 0
    assert "there are more; --limit 4 shows twice as many" in capsys.readouterr().out
    assert run_here("runs", "--limit", "0") == 2


def test_the_experiment(five_runs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    client = mlflow.MlflowClient()
    name = client.get_experiment(five_runs).name
    other = client.create_experiment(f"{name} 2")
    numbered = client.create_experiment(f"{five_runs}00{other}")  # a name that could be an ID
    make_run(other, "other")

    def experiment_of(given: str = "") -> FoundRuns:
        return find_runs(RunsOptions(experiment=given))

    assert experiment_of().experiment_id == five_runs
    for given in (other, f"{name} 2"):
        assert [run.name for run in experiment_of(given).runs] == ["other"]
    assert experiment_of(f"{five_runs}00{other}").experiment_id == numbered
    monkeypatch.delenv("MLFLOW_EXPERIMENT_ID")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", f"{name} 2")
    assert experiment_of().experiment == f"{name} 2"
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME")
    assert experiment_of().experiment == "Default"


@pytest.mark.parametrize("given", ["no such name", "987654321"])
@pytest.mark.usefixtures("new_experiment")
def test_an_experiment_that_does_not_exist(
    given: str, run_here: RunCommand, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here("runs", "--experiment", given) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("Error: ")
    assert given in line
    assert mlflow.get_experiment_by_name(given) is None


def test_what_is_printed(five_runs: str, run_here: RunCommand, capsys: pytest.CaptureFixture[str]) -> None:
    ensure_views(five_runs)
    assert run_here("runs", "--sort", "latency_ms") == 0
    printed = capsys.readouterr().out
    assert f"({five_runs})" in printed.splitlines()[0]
    rows = re.findall(r"^2026-\d\d-\d\d \d\d:\d\d +(\w+) +(\w) +.*[0-9a-f]{32}$", printed, re.MULTILINE)
    assert rows == [("evaluate", "c"), ("evaluate", "e"), ("main", "a"), ("tune", "d"), ("tune", "b")]
    assert re.search(
        r" main +a +resnet-18 +llvm znver4 ×2 +3\.000 +2\.500 +10\.0 × +RUNNING +[0-9a-f]{32}$", printed, re.M
    )
    assert re.search(r" tune +b +resnet-18 +llvm znver4 ×2 +2\.000 +640 +RUNNING +[0-9a-f]{32}$", printed, re.M)
    start, leaderboard, charts = printed.splitlines()[-3:]
    assert start == f"start          mlflow server --backend-store-uri {mlflow.get_tracking_uri()}"
    page = f"http://127.0.0.1:5000/#/experiments/{five_runs}/runs?viewStateShareKey=ansor-"
    assert leaderboard.startswith(f"leaderboard    {page}leaderboard&workflowType=machine_learning")
    assert charts.startswith(f"tuning charts  {page}tuning-charts&workflowType=machine_learning")


def test_an_experiment_without_runs_and_views(
    new_experiment: str, run_here: RunCommand, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here("runs", "--network", "nothing") == 0
    printed = capsys.readouterr().out
    assert "no run was found" in printed
    assert "#/experiments" not in printed
    assert new_experiment in printed


@pytest.mark.usefixtures("five_runs")
def test_json(run_here: RunCommand, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run_here("runs", "--step", "tune", "--json", str(tmp_path / "runs.json")) == 0
    capsys.readouterr()
    assert run_here("runs", "--step", "tune", "--json", "-") == 0
    written = json.loads(capsys.readouterr().out)
    assert written == json.loads((tmp_path / "runs.json").read_text())
    newest, oldest = written["runs"]
    assert {newest["name"], newest["target"], newest["status"]} == {"d", SKYLAKE, "RUNNING"}
    assert (newest["trials"], newest["latency_ms"], newest["best_latency_ms"]) == (1280, None, 4.0)
    assert newest["started_ms"] > oldest["started_ms"]


@pytest.mark.system
def test_a_server_gets_few_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for the experiment and one for the runs; and a step asks for the views that are there once."""
    with mlflow_server(tmp_path / "server") as server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
        make_run("0", "a")
        ensure_views("0")
        log = tmp_path / "server" / "server.log"
        before = len(log.read_text())
        env = environment(server.url)
        finished = run_process([ANSOR_MLFLOW, "runs"], tmp_path, env)
        code = "from ansor_mlflow.tracking.views import ensure_views; ensure_views('0'); ensure_views('0')"
        assert run_process([Path(ANSOR_MLFLOW).with_name("python"), "-c", code], tmp_path, env).exit_code == 0
        requests = re.findall(r'"([A-Z]+ /api/\S+?)[ ?]', log.read_text()[before:])
    assert finished.exit_code == 0, finished.stderr
    assert finished.stderr == ""
    assert f"leaderboard    {server.url}/#/experiments/0/runs?viewStateShareKey=ansor-leaderboard" in finished.stdout
    assert "mlflow server" not in finished.stdout
    experiment, search = "GET /api/2.0/mlflow/experiments/get", "POST /api/2.0/mlflow/runs/search"
    assert requests == [experiment, search, experiment]
