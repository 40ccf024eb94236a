"""The command that an interrupted or failed command ends with goes on from there when it is pasted."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import mlflow
import pytest
from helpers.commands import ANSOR_MLFLOW, BRIEF, MLFLOW, ROOT, Finished, environment, flags, run
from helpers.tuner_process import SMALL_ROUNDS, Tuning, tuning
from mlflow.entities import Run

from ansor_mlflow import names

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

NETWORK = "dense:16,64,64"
NUM_TRIALS = 40
PIPELINE = {**SMALL_ROUNDS, **BRIEF, "network": NETWORK, "signature": "binary"}
"""Parameters of a pipeline."""


@pytest.fixture
def env(new_experiment: str) -> dict[str, str]:
    return environment(os.environ["MLFLOW_TRACKING_URI"], {"MLFLOW_EXPERIMENT_ID": new_experiment})


def last_lines(finished: Finished) -> tuple[str, str]:
    """The ID of the run and the command that standard error ends with.

    MLflow's own last words do not count, nor those of a step in a process of its own, which may come later.
    """
    lines = [line for line in finished.stderr.splitlines() if line.startswith(("run    ", "go on  "))]
    (command,) = (line for line in lines if line.startswith("go on  "))
    where = lines[lines.index(command) - 1]
    assert where.startswith("run    ")
    return where.split()[1], command.removeprefix("go on  ")


def paste(command: str, cwd: Path, env: dict[str, str]) -> Finished:
    return run(["bash", "-c", command], cwd, env)


def run_of(run_id: str) -> Run:
    return mlflow.get_run(run_id)


def press_ctrl_c(tuner: Tuning) -> None:
    os.killpg(tuner.process.pid, signal.SIGINT)


def terminate(tuner: Tuning) -> None:
    tuner.process.terminate()


@pytest.mark.nightly
def test_a_tuning_that_is_interrupted(env: dict[str, str], short_path: Path) -> None:
    with tuning(NETWORK, short_path / "cwd", env, trials=NUM_TRIALS) as tuner:
        tuner.wait_for_rounds(2)
        terminate(tuner)
        finished = tuner.wait()
    assert finished.exit_code == 130
    *_, said, _, _ = finished.stderr.splitlines()
    assert said == "interrupted by the user"
    run_id, command = last_lines(finished)
    assert command == f"ansor-mlflow tune --resume-run {run_id}"
    assert run_of(run_id).info.status == "KILLED"
    resumed = paste(command, short_path / "cwd", env)
    assert resumed.exit_code == 0, resumed.stderr
    assert f"run    {run_id}" in resumed.stdout.splitlines()
    assert run_of(run_id).info.status == "FINISHED"
    assert run_of(run_id).data.metrics[names.TRIALS_MEASURED] == NUM_TRIALS


def pipeline_command() -> list[str]:
    given = {**PIPELINE, "trials": NUM_TRIALS}
    return [ANSOR_MLFLOW, "main", *flags(given)]


def project_command() -> list[str]:
    given = {**PIPELINE, "trials": NUM_TRIALS}
    pairs = [word for name, value in given.items() for word in ("-P", f"{name}={value}")]
    return [MLFLOW, "run", ".", "--env-manager", "local", *pairs]


def copy_project(directory: Path) -> None:
    directory.mkdir()
    for name in ("MLproject", "conda.yaml"):
        shutil.copy(ROOT / name, directory / name)
    shutil.copytree(ROOT / "pipelines", directory / "pipelines", ignore=shutil.ignore_patterns("__pycache__"))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("make_command", "in_project", "interrupt", "exit_code", "start"),
    [
        pytest.param(pipeline_command, False, press_ctrl_c, 130, "ansor-mlflow main --", marks=pytest.mark.nightly),
        pytest.param(pipeline_command, True, terminate, 130, "ansor-mlflow main --", marks=pytest.mark.nightly),
        (project_command, True, press_ctrl_c, 1, "mlflow run . --env-manager local --experiment-id {} -P "),
    ],
    ids=["here", "checkout", "mlflow run"],
)
def test_a_pipeline_that_is_interrupted(
    env: dict[str, str],
    new_experiment: str,
    short_path: Path,
    make_command: Callable[[], Sequence[str]],
    in_project: bool,
    interrupt: Callable[[Tuning], None],
    exit_code: int,
    start: str,
) -> None:
    cwd = short_path / "cwd"
    if in_project:
        copy_project(cwd)
    with tuning(NETWORK, cwd, env, command=make_command()) as tuner:
        tuner.wait_for_rounds(2)
        interrupt(tuner)
        finished = tuner.wait()
        tuning_id = tuner.run_id
    assert finished.exit_code == exit_code, finished.stderr
    run_id, command = last_lines(finished)
    assert run_of(run_id).data.tags[names.TAG_STEP] == "main"
    assert run_of(run_id).data.tags[names.TAG_EXIT_CODE] == "130"
    assert command.startswith(start.format(new_experiment))
    assert tuning_id in command
    resumed = paste(command, cwd, env)
    assert resumed.exit_code == 0, resumed.stderr
    assert run_of(tuning_id).info.status == "FINISHED"
    assert run_of(tuning_id).data.metrics[names.TRIALS_MEASURED] == NUM_TRIALS
    (done,) = mlflow.search_runs(
        [new_experiment], "tags.`ansor.step` = 'main' AND attributes.status = 'FINISHED'", output_format="list"
    )
    assert done.data.metrics[names.TRIALS_MEASURED] == NUM_TRIALS
    assert done.data.params["turns"] in ("1", "1.0")
    assert done.data.params["signature"] == "binary"
    assert done.data.params.get("network_used", done.data.params["network"]) == NETWORK
    assert f"--network {NETWORK} " in done.data.tags["mlflow.note.content"]
