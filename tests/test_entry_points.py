"""The files of the MLflow project: its entry points are the commands, with the parameters that most people need."""

from __future__ import annotations

import platform
from typing import Any

import pytest
import yaml
from helpers.commands import ENTRY_POINTS, ROOT, RunCommand
from mlflow.utils.environment import _PythonEnv

from ansor_mlflow.parameters import listed

TEXT = (ROOT / "MLproject").read_text()
PROJECT: dict[str, Any] = yaml.safe_load(TEXT)


def test_the_file_is_the_one_that_the_command_prints(run_here: RunCommand, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here("parameters", "--mlproject") == 0
    assert capsys.readouterr().out == TEXT


def test_entry_points_are_those_with_options() -> None:
    assert list(PROJECT["entry_points"]) == list(ENTRY_POINTS)
    for name, options in ENTRY_POINTS.items():
        assert list(PROJECT["entry_points"][name]["parameters"]) == [*listed(options), "set", "config"]
        assert (ROOT / "pipelines" / f"{name}.py").is_file()


def test_a_newcomer_is_shown_thirty_parameters_at_most() -> None:
    assert len(PROJECT["entry_points"]["main"]["parameters"]) <= 30


@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
def test_a_command_passes_every_parameter(entry_point: str) -> None:
    definition = PROJECT["entry_points"][entry_point]
    flags = {"sweep": "", "json_file": "--json"} | (
        {"dry_run": "--plan", "cluster": "--on"} if entry_point == "sweep" else {}
    )
    passed = [f"{flags.get(name, '--' + name.replace('_', '-'))} {{{name}}}" for name in definition["parameters"]]
    assert definition["command"].split() == f"python -m pipelines.{entry_point} {' '.join(passed)}".split()


def test_the_environment_installs_this_project_as_it_is_on_disk() -> None:
    conda = yaml.safe_load((ROOT / PROJECT["conda_env"]).read_text())
    (pip,) = (entry["pip"] for entry in conda["dependencies"] if isinstance(entry, dict))
    assert pip == ["-e ."]


def test_mlflow_makes_the_environment_with_the_python_that_runs_it() -> None:
    """Under `--env-manager uv` and `virtualenv`; of `python>=3.10` alone it makes 3.10."""
    assert _PythonEnv.from_conda_yaml(ROOT / PROJECT["conda_env"]).python == platform.python_version()
