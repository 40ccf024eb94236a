"""What only ONNX Runtime computes stays there, whatever kind of value or operator it is, and the rest is TVM's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlflow
import numpy as np
import onnx
import pytest
from helpers.lanes import every_second
from helpers.untuned import compiled_untuned
from onnx import TensorProto, helper, numpy_helper

from ansor_mlflow import flavor
from ansor_mlflow.errors import UserInputError
from ansor_mlflow.graphs import value_infos
from ansor_mlflow.graphs.partition import partition
from ansor_mlflow.lowering import LoweredNetwork, lower_sizes
from ansor_mlflow.lowering.lower import lower
from ansor_mlflow.measuring import ReferenceSession
from ansor_mlflow.networks import load_network
from ansor_mlflow.settings import LoweringSettings
from ansor_mlflow.tensors import random_inputs

if TYPE_CHECKING:
    from tvm.target import Target

RNG = np.random.default_rng(0)
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
WEIGHTS = {"w": RNG.normal(size=(64, 64)).astype(np.float32) / 8, "zero": np.array(0), "two": np.array(2)}
ANY_SEQUENCE = helper.make_tensor_sequence_value_info("sequence", FLOAT, None)

node = helper.make_node


def tensor(name: str, shape: Any = None, dtype: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def make(
    nodes: list[onnx.NodeProto],
    outputs: list[onnx.ValueInfoProto],
    constants: Mapping[str, np.ndarray] = WEIGHTS,
    inputs: tuple[onnx.ValueInfoProto, ...] = (tensor("x", [16, 64]),),
) -> onnx.ModelProto:
    weights = [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "main_graph", list(inputs), outputs, weights)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(graph, ir_version=8, opset_imports=opsets)


def between_layers(*nodes: onnx.NodeProto) -> onnx.ModelProto:
    """Nodes that make "b" of "a", between two products of matrices."""
    return make(
        [node("MatMul", ["x", "w"], ["a"]), *nodes, node("MatMul", ["b", "w"], ["y"])], [tensor("y", ["n", 64])]
    )


def assert_runs(model: onnx.ModelProto, target: Target, directory: Path, **sizes: Any) -> LoweredNetwork:
    """Compares a compiled network with ONNX Runtime, called as the flavor and as pyfunc."""
    onnx.save(model, directory / "network.onnx")
    network = load_network(str(directory / "network.onnx"), **sizes)
    lowered = lower_sizes(network.models(), target, LoweringSettings(algorithm="direct"), "network")
    flavor.save_model(compiled_untuned(network, lowered, target, directory), str(directory / "model"))
    loaded, pyfunc = flavor.load_model(str(directory / "model")), mlflow.pyfunc.load_model(str(directory / "model"))
    reference = ReferenceSession(directory / "network.onnx", num_threads=1)
    for size in network.sizes or (network,):
        inputs = random_inputs(size.inputs, seed=0)
        expected = reference.run(inputs)
        served = pyfunc.predict(inputs)
        served = served if isinstance(served, dict) else {next(iter(expected)): served}
        for outputs in (loaded.run(inputs), served):
            assert outputs.keys() == expected.keys()
            for name, values in expected.items():
                assert (outputs[name].dtype, outputs[name].shape) == (values.dtype, values.shape)
                np.testing.assert_allclose(outputs[name], values, rtol=1e-3, atol=1e-4)
    return lowered


def stays(lowered: LoweredNetwork) -> dict[str, str]:
    return {operator: reason for part in lowered.parts for operator, reason in part.graph.reasons.items()}


NO_TENSORS = {
    "split": [node("SplitToSequence", ["a", "two"], ["s"]), node("SequenceAt", ["s", "two"], ["b"])],
    "construct": [
        node("SequenceConstruct", ["x", "a"], ["s"]),
        node("SequenceErase", ["s", "zero"], ["t"]),
        node("ConcatFromSequence", ["t"], ["b"], axis=0),
    ],
    "optional": [node("Optional", ["a"], ["o"]), node("OptionalGetElement", ["o"], ["b"])],
    "loop": [
        node("SequenceEmpty", [], ["s"], dtype=FLOAT),
        node(
            "Loop",
            ["two", "", "s"],
            ["t"],
            body=helper.make_graph(
                [node("Identity", ["go"], ["goes"]), node("SequenceInsert", ["sequence", "a"], ["longer"])],
                "body",
                [tensor("i", [], INT64), tensor("go", [], TensorProto.BOOL), ANY_SEQUENCE],
                [tensor("goes", [], TensorProto.BOOL), helper.make_tensor_sequence_value_info("longer", FLOAT, None)],
            ),
        ),
        node("ConcatFromSequence", ["t"], ["b"], axis=0),
    ],
    "needed later": [
        node("SplitToSequence", ["x", "two"], ["s"]),
        node("MatMul", ["a", "w"], ["c"]),
        node("SequenceInsert", ["s", "c"], ["t"]),
        node("ConcatFromSequence", ["t"], ["b"], axis=0),
    ],
}


@pytest.mark.parametrize("case", NO_TENSORS)
def test_sequences_and_optionals_stay_within_a_part(case: str, host_target: Target, tmp_path: Path) -> None:
    lowered = assert_runs(between_layers(*NO_TENSORS[case]), host_target, tmp_path)
    assert "tvm" in {part.graph.runs_in for part in lowered.parts}
    assert "values that are no tensors" in stays(lowered).values()


def test_what_lies_between_those_who_share_a_sequence_stays_with_them() -> None:
    nodes = [
        node("SplitToSequence", ["x", "two"], ["s"]),
        node("SequenceAt", ["s", "zero"], ["a"]),
        node("Relu", ["a"], ["b"]),
        node("SequenceInsert", ["s", "b"], ["t"]),
        node("Exp", ["x"], ["e"]),
        node("SequenceInsert", ["t", "e"], ["u"]),
        node("SequenceLength", ["u"], ["y"]),
    ]
    model = make(nodes, [tensor("y", [], INT64)], WEIGHTS, (tensor("x", [1000, 4000]),))
    reasons = {index: "no tensor" for index, each in enumerate(nodes) if "Seq" in each.op_type}
    before, after = partition(model, reasons, value_infos(model))
    assert (before.runs_in, before.operators) == ("tvm", {"Exp": 1})
    assert after.operators["Relu"] == 1


OUTPUTS: dict[str, tuple[list[onnx.NodeProto], list[onnx.ValueInfoProto]]] = {
    "constant": (
        [
            node("Shape", ["x"], ["n"], start=0, end=1),
            node("ConstantOfShape", ["n"], ["lengths"], value=numpy_helper.from_array(np.array([300]))),
        ],
        [tensor("lengths", ["n"], INT64)],
    ),
    "weight": ([], [tensor("w")]),
    "input": ([], [tensor("x", ["n", 64])]),
    "two names": ([node("Identity", ["a"], ["c"]), node("Identity", ["a"], ["d"])], [tensor("c"), tensor("d")]),
    "of two parts": (
        [node("Cast", ["a"], ["t"], to=TensorProto.STRING), node("Cast", ["t"], ["c"], to=1)],
        [tensor("c")],
    ),
}


@pytest.mark.parametrize("sizes", [{"input_shapes": {"x": [4, 64]}}, {"input_shapes": {"x": [[4, 16], 64]}}], ids=len)
@pytest.mark.parametrize("in_parts", [False, True], ids=["whole", "in parts"])
@pytest.mark.parametrize("case", every_second(OUTPUTS))
def test_outputs_that_no_layer_makes(
    case: str, in_parts: bool, sizes: dict[str, Any], host_target: Target, tmp_path: Path
) -> None:
    nodes, outputs = OUTPUTS[case]
    staying = [node("Det", ["b"], ["det"])] if in_parts else [node("Flatten", ["b"], ["det"])]
    model = make(
        [
            node("MatMul", ["x", "w"], ["a"]),
            *nodes,
            node("Reshape", ["a", "shape"], ["b"]),
            *staying,
            node("Reshape", ["det", "two_axes"], ["rows"]),
            node("Relu", ["rows"], ["y"]),
        ],
        [tensor("y", ["m", 4]), *outputs],
        {**WEIGHTS, "shape": np.array([-1, 2, 2]), "two_axes": np.array([-1, 4])},
        (tensor("x", ["n", 64]), tensor("unused", [2])),
    )
    lowered = assert_runs(model, host_target, tmp_path, **sizes)
    assert ("Det" in stays(lowered)) == in_parts


def test_an_intrinsic_without_code_is_named_and_stays(host_target: Target) -> None:
    lowered = lower(between_layers(node("Cosh", ["a"], ["c"]), node("Relu", ["c"], ["b"])), host_target)
    assert stays(lowered) == {"Cosh": "TVM's code generator: unknown intrinsic tirx.cosh"}


def test_shapes_are_those_of_onnxruntime(host_target: Target, tmp_path: Path) -> None:
    """ONNX infers 400 bins for STFT's window, of which a half, and one, is computed."""
    nodes = [
        node("STFT", ["x", "hop", "window"], ["s"]),
        node("ReduceSumSquare", ["s", "last"], ["p"], keepdims=0),
        node("MatMul", ["p", "mel"], ["y"]),
    ]
    constants = {
        "hop": np.array(160),
        "window": np.hanning(400).astype(np.float32),
        "last": np.array([-1]),
        "mel": RNG.random((201, 64), np.float32),
    }
    model = make(nodes, [tensor("y", [1, "t", 64])], constants, (tensor("x", [1, 4000]),))
    lowered = assert_runs(model, host_target, tmp_path)
    assert [part.graph.runs_in for part in lowered.parts] == ["onnxruntime", "tvm"]


