"""What `docs/teams.md` offers to other schedulers: its files are valid, and what can be run here is."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import mlflow
import pytest
import yaml
from helpers.commands import ROOT
from helpers.servers import free_port, mlflow_server

from ansor_mlflow.parameters import SweepOptions

TEAMS = ROOT / "examples" / "teams"
SECRET = "a-secret-of-the-tests"


def flags_of(text: str) -> set[str]:
    """The flags behind `ansor-mlflow sweep` in a file."""
    commands = re.findall(r"ansor-mlflow sweep ((?:[^\n\"']|\"[^\n\"]*\")*)", text)
    assert commands
    return {flag for command in commands for flag in re.findall(r"--([a-z-]+)", command)}


@pytest.mark.parametrize("name", ["action.yml", "sweep.slurm", "dag.py"])
def test_the_commands_have_the_flags_of_sweep(name: str) -> None:
    text = (TEAMS / name).read_text()
    assert {flag.replace("-", "_") for flag in flags_of(text)} <= SweepOptions.model_fields.keys()


def test_the_files_are_valid() -> None:
    action = yaml.safe_load((TEAMS / "action.yml").read_text())
    assert action["runs"]["using"] == "composite"
    assert all(step["shell"] == "bash" for step in action["runs"]["steps"])
    given = {name.upper() for name in re.findall(r"inputs\.([\w-]+)", (TEAMS / "action.yml").read_text())}
    assert given == {name.upper() for name in action["inputs"]}
    job = yaml.safe_load((TEAMS / "job.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["args"][0] == "sweep"
    ast.parse((TEAMS / "dag.py").read_text())
    subprocess.run(["bash", "-n", str(TEAMS / "sweep.slurm")], check=True)
    names = {path.name for path in TEAMS.iterdir() if path.is_file()}
    assert names == set(re.findall(r"\]\(\.\./examples/teams/([\w.]+)\)", (ROOT / "docs" / "teams.md").read_text()))


@pytest.mark.system
def test_what_is_promoted_is_deployed(tmp_path: Path) -> None:
    """A real server of MLflow's calls the receiver, which runs a command for the alias that it waits for."""
    port, told = free_port(), tmp_path / "told"
    settings = {"_MLFLOW_WEBHOOK_ALLOWED_SCHEMES": "http", "MLFLOW_WEBHOOK_ALLOWED_SCHEMES": "http"}
    settings |= {"_MLFLOW_WEBHOOK_ALLOW_PRIVATE_IPS": "true", "MLFLOW_WEBHOOK_ALLOW_PRIVATE_IPS": "true"}
    command = [sys.executable, str(TEAMS / "deploy.py"), str(port), "--", "sh", "-c", f'echo "$MODEL" >> {told}']
    receiver = subprocess.Popen(
        command, env={**os.environ, "SECRET": SECRET, "NAME": "classifier", "ALIAS": "champion"}
    )
    try:
        with mlflow_server(tmp_path / "server", environment=settings) as server:
            client = mlflow.MlflowClient(server.url, server.url)
            address = f"http://127.0.0.1:{port}/"
            client.create_webhook("deploy", address, ["model_version_alias.created"], secret=SECRET)
            client.create_webhook("forged", address, ["model_version_alias.created"], secret="another")
            client.create_registered_model("classifier")
            for _ in range(2):
                client.create_model_version("classifier", "s3://models/classifier")
            client.set_registered_model_alias("classifier", "challenger", "1")
            client.set_registered_model_alias("classifier", "champion", "2")
            deadline_s = time.monotonic() + 60
            while not told.exists():
                assert time.monotonic() < deadline_s, json.dumps([hook.url for hook in client.list_webhooks()])
                time.sleep(0.2)
    finally:
        receiver.kill()
        receiver.wait()
    assert told.read_text() == "models:/classifier/2\n"
