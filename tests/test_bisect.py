"""Of a network that is compiled wrongly, the operator is found, and the smallest model that shows it."""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from helpers.commands import RunCommand
from helpers.exports import branching, make_model, tensor
from onnx import TensorProto, helper

import ansor_mlflow as am
from ansor_mlflow import measuring
from ansor_mlflow.commands import bisect
from ansor_mlflow.commands.bisect import Comparison, CuttableGraph
from ansor_mlflow.errors import CorrectnessError, UserInputError
from ansor_mlflow.measuring import checking
from ansor_mlflow.measuring.compare import Inference
from ansor_mlflow.model import BuildJob, LibraryEntry
from ansor_mlflow.model.building import build
from ansor_mlflow.networks.graph import GraphBuilder
from ansor_mlflow.tensors import Arrays

pytestmark = pytest.mark.system

Spoil = Callable[[onnx.GraphProto], None]
SpoilCompiler = Callable[[Spoil], None]


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> SpoilCompiler:
    """Lets the compiler take something else for some graphs; all of it happens in this process."""

    def spoil_compiler(spoil: Spoil) -> None:
        def build_wrongly(job: BuildJob) -> LibraryEntry:
            model = onnx.load(job.network)
            spoil(model.graph)
            onnx.save(model, f"{job.network}.wrong")
            return build(replace(job, network=f"{job.network}.wrong"))[0]

        monkeypatch.setattr(bisect, "build_in_child_process", build_wrongly)
        monkeypatch.setattr(checking, "in_child_process", lambda function, make_call, **_: function(make_call))

    return spoil_compiler


@pytest.fixture
def network(tmp_path: Path) -> Path:
    """Two branches, an infinity that both know, shapes that are computed, and two outputs; (2, 6) -> (2, 8), (2, 6)."""
    builder = GraphBuilder(seed=0)
    data = builder.input("data", (2, 6))
    left = builder.node("LeakyRelu", "/left/LeakyRelu", builder.dense("dense", data, units=8, in_units=6), alpha=0.1)
    below = builder.node("Less", "below", left, builder.weight("zero", np.zeros(1)))
    infinite = builder.node("Log", "log", builder.relu("relu", left))
    masked = builder.node("Where", "masked", below, left, infinite)
    scaled = builder.node("Mul", "scaled", masked, builder.weight("scale", np.full(1, 0.5)))
    right = builder.node("Elu", "right", scaled, alpha=0.5)
    turned = builder.node("Transpose", "turned", data)
    flat = builder.node("Reshape", "flat", turned, builder.node("Shape", "shape", data))
    builder.node("Add", "sum", right, left)
    builder.node("Neg", "negative", flat)
    onnx.save(builder.build("branches", {"sum": (2, 8), "negative": (2, 6)}), tmp_path / "branches.onnx")
    return tmp_path / "branches.onnx"


def nodes(graph: onnx.GraphProto, op_type: str) -> list[onnx.NodeProto]:
    return [node for node in graph.node if node.op_type == op_type]


def wrong_elu(graph: onnx.GraphProto) -> None:
    for node in nodes(graph, "Elu"):
        node.attribute[0].f *= 1.5


def wrong_elu_of_a_product(graph: onnx.GraphProto) -> None:
    if nodes(graph, "Mul"):
        wrong_elu(graph)


def wrong_elu_beside_another_output(graph: onnx.GraphProto) -> None:
    if len(graph.output) > 1:
        wrong_elu(graph)


@pytest.mark.nightly
def test_nothing_differs(network: Path) -> None:
    """In processes of their own, as users have it."""
    found = am.bisect(network)
    assert found.wrong is None
    assert found.note == ""
    assert found.max_rel_error <= found.tolerance == 1e-4
    found.require_equal()
    assert not Path("wrong").exists()
    onnx.save(branching(), "branching.onnx")  # in parts
    assert am.bisect("branching.onnx").wrong is None


