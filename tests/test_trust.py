"""Models of PyTorch can run code when they are read: without the user's word nothing of one is."""

from __future__ import annotations

import importlib.util
import os
import pickle
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import mlflow
import pytest
import yaml
from helpers.commands import RunCommand
from helpers.hostile import Touch

import ansor_mlflow as am
from ansor_mlflow.errors import MachineError, UserInputError
from ansor_mlflow.networks import load_network, read_torch_model
from ansor_mlflow.networks.pytorch import TorchModel
from ansor_mlflow.parameters import TuneOptions
from ansor_mlflow.tracking import params_used, sources

REFUSED = "can run any code that its author put into it; pass trust=true if you trust them, or export the model to ONNX"


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A file that makes another one beside it, "made", when it is unpickled."""
    path = tmp_path / "hostile.pt2"
    path.write_bytes(pickle.dumps(Touch(tmp_path / "made")))
    return path


def model_of_mlflow(directory: Path, name: str, contents: bytes) -> Path:
    (directory / "data").mkdir(parents=True)
    (directory / "data" / name).write_bytes(contents)
    flavors = {"pytorch": {"model_data": "data", "pytorch_version": "2.13.0", "code": None}}
    (directory / "MLmodel").write_text(yaml.safe_dump({"flavors": flavors}))
    return directory


def test_an_exported_program_is_not_read_without_trust(hostile: Path, run_here: RunCommand) -> None:
    calls: list[Callable[[], Any]] = [
        partial(load_network, str(hostile)),
        partial(am.plan, str(hostile)),
        partial(am.tune, network=hostile, trust=False),
    ]
    for call in calls:
        with pytest.raises(UserInputError, match=rf"network={hostile}: reading a model of PyTorch {REFUSED}"):
            call()
    assert run_here("plan", "--network", str(hostile)) == UserInputError.exit_code
    assert not (hostile.parent / "made").exists()


@pytest.mark.parametrize("name", ["model.pt2", "model.pth"])
def test_a_model_that_mlflow_logged_is_not_read_without_trust(hostile: Path, name: str) -> None:
    directory = model_of_mlflow(hostile.parent / "model", name, hostile.read_bytes())
    for given in (str(directory), directory.as_uri()):
        with pytest.raises(UserInputError, match=REFUSED):
            sources.fetch_network(given)
    assert not (hostile.parent / "made").exists()


@pytest.mark.usefixtures("new_experiment")
def test_trust_is_not_taken_from_a_run() -> None:
    """What somebody else trusted when they tuned."""
    with mlflow.start_run() as run:
        mlflow.log_params({"network": "model.pt2", "trust": "True"})
    assert params_used(mlflow.get_run(run.info.run_id), TuneOptions) == {"network": "model.pt2"}


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="PyTorch is installed")
def test_without_pytorch(hostile: Path) -> None:
    with pytest.raises(MachineError, match=r"hostile\.pt2: a model of PyTorch needs .*: pip install torch onnx"):
        load_network(str(hostile), trust=True)
    assert not (hostile.parent / "made").exists()


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of PyTorch's names: a child gets as far as loading the model."""
    for name in ("torch", "onnxscript"):
        (tmp_path / "modules" / name).mkdir(parents=True)
        (tmp_path / "modules" / name / "__init__.py").write_text("__version__ = '0.0'\n")
    monkeypatch.syspath_prepend(tmp_path / "modules")


def die(_: Path) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def fail(made: Path) -> TorchModel:
    print("what a model prints")
    made.write_text(str(os.getpid()))
    raise AttributeError("there is no\nNet")


@pytest.mark.system
@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("load", "error", "message"),
    [
        (die, MachineError, "^the process that exports the model of PyTorch died .*; free memory, or export"),
        (fail, UserInputError, "^network=x: PyTorch 0.0 cannot read it \\(there is no Net\\); save it again with this"),
    ],
)
def test_what_happens_in_the_child_is_one_line(
    load: Any, error: type[Exception], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(error, match=message) as caught:
        read_torch_model(partial(load, tmp_path / "made"), "x")
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().out == ""  # it is for results
    if load is fail:
        assert int((tmp_path / "made").read_text()) != os.getpid()


def test_a_model_of_pytorch_has_one_size() -> None:
    with pytest.raises(UserInputError, match="several sizes, but a model of PyTorch is read with one; export an ONNX"):
        read_torch_model(partial(fail, Path("never")), "x", input_shapes={"x": [[1, 2]]})
