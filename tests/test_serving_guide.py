"""The commands and programs of docs/serving.md do what it says, against the server that it starts."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import mlflow
import numpy as np
import pytest
from helpers.commands import ROOT, environment
from helpers.served import compiled, image_classifier, model_server

from ansor_mlflow import flavor
from ansor_mlflow.parameters import PipelineOptions, load_options
from ansor_mlflow.serving.pyfunc import get_signature

if TYPE_CHECKING:
    from tvm.target import Target

BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", (ROOT / "docs" / "serving.md").read_text(), re.M | re.S)
DOCUMENTED = "http://127.0.0.1:5001/invocations"
pytestmark = pytest.mark.system


def blocks(language: str, *words: str) -> list[str]:
    """The blocks of the guide in a language that have all words."""
    return [text for name, text in BLOCKS if name == language and all(word in text for word in words)]


@dataclass(frozen=True)
class Desk:
    """Where a reader of the guide works, with a server that runs."""

    directory: Path
    url: str
    variables: dict[str, str]

    def run(self, script: str) -> str:
        """Runs a block of commands, with the server's port instead of the documented one; returns what it prints."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script.replace(DOCUMENTED, self.url)],
            cwd=self.directory,
            env=self.variables,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode == 0, f"{script}\n{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def desk(
    host_target: Target, _mlflow_store: tuple[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Desk]:
    """A registered model with the inputs and outputs of ResNet-18, served as the guide says."""
    uri, experiment_id = _mlflow_store
    network = compiled(image_classifier(), host_target, tmp_path_factory.mktemp("classifier"))
    signature = get_signature(network.inputs, network.outputs, "binary")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", uri)
        with mlflow.start_run(experiment_id=experiment_id):
            flavor.log_model(network, name="model", registered_model_name="resnet-18", signature=signature)
    (serve,) = blocks("bash", "mlflow models serve")
    words = shlex.split(serve)
    assert words[:3] == ["mlflow", "models", "serve"]
    assert words[-2:] == ["--port", "5001"]
    directory = tmp_path_factory.mktemp("desk")
    variables = environment(uri)
    with model_server(words[3:-2], directory / "server.log", variables) as server:
        yield Desk(directory, server.url, variables)


def test_the_first_command_has_parameters_of_the_pipeline() -> None:
    command = shlex.split(blocks("bash", "mlflow run")[0])
    parameters = dict(word.split("=") for flag, word in pairwise(command) if flag == "-P")
    options = load_options(PipelineOptions, parameters)
    assert (options.signature, options.register_as) == ("binary", "resnet-18")


def test_programs_and_requests(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """In their order, since some write what others send."""
    monkeypatch.chdir(desk.directory)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", desk.variables["MLFLOW_TRACKING_URI"])
    monkeypatch.setattr(sys, "path", list(sys.path))  # pyfunc puts a model's code first
    shapes = []
    for language, text in BLOCKS:
        if language == "python":
            exec(text.replace(DOCUMENTED, desk.url), {})
        elif language == "bash" and "--fail" in text:
            shapes.append(np.shape(json.loads(desk.run(text))["predictions"]))
    assert shapes == [(3, 1000), (1, 1000), (3, 1000)]


def test_what_is_refused(desk: Desk) -> None:
    (command,) = (text for text in blocks("bash", "curl") if "--fail" not in text)
    (message,) = blocks("text")
    answer = json.loads(desk.run(command))
    assert message.strip() in answer["message"]
    assert answer["error_code"] == "INVALID_PARAMETER_VALUE"