def test_an_operator_that_is_wrong_alone(compiler: SpoilCompiler, network: Path) -> None:
    compiler(wrong_elu)
    found = am.bisect(network)
    wrong = found.wrong
    assert wrong is not None
    assert (wrong.tensor, wrong.operator, wrong.node) == ("right", "Elu", "right")
    assert wrong.operators == ("Elu",)
    assert wrong.shape == wrong.actual_shape == (2, 8)
    assert wrong.actual == pytest.approx(1.5 * wrong.expected, rel=1e-4)
    with pytest.raises(
        CorrectnessError, match="the first wrong tensor is 'right' of Elu: report it with what is in wr"
    ):
        found.require_equal()


@pytest.mark.nightly
def test_what_is_saved_shows_it_to_others(compiler: SpoilCompiler, network: Path) -> None:
    compiler(wrong_elu)
    first = am.bisect(network, output="a report").wrong
    assert first is not None
    directory = Path("a report")
    assert {path.name for path in directory.iterdir()} == {
        *("model.onnx", "inputs.npz", "expected.npz", "actual.npz", "bisection.json")
    }
    session = onnxruntime.InferenceSession(directory / "model.onnx", providers=["CPUExecutionProvider"])
    with np.load(directory / "inputs.npz") as inputs, np.load(directory / "expected.npz") as expected:
        np.testing.assert_allclose(session.run(None, dict(inputs))[0], expected["right"], rtol=1e-6)
    report = json.loads((directory / "bisection.json").read_text())
    assert report["bisection"]["wrong"]["operator"] == "Elu"
    assert "tvm" in json.dumps(report["environment"])
    command, *given = shlex.split(first.command.removeprefix("ansor-mlflow "))
    assert command == "bisect"
    path, flags = given[0], dict(zip(given[1::2], given[2::2], strict=True))
    again = am.bisect(path, data=flags["--data"], output=flags["--output"])
    assert again.wrong is not None
    assert again.wrong.max_abs_error == first.max_abs_error


@pytest.mark.nightly
def test_an_operator_that_is_wrong_with_the_one_before_it(compiler: SpoilCompiler, network: Path) -> None:
    compiler(wrong_elu_of_a_product)
    wrong = am.bisect(network).wrong
    assert wrong is not None
    assert wrong.tensor == "right"
    assert wrong.operators == ("Mul", "Elu")
    model = onnx.load("wrong/model.onnx")
    assert [value.name for value in model.graph.input] == ["masked"]
    assert [weight.name for weight in model.graph.initializer] == ["scale"]


@pytest.mark.nightly
def test_an_operator_that_is_wrong_in_company_only(compiler: SpoilCompiler, network: Path) -> None:
    compiler(wrong_elu_beside_another_output)
    wrong = am.bisect(network).wrong
    assert wrong is not None
    assert wrong.tensor == "right"
    assert wrong.operators[-1] == "Elu"
    assert len(onnx.load("wrong/model.onnx").graph.output) > 1


