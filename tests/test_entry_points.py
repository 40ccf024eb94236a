"""The files of the MLflow project: its entry points are the commands, with all of their parameters."""

from __future__ import annotations

import platform
from typing import Any

import pytest
import yaml
from helpers.commands import ENTRY_POINTS, ROOT
from mlflow.utils.environment import _PythonEnv

from ansor_mlflow.options import Options, default_text

PROJECT: dict[str, Any] = yaml.safe_load((ROOT / "MLproject").read_text())


def test_entry_points_are_those_with_options() -> None:
    assert list(PROJECT["entry_points"]) == list(ENTRY_POINTS)


@pytest.mark.parametrize(("entry_point", "options"), ENTRY_POINTS.items())
def test_parameters_of_an_entry_point_are_its_options(entry_point: str, options: type[Options]) -> None:
    parameters = PROJECT["entry_points"][entry_point]["parameters"]
    defaults = {name: str(parameter["default"]) for name, parameter in parameters.items()}
    assert defaults == {**{name: default_text(options, name) for name in options.model_fields}, "config": ""}
    for name, parameter in parameters.items():
        is_number = isinstance(options.model_fields[name].default, (int, float)) if name != "config" else False
        is_number = is_number and not isinstance(options.model_fields[name].default, bool)
        assert parameter["type"] == ("float" if is_number else "string"), name


@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
def test_a_command_passes_every_parameter(entry_point: str) -> None:
    definition = PROJECT["entry_points"][entry_point]
    command, *passed = definition["command"].split(" --")
    assert command == f"python -m pipelines.{entry_point}"
    assert [flag.strip() for flag in passed] == [
        f"{name.replace('_', '-')} {{{name}}}" for name in definition["parameters"]
    ]
    assert (ROOT / "pipelines" / f"{entry_point}.py").is_file()


def test_the_environment_installs_this_project_as_it_is_on_disk() -> None:
    conda = yaml.safe_load((ROOT / PROJECT["conda_env"]).read_text())
    (pip,) = (entry["pip"] for entry in conda["dependencies"] if isinstance(entry, dict))
    assert pip == ["-e ."]


def test_mlflow_makes_the_environment_with_the_python_that_runs_it() -> None:
    """Under `--env-manager uv` and `virtualenv`; of `python>=3.10` alone it makes 3.10."""
    assert _PythonEnv.from_conda_yaml(ROOT / PROJECT["conda_env"]).python == platform.python_version()
