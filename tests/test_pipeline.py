"""`ansor-mlflow main` runs anywhere: in its own process, and in the project through its entry points."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path

import mlflow
import pytest
from helpers.commands import ANSOR_MLFLOW, BRIEF, FAST, ROOT, Finished, environment, flags, run
from mlflow.entities import Run

from ansor_mlflow import names
from ansor_mlflow.commands.pipeline import has_our_entry_points

OF_SOMEBODY_ELSE = """
name: training
entry_points:
  main: {parameters: {alpha: {type: float, default: 0.5}}, command: "exit 1"}
  tune: {parameters: {alpha: {type: float, default: 0.5}}, command: "exit 1"}
  compile: {command: "exit 1"}
  evaluate: {parameters: {model_uri: path}, command: "exit 1"}
"""


@pytest.mark.parametrize(
    "text",
    [
        OF_SOMEBODY_ELSE,
        (ROOT / "MLproject").read_text().replace("max_minutes: {", "minutes: {"),
        "",
        "entry_points: [tune, compile, evaluate]",
        "name: [",
    ],
)
def test_the_project_of_somebody_else_is_not_ours(tmp_path: Path, text: str) -> None:
    assert not has_our_entry_points(tmp_path)
    (tmp_path / "MLproject").write_text(text)
    assert not has_our_entry_points(tmp_path)


def test_the_checkout_is() -> None:
    assert has_our_entry_points(ROOT)


def make_directory(path: Path, kind: str) -> Path:
    path.mkdir()
    if kind == "foreign":
        (path / "MLproject").write_text(OF_SOMEBODY_ELSE)
    elif kind == "checkout":
        for name in ("MLproject", "conda.yaml"):
            shutil.copy(ROOT / name, path / name)
        shutil.copytree(ROOT / "pipelines", path / "pipelines", ignore=shutil.ignore_patterns("__pycache__"))
    return path


def run_main(directory: Path, experiment_id: str, **parameters: object) -> Finished:
    given = {**FAST, **BRIEF, "cost_model": "none", "network": "dense:16,64,64", "trials": 4, "seed": 3}
    env = environment(os.environ["MLFLOW_TRACKING_URI"], {"MLFLOW_EXPERIMENT_ID": experiment_id})
    return run([ANSOR_MLFLOW, "main", *flags({**given, **parameters})], directory, env)


def steps_of(experiment_id: str) -> dict[str, Run]:
    runs = mlflow.search_runs([experiment_id], output_format="list")
    steps = {run.data.tags[names.TAG_STEP]: run for run in runs}
    assert len(steps) == len(runs)
    return steps


def params_of(run: Run) -> dict[str, str]:
    """As they were given: `mlflow run` logs them as words of a shell, and knows of files and settings."""
    params = {
        name: "".join(shlex.split(value)) for name, value in run.data.params.items() if name not in ("config", "set")
    }
    return {name: value for name, value in params.items() if name not in ("tune_run", "model_uri")}


def tags_of(run: Run) -> set[str]:
    return {name for name in run.data.tags if not name.startswith("mlflow.project.")}


@pytest.mark.system
@pytest.mark.timeout(900)
@pytest.mark.nightly
def test_a_pipeline_leaves_the_same_wherever_it_runs(experiment_id: str, tmp_path: Path) -> None:
    found = {}
    for kind in ("foreign", "checkout"):
        experiment = mlflow.create_experiment(f"{tmp_path}/{kind}", (tmp_path / "artifacts" / kind).as_uri())
        finished = run_main(make_directory(tmp_path / kind, kind), experiment)
        assert finished.exit_code == 0, finished.stderr
        found[kind] = steps_of(experiment)
        for step in ("main", "tune", "compile", "evaluate"):
            said = f"{step} run {found[kind][step].info.run_id}  http://127.0.0.1:5000/#/experiments/{experiment}/runs/"
            assert finished.stderr.count(said) == 1
    used_processes = {kind: "mlflow.project.entryPoint" in steps["tune"].data.tags for kind, steps in found.items()}
    assert used_processes == {"foreign": False, "checkout": True}
    assert found["checkout"].keys() == found["foreign"].keys() == {"main", "tune", "compile", "evaluate"}
    for step, expected in found["foreign"].items():
        mine = found["checkout"][step]
        assert params_of(expected).items() <= params_of(mine).items(), step  # `mlflow run` logs its defaults, too
        assert tags_of(mine) == tags_of(expected), step
        assert mine.data.metrics.keys() == expected.data.metrics.keys(), step
        assert mine.info.run_name == expected.info.run_name
        parent = found["checkout"]["main"].info.run_id if step != "main" else None
        assert mine.data.tags.get("mlflow.parentRunId") == parent
