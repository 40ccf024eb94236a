"""Plugins: the example is installed as its users would, and what cannot be used is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from helpers.commands import ROOT
from helpers.onnx_files import save, value
from onnx import helper

from ansor_mlflow.errors import MachineError, UserInputError
from ansor_mlflow.networks import BUILTIN_NETWORKS, BuiltinNetwork
from ansor_mlflow.parameters import TuneOptions
from ansor_mlflow.plugins import PluginTable
from ansor_mlflow.tuning import runner_name

SCRIPT = """
import json
from pathlib import Path
import mlflow
import ansor_mlflow

if __name__ == "__main__":
    mlflow.set_tracking_uri(f"sqlite:///{Path.cwd()}/mlflow.db")
    tuned = ansor_mlflow.tune("relu.onnx", trials=2, num_threads=1)
    compiled = ansor_mlflow.compile(tune_run=tuned.run_id)
    evaluated = ansor_mlflow.evaluate(model_uri=compiled.model_uri, rivals=["onnx-reference"], turns=1, measure_s=0.1)
    folder = Path(mlflow.artifacts.download_artifacts(f"runs:/{tuned.run_id}/records"))
    records = "".join(path.read_text() for path in folder.rglob("*.json"))
    print(json.dumps({"records": records, "metrics": mlflow.get_run(evaluated.run_id).data.metrics}))
"""


@pytest.mark.nightly
@pytest.mark.system
@pytest.mark.timeout(600)
def test_the_example_is_installed_and_used(tmp_path: Path) -> None:
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site]
    example = tmp_path / "plugin"
    subprocess.run(["cp", "-r", ROOT / "examples" / "plugin", example], check=True)
    subprocess.run([*map(str, pip), str(example)], check=True)
    x, y = (value(name, [1, 64, 64, 64]) for name in "xy")
    save(tmp_path / "relu.onnx", [helper.make_node("Relu", ["x"], ["y"])], [x], [y])
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{site}:{ROOT}"},
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert "relu: elements" in found["records"]
    assert found["metrics"]["onnx-reference_latency_ms"] > 0
    assert found["metrics"]["speedup_vs_onnx-reference"] > 0


def table(monkeypatch: pytest.MonkeyPatch, value: str) -> PluginTable[int]:
    entry = EntryPoint(name="theirs", value=value, group="ansor_mlflow.numbers")
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [entry] if group == entry.group else [])
    return PluginTable("numbers", {"ours": 1}, lambda found: isinstance(found, int))


def test_a_plugin_stands_beside_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = table(monkeypatch, "sys:maxsize")
    assert list(numbers) == ["ours", "theirs"]
    assert (numbers["ours"], numbers["theirs"]) == (1, sys.maxsize)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("no_such_module:x", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("sys:no_such_name", "AttributeError: module 'sys' has no attribute 'no_such_name'"),
        ("sys:path", "sys:path is not what docs/extend.md says of ansor_mlflow.numbers"),
    ],
)
def test_a_plugin_that_cannot_be_used_is_named(value: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = table(monkeypatch, value)
    assert numbers["ours"] == 1
    with pytest.raises(MachineError) as caught:
        numbers["theirs"]
    assert str(caught.value).startswith(
        f"theirs in ansor_mlflow.numbers, of a package without a name, cannot be used: {reason}"
    )


def test_a_runner_that_nobody_knows_is_refused() -> None:
    assert runner_name(TuneOptions()) == "local"
    assert runner_name(TuneOptions(rpc_tracker="host:9190", rpc_key="key")) == "rpc"
    with pytest.raises(UserInputError, match="runner=board: there is none of that name; give auto, local, rpc"):
        runner_name(TuneOptions(runner="board"))


def test_networks_of_plugins_are_what_ours_are() -> None:
    assert all(isinstance(BUILTIN_NETWORKS[name], BuiltinNetwork) for name in BUILTIN_NETWORKS)