def test_a_command_says_it_with_its_exit_code(
    compiler: SpoilCompiler, network: Path, run_here: RunCommand, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler(wrong_elu)
    assert run_here("bisect", str(network), "--json", "found.json") == 7
    out, err = capsys.readouterr()
    assert "Elu (node 'right'), after 7 others" in out
    assert "ansor-mlflow bisect wrong/model.onnx --data wrong/inputs.npz" in out
    assert err.splitlines()[-1].startswith(
        "Error: the outputs of branches differ from ONNX Runtime's by max_rel_error="
    )
    assert json.loads(Path("found.json").read_text())["wrong"]["operators"] == ["Elu"]
    assert run_here("bisect", str(network), "--tolerance", "100") == 0
    assert "nothing differs" in capsys.readouterr().out


def test_what_is_wrong_from_the_second_call_on(
    compiler: SpoilCompiler, network: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel may go on with what another call has left in memory."""
    load = measuring.library_inference

    def load_with_a_fault(*args: Any) -> Inference:
        run, calls = load(*args), itertools.count()

        def run_with_a_fault(inputs: Mapping[str, np.ndarray]) -> Arrays:
            calls_before = next(calls)
            return {name: array + calls_before for name, array in run(inputs).items()}

        return run_with_a_fault

    compiler(lambda graph: None)
    monkeypatch.setattr(measuring, "library_inference", load_with_a_fault)
    wrong = am.bisect(network).wrong
    assert wrong is not None
    assert len(wrong.operators) == 1


def test_the_inputs_of_the_user_and_what_is_not_finite(compiler: SpoilCompiler, tmp_path: Path) -> None:
    compiler(lambda graph: None)
    builder = GraphBuilder(seed=0)
    builder.node("Log", "y", builder.input("x", (4,)))
    onnx.save(builder.build("log", {"y": (4,)}), "log.onnx")
    np.save("x.npy", np.array([1, 0, -1, 2], np.float32))
    found = am.bisect("log.onnx", data="x.npy")
    assert found.wrong is None
    assert found.note.startswith("ONNX Runtime's outputs hold infinities or NaNs")
    np.save("x.npy", np.array([1, 2, 3, 4], np.float32))
    assert am.bisect("log.onnx", data="x.npy").note == ""


def test_a_result_of_another_shape(compiler: SpoilCompiler, network: Path) -> None:
    def wrong_shape(graph: onnx.GraphProto) -> None:
        for node in nodes(graph, "Neg"):
            node.op_type = "Transpose"

    compiler(wrong_shape)
    wrong = am.bisect(network).wrong
    assert wrong is not None
    assert (wrong.operator, wrong.shape, wrong.actual_shape) == ("Neg", (2, 6), (6, 2))
    assert wrong.actual is None


def test_a_directory_of_somebody_else_is_left_alone(network: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "model.onnx").write_text("mine")
    for output in ("mine", "mine/model.onnx"):
        with pytest.raises(UserInputError, match=f"output={output}: it exists, and bisect did not write it"):
            am.bisect(network, output=output)


def test_where_a_tensor_is_most_wrong() -> None:
    expected = {"y": np.array([[1.0, np.inf, np.nan, 4.0]], np.float32)}
    for values, index in (([1, np.inf, np.nan, 5], 3), ([1, np.inf, 3, 9], 2), ([np.nan, np.inf, np.nan, 9], 0)):
        comparison = compared({"y": np.array([values], np.float32)}, expected)
        assert comparison.wrong(0.1) == ["y"]
        assert comparison.largest_difference("y") == (0, index)
    assert compared(expected, expected).wrong(0) == []


def compared(actual: Arrays, expected: Arrays) -> Comparison:
    return Comparison(model=onnx.ModelProto(), inputs={}, actual=actual, expected=expected)


def test_a_branch_keeps_what_it_takes_from_around_it() -> None:
    branches = {
        name: helper.make_graph([helper.make_node(op_type, ["outer"], ["out"])], name, [], [tensor("out", [3])])
        for name, op_type in (("then_branch", "Neg"), ("else_branch", "Abs"))
    }
    chain = [
        helper.make_node("Exp", ["x"], ["outer"]),
        helper.make_node("If", ["condition"], ["chosen"], **branches),
        helper.make_node("Relu", ["chosen"], ["y"]),
    ]
    inputs = [tensor("x", [3]), tensor("condition", [], TensorProto.BOOL)]
    model = onnx.shape_inference.infer_shapes(make_model(chain, inputs, [tensor("y", [3])], {}))
    parts = CuttableGraph(model)
    assert parts.taken_from_others([1]) == {"outer"}
    alone = parts.part([1], ["chosen"])
    assert [node.op_type for node in alone.graph.node] == ["If"]
    assert {value.name for value in alone.graph.input} == {"condition", "outer"}
    onnx.checker.check_model(alone, full_check=True)
