"""Runtimes that could be taken instead are timed as they are used, and counted only where they are right."""

from __future__ import annotations

import importlib.metadata
import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlflow
import numpy as np
import onnx
import pytest
from helpers.exports import make_model, tensor
from helpers.served import compiled
from mlflow.utils.mlflow_tags import MLFLOW_RUN_NOTE
from onnx import TensorProto, helper

import ansor_mlflow as am
from ansor_mlflow import flavor, names
from ansor_mlflow.errors import MachineError, UserInputError
from ansor_mlflow.foreign import duration
from ansor_mlflow.measuring import (
    Latency,
    RivalTask,
    deviation_of,
    expected_of,
    require_rivals,
    rival_inference,
    rival_titles,
)
from ansor_mlflow.networks.graph import GraphBuilder
from ansor_mlflow.networks.load import load_network
from ansor_mlflow.settings import Dtype
from ansor_mlflow.steps.evaluation.rivals import CheckedRival, best_of, check_rivals
from ansor_mlflow.tensors import random_inputs
from ansor_mlflow.tracking import find_program

if TYPE_CHECKING:
    from tvm.target import Target


def task_of(path: Path) -> RivalTask:
    network = load_network(str(path))
    outputs = tuple(spec.name for spec in network.outputs)
    return RivalTask(network=path, outputs=outputs, num_threads=1, inputs=network.inputs)


def written(builder: GraphBuilder, path: Path, outputs: Mapping[str, tuple[int, ...]]) -> Path:
    onnx.save(builder.build(path.stem, outputs), path)
    return path


@pytest.mark.parametrize(
    ("rival", "dtype", "may_round"),
    [
        ("onnxruntime", "float32", False),
        ("openvino", "float32", False),
        ("openvino", "float16", False),
        ("onnxruntime", "bfloat16", False),
        ("openvino", "bfloat16", True),
    ],
)
def test_a_rival_computes_in_float32_if_the_model_does(
    rival: str, dtype: Dtype, may_round: bool, tmp_path: Path
) -> None:
    """Sums of a thousand products, on which a CPU that has instructions for 16 bits would be off by more than 1e-4."""
    builder = GraphBuilder(seed=0)
    builder.dense("y", builder.input("x", (64, 1024)), units=256, in_units=1024)
    task = replace(task_of(written(builder, tmp_path / "dense.onnx", {"y": (64, 256)})), dtype=dtype)
    examples = [random_inputs(task.inputs, seed) for seed in range(2)]
    (checked,) = check_rivals((rival,), task, examples, expected_of(task.network, 1, examples), 0.1)
    rounds = may_round and not {"amx_bf16", "avx512_bf16"}.isdisjoint(Path("/proc/cpuinfo").read_text().split())
    assert checked.deviation is not None
    assert (1e-4 if rounds else 0) <= checked.deviation.max_rel_error < (1e-1 if rounds else 1e-5)
    assert checked.dtype == ("bfloat16" if may_round else "float32")


def test_a_network_of_16_bits_is_not_rounded_to_another_16(tmp_path: Path) -> None:
    """OpenVINO takes bfloat16 by itself, on a CPU that has instructions for it, which is off by 2e-3."""
    weights = np.random.default_rng(0).normal(0, 0.1, (256, 64)).astype(np.float16)
    x, y = (tensor(name, (4, size), TensorProto.FLOAT16) for name, size in (("x", 256), ("y", 64)))
    product = helper.make_node("MatMul", ["x", "weights"], ["y"])
    onnx.save(make_model([product], [x], [y], {"weights": weights}), tmp_path / "half.onnx")
    task = task_of(tmp_path / "half.onnx")
    examples = [random_inputs(task.inputs, 0)]
    expected = expected_of(task.network, 1, examples)
    assert deviation_of(partial(rival_inference, "openvino", task), examples, expected).max_rel_error < 1e-3


def checked_rivals(given: Any, task: RivalTask, tolerance: float) -> list[CheckedRival]:
    """What is found of rivals on one seeded input."""
    examples = [random_inputs(task.inputs, 0)]
    return check_rivals(given, task, examples, expected_of(task.network, 1, examples), tolerance)


def test_outputs_have_their_names_in_any_order(tmp_path: Path) -> None:
    """One of them is an output of the graph under a second name, and one an input of another node."""
    builder = GraphBuilder(seed=0)
    total = builder.node("Add", "total", builder.input("left", (2, 3)), builder.input("right", (2, 3)))
    builder.node("Identity", "same", builder.relu("cut", total))
    path = written(builder, tmp_path / "pair.onnx", {"same": (2, 3), "total": (2, 3), "cut": (2, 3)})
    (checked,) = checked_rivals(("openvino",), task_of(path), 1e-6)
    assert checked.is_right