FEATURES = {"Scaler": {"offset": [0.5] * 64, "scale": [2.0] * 64}, "Normalizer": {"norm": "L2"}}


@pytest.mark.parametrize("op_type", FEATURES)
def test_a_network_behind_features_of_scikit_learn(op_type: str, host_target: Target, tmp_path: Path) -> None:
    first = node(op_type, ["x"], ["a"], domain="ai.onnx.ml", **FEATURES[op_type])
    model = make([first, node("MatMul", ["a", "w"], ["b"]), node("Relu", ["b"], ["y"])], [tensor("y")])
    lowered = assert_runs(model, host_target, tmp_path)
    assert stays(lowered) == {op_type: "an operator of ai.onnx.ml"}
    assert lowered.parts[-1].graph.operators == {"MatMul": 1, "Relu": 1}


def test_inputs_that_onnxruntimes_part_refuses_are_named(host_target: Target, tmp_path: Path) -> None:
    """A reshape to as many elements as are found in some inputs only, such as boxes above a score."""
    nodes = [
        node("MatMul", ["x", "w"], ["a"]),
        node("Greater", ["a", "nothing"], ["is_positive"]),
        node("NonZero", ["is_positive"], ["places"]),
        node("Reshape", ["places", "all"], ["p"]),
        node("Cast", ["p"], ["c"], to=FLOAT),
        node("ReduceMean", ["c"], ["m"], keepdims=0),
        node("Add", ["a", "m"], ["b"]),
        node("MatMul", ["b", "w"], ["y"]),
    ]
    constants = {"w": np.abs(WEIGHTS["w"]), "nothing": np.float32(0), "all": np.array([2, 16 * 64])}
    onnx.save(make(nodes, [tensor("y", ["n", 64])], constants), tmp_path / "network.onnx")
    network = load_network(str(tmp_path / "network.onnx"))
    lowered = lower(network.model, host_target)
    flavor.save_model(compiled_untuned(network, lowered, host_target, tmp_path), str(tmp_path / "model"))
    loaded = flavor.load_model(str(tmp_path / "model"))
    loaded.run({"x": np.ones((16, 64), np.float32)})
    with pytest.raises(UserInputError, match=r"ONNX Runtime cannot compute its part of the network: .*Reshape"):
        loaded.run({"x": np.zeros((16, 64), np.float32)})
