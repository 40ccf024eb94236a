"""What ends TVM's compiler ends a worker alone: it is found, kept, and left to ONNX Runtime."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import helper

from ansor_mlflow.device import Device
from ansor_mlflow.errors import MachineError, ModelError, UserInputError
from ansor_mlflow.lowering import lower_sizes
from ansor_mlflow.measuring import expected_of
from ansor_mlflow.model import Manifest, building, open_library, part_entries
from ansor_mlflow.model.building import BuildJob, build, fallback_among, guarded, lower_guarded
from ansor_mlflow.networks import Network, load_network
from ansor_mlflow.settings import LoweringSettings
from ansor_mlflow.tensors import random_inputs

Array = npt.NDArray[Any]


def operators_of(job: BuildJob) -> list[str]:
    """The operators that TVM has to compile in some size, in the order in which they run."""
    left = set.intersection(*(set(job.fallback.get(size, ())) for size in range(len(job.sizes) or 1)))
    return [node.op_type for node in onnx.load(job.network).graph.node if node.output[0] not in left]


def dies_of_sine(job: BuildJob) -> list[str]:
    if "Sin" in operators_of(job):
        print("LLVM ERROR: no sine", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)  # for which TVM has a handler that writes where it was
    return operators_of(job)


def loops_at_cosine_after_sine(job: BuildJob) -> list[str]:
    operators = operators_of(job)
    while "Sin" in operators and "Cos" in operators[operators.index("Sin") :]:
        pass
    return operators


def fails_at_tangent(job: BuildJob) -> list[str]:
    if "Tan" in operators_of(job):
        raise RuntimeError("InternalError:\n  no tangent")
    return operators_of(job)


def dies_of_all(_: BuildJob) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fails_with_the_whole(job: BuildJob) -> None:
    if job.sizes:
        raise RuntimeError("no space left")


def refuses_all(_: BuildJob) -> None:
    raise UserInputError("network=waves: it is refused")


@pytest.fixture
def network(tmp_path: Path) -> Network:
    """Waves, with products between that are large enough for a part in TVM."""
    weights = np.random.default_rng(0).standard_normal((256, 256)).astype("float32") / 16
    nodes = [
        helper.make_node("MatMul", ["x", "weights"], ["first"]),
        helper.make_node("Sin", ["first"], ["sine"]),
        helper.make_node("MatMul", ["sine", "weights"], ["second"]),
        helper.make_node("Cos", ["second"], ["cosine"]),
        helper.make_node("MatMul", ["cosine", "weights"], ["third"]),
        helper.make_node("Tan", ["third"], ["y"]),
    ]
    x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["rows", 256]) for name in "xy")
    graph = helper.make_graph(nodes, "waves", [x], [y], [onnx.numpy_helper.from_array(weights, "weights")])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), "waves.onnx")
    return load_network("waves.onnx", input_shapes={"x": [[16, 32], 256]})


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def job(network: Network, tmp_path: Path) -> BuildJob:
    return BuildJob(
        network=str(network.path),
        called=network.name,
        sizes=network.sizes,
        records="",
        device=Device.resolve("auto", "auto").fingerprint,
        lowering=LoweringSettings(),
        library=str(tmp_path / "built" / "model.so"),
    )


@pytest.mark.parametrize(
    ("work", "operator", "output", "reason", "num_nodes"),
    [
        (dies_of_sine, "Sin", "sine", "TVM fails: LLVM ERROR: no sine", 1),
        pytest.param(
            *(loops_at_cosine_after_sine, "Cos", "cosine", "TVM takes longer than 5 s", 4), marks=pytest.mark.nightly
        ),
        (fails_at_tangent, "Tan", "y", "TVM fails: RuntimeError: InternalError: no tangent", 1),
    ],
)
def test_what_ends_a_worker_is_found_in_each_size(
    job: BuildJob,
    work: Callable[[BuildJob], list[str]],
    operator: str,
    output: str,
    reason: str,
    num_nodes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(building, "_LIMIT_S", 5.0)
    monkeypatch.setattr(building, "_PIECE_LIMIT_S", 5.0)
    left, fallback = guarded(job, work, tmp_path / "crashes")
    assert left == [other for other in ("MatMul", "Sin", "MatMul", "Cos", "MatMul", "Tan") if other != operator]
    assert fallback == {size: {output: reason} for size in range(2)}
    kept = [onnx.load(tmp_path / "crashes" / f"{number}.onnx").graph.node for number in range(2)]
    assert [(len(nodes), nodes[-1].op_type) for nodes in kept] == [(num_nodes, operator)] * 2
    assert f"waves: {reason} at {operator}, the last of {num_nodes} nodes that show it; it stays with" in caplog.text
    assert "Python/ceval.c" not in capfd.readouterr().err


def test_what_is_known_to_end_it_is_compiled_without(job: BuildJob, network: Network) -> None:
    entry, _ = build(replace(job, fallback={0: {"sine": "it ended the compiler"}}))
    assert [part.runs_in for part in entry.parts] == ["tvm", "onnxruntime", "tvm", "tvm"]
    assert entry.parts[1].reasons == {"Sin": "it ended the compiler"}
    fields = {"network": network.name, "inputs": network.inputs, "outputs": network.outputs, "sizes": network.sizes}
    model = open_library(Path(job.library), Manifest(**fields, libraries=(entry,), files={}), entry)
    for shapes in network.sizes:
        inputs = random_inputs(shapes.inputs, 0)
        (expected,) = expected_of(Path(job.network), 1, [inputs])
        assert deviation(model.run(inputs)["y"], expected["y"]) < 1e-4


def deviation(actual: Array, expected: Array) -> float:
    """The largest difference of the angles, as tangents are far apart where those are near."""
    difference = abs(np.arctan(actual) - np.arctan(expected))
    return float(np.minimum(difference, np.pi - difference).max())


def test_where_nothing_can_be_compiled(job: BuildJob) -> None:
    with pytest.raises(MachineError, match=r"TVM compiles nothing here \(TVM fails: the worker process died \(SIGKILL"):
        guarded(job, dies_of_all)


def test_what_fails_without_tvm_is_not_looked_for_again(job: BuildJob) -> None:
    with pytest.raises(MachineError, match=r"waves: TVM fails: .*no space left, though TVM has nothing"):
        guarded(job, fails_with_the_whole)


def test_an_error_of_this_package_is_raised_as_it_is(job: BuildJob) -> None:
    with pytest.raises(UserInputError, match="network=waves: it is refused"):
        guarded(job, refuses_all)


def test_a_network_of_a_file_is_lowered_once_that_is_known_to_end_well(network: Network) -> None:
    device = Device.resolve("auto", "auto")
    lowered, fallback = lower_guarded(network, device, LoweringSettings(), "waves")
    directly = lower_sizes(network.models(), device.target, LoweringSettings(), "waves")
    assert fallback == {}
    assert [task.info for task in lowered.tasks] == [task.info for task in directly.tasks]
    known = {1: {"sine": "it ended the compiler"}}
    lowered, fallback = lower_guarded(network, device, LoweringSettings(), "waves", known)
    assert fallback == known
    beside = [part for part in part_entries(lowered) if part.runs_in == "onnxruntime"]
    assert [(part.size, part.reasons) for part in beside] == [(1, {"Sin": "it ended the compiler"})]


def test_reasons_survive_a_manifest() -> None:
    known = {0: {"sine": "it ended the compiler"}}
    assert fallback_among(json.loads(json.dumps({"fallback": known}))) == known
    assert fallback_among({}) == {}
    with pytest.raises(ModelError, match="fallback in the provenance of a model is damaged"):
        fallback_among({"fallback": {"first": 1}})