@pytest.fixture(scope="module")
def determinant(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network of an operator that OpenVINO lacks."""
    builder = GraphBuilder(seed=0)
    builder.node("Det", "y", builder.input("x", (2, 3, 3)))
    return written(builder, tmp_path_factory.mktemp("determinant") / "determinant.onnx", {"y": (2,)})


def test_a_rival_that_cannot_run_the_network_is_absent_with_the_reason(
    determinant: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task = task_of(determinant)
    with caplog.at_level(logging.WARNING, "ansor_mlflow"):
        onnxruntime, openvino = checked_rivals("auto", task, 1e-4)
    assert onnxruntime.is_right
    assert not openvino.is_right
    assert openvino.absent.startswith("OpenVINO cannot load the network: ")
    assert "Det" in openvino.absent
    assert [record.getMessage() for record in caplog.records] == [f"OpenVINO is not timed: {openvino.absent}"]
    version = importlib.metadata.version("openvino")
    assert openvino.to_dict(None) == {"rival": "openvino", "version": version, "absent": openvino.absent}


def test_inputs_that_a_rival_does_not_take_are_its_error(small_onnx: Path) -> None:
    run = rival_inference("onnxruntime", task_of(small_onnx))
    with pytest.raises(UserInputError, match="ONNX Runtime cannot compute the network from the inputs: "):
        run({"other": np.zeros(3, np.float32)})


def test_a_network_that_came_as_onnx_is_none_of_pytorch(small_onnx: Path) -> None:
    """Only who asks for it hears of it."""
    task = task_of(small_onnx)
    assert [rival.name for rival in checked_rivals("auto", task, 1e-4)] == ["onnxruntime", "openvino"]
    (torch,) = checked_rivals(("torch",), task, 1e-4)
    assert torch.absent.startswith("torch.compile cannot load the network: ")
    assert checked_rivals("none", task, 1e-4) == []


def test_the_fastest_of_those_that_are_right_is_the_best(small_onnx: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With this tolerance OpenVINO is wrong, which does not do the sums in the reference's order."""
    task = task_of(small_onnx)
    with caplog.at_level(logging.WARNING, "ansor_mlflow"):
        rivals = checked_rivals(("openvino", "onnxruntime"), task, 1e-12)
    assert [(rival.name, rival.is_right) for rival in rivals] == [("onnxruntime", True), ("openvino", False)]
    assert "OpenVINO computes something else, max_rel_error=" in caplog.text
    slow, fast = Latency(np.array([2.0, 4.0, 3.0])), Latency(np.array([1.0]))
    assert best_of(rivals, {"onnxruntime": slow, "openvino": fast}) == "onnxruntime"
    assert best_of(rivals[1:], {"openvino": fast}) is None
    assert rivals[1].to_dict(fast)["is_right"] is False
    both = [CheckedRival(name=rival.name, make_inference=rival.make_inference, is_right=True) for rival in rivals]
    assert best_of(both, {"onnxruntime": slow, "openvino": fast}) == "openvino"


@pytest.mark.parametrize("function", [partial(am.evaluate, rivals="openvino,torch"), partial(am.promote, model="m")])
def test_a_rival_that_is_not_installed_is_one_line(
    function: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name == "torch":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    given = {"model_uri": str(tmp_path)} if "rivals" in function.keywords else {"candidate": "1", "champion": "torch"}
    message = r"^(rivals=openvino,torch|champion=torch): torch must be installed here; pip install torch onnxscript, or"
    with pytest.raises(MachineError, match=message):
        function(**given)


@pytest.fixture(scope="module")
def model(small_onnx: Path, host_target: Target, tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("model")
    flavor.save_model(compiled(onnx.load(small_onnx), host_target, directory), str(directory / "model"))
    return str(directory / "model")


@pytest.mark.usefixtures("new_experiment")
@pytest.mark.nightly
def test_an_evaluation_says_what_the_best_one_could_have_had_does(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = am.evaluate(model_uri=model, turns=1, measure_s=0.1)
    found = result.metrics
    written = json.loads(mlflow.artifacts.load_text(f"runs:/{result.run_id}/{names.RIVALS_FILE}"))
    rows = {row["rival"]: row for row in written}
    assert set(rows) == {"onnxruntime", "openvino"}
    for rival, row in rows.items():
        assert row["version"] == importlib.metadata.version(rival)
        assert row["is_right"] is True
        assert found[f"{rival}_latency_ms"] == row["latency_ms"] > 0
        assert found[f"speedup_vs_{rival}"] == pytest.approx(row["latency_ms"] / found["latency_ms"])
    best = min(rows, key=lambda rival: rows[rival]["latency_ms"])
    assert found["speedup_vs_best"] == found[f"speedup_vs_{best}"]
    tags = mlflow.get_run(result.run_id).data.tags
    assert tags["ansor.best_rival"] == best
    for line in (
        f"OpenVINO: {duration(found['openvino_latency_ms'] / 1e3)}",
        f" × as fast as {rival_titles()[best]}, ",
        "small** for llvm",
    ):
        assert line in tags[MLFLOW_RUN_NOTE]


def test_the_program_is_read_from_where_the_tuning_read_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    program = tmp_path / "model.pt2"
    program.touch()
    assert find_program(str(program), tmp_path / "scratch") == program
    for network in ("", "resnet-18", "dense:1,2,3", str(tmp_path / "model.onnx"), "runs:/0/model.onnx"):
        assert find_program(network, tmp_path / "scratch") is None
    assert not caplog.records
    program.unlink()
    assert find_program(str(program), tmp_path / "scratch") is None
    assert "model.pt2 is not there any more" in caplog.text


@pytest.mark.usefixtures("new_experiment")
def test_a_program_among_the_artifacts_of_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "model.pt2").write_text("a program")
    with mlflow.start_run() as run:
        mlflow.log_artifact(str(tmp_path / "model.pt2"))
    found = find_program(f"runs:/{run.info.run_id}/model.pt2", tmp_path / "scratch")
    assert found is not None
    assert found.read_text() == "a program"
    assert find_program("runs:/0123456789abcdef0123456789abcdef/model.pt2", tmp_path / "scratch") is None
    assert "what the network came from cannot be read any more: " in caplog.text


@pytest.mark.parametrize("given", [("all",), ("none", "torch"), ("auto", "torch")])
def test_a_runtime_that_nobody_knows_is_refused(given: tuple[str, ...]) -> None:
    with pytest.raises(
        UserInputError, match=r"is no runtime that is known here; these are onnxruntime, openvino, torch$"
    ):
        require_rivals("rivals", given)
