"""What is wrong with an ONNX file is one line, whatever it is: no crash, no long wait, and no giant in memory."""

from __future__ import annotations

import ast
import os
import random
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from helpers.commands import ROOT
from onnx import FunctionProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from ansor_mlflow.errors import UserInputError
from ansor_mlflow.graphs import types
from ansor_mlflow.networks import load_network
from ansor_mlflow.networks.checks import require_sound
from ansor_mlflow.networks.graph import GraphBuilder

FLOAT = TensorProto.FLOAT
GIANT = 10 * 2**30 // 4
"""Elements of a tensor of 10 GiB."""
SECONDS = 10.0


def value(name: str, shape: Sequence[int], dtype: int = FLOAT) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def weight(name: str, values: Any) -> TensorProto:
    return numpy_helper.from_array(np.asarray(values), name)


def claim(name: str, dims: Sequence[int], data_type: int = FLOAT, **data: Any) -> TensorProto:
    return TensorProto(name=name, dims=dims, data_type=data_type, **data)


node = helper.make_node


def model(
    nodes: Iterable[NodeProto],
    weights: Iterable[TensorProto] = (),
    *,
    inputs: Sequence[ValueInfoProto] | None = None,
    outputs: Sequence[ValueInfoProto] | None = None,
    opsets: dict[str, int] | None = None,
    functions: Sequence[FunctionProto] = (),
    ir_version: int = 8,
) -> ModelProto:
    """A network from x to y, both (1, 4)."""
    inputs = [value("x", [1, 4])] if inputs is None else inputs
    outputs = [value("y", [1, 4])] if outputs is None else outputs
    graph = helper.make_graph(list(nodes), "graph", inputs, outputs, list(weights))
    imports = [helper.make_opsetid(*opset) for opset in (opsets or {"": 17}).items()]
    return helper.make_model(graph, ir_version=ir_version, opset_imports=imports, functions=list(functions))


def added(tensor: TensorProto) -> ModelProto:
    return model([node("Add", ["x", tensor.name], ["y"])], [tensor])


def summed(op_type: str, inputs: Sequence[str], weights: Sequence[TensorProto]) -> ModelProto:
    """A network that adds the sum of a tensor that does not depend on its input."""
    nodes = [node(op_type, inputs, ["large"]), node("ReduceSum", ["large"], ["sum"], keepdims=0)]
    return model([*nodes, node("Add", ["x", "sum"], ["y"])], weights)


def function(name: str, nodes: Sequence[NodeProto]) -> FunctionProto:
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)]
    return helper.make_function("local", name, ["a"], ["b"], nodes, imports)


def call(name: str, source: str, target: str) -> NodeProto:
    return node(name, [source], [target], domain="local")


def doubling_calls(depth: int) -> list[FunctionProto]:
    callers = [
        function(f"F{level}", [call(f"F{level + 1}", "a", "c"), call(f"F{level + 1}", "c", "b")])
        for level in range(depth)
    ]
    return [*callers, function(f"F{depth}", [node("Relu", ["a"], ["b"])])]


def sparse() -> ModelProto:
    made = model([node("Add", ["x", "w"], ["y"])])
    made.graph.sparse_initializer.append(helper.make_sparse_tensor(weight("w", [1.0]), weight("i", [2]), [4]))
    return made


def sequence(name: str) -> ValueInfoProto:
    return helper.make_tensor_sequence_value_info(name, FLOAT, [1, 4])


RELU = node("Relu", ["x"], ["y"])
LOCAL = {"": 17, "local": 1}
TENSORS_ONLY = "is not a tensor of NumPy's floats, integers or booleans"
TOO_LARGE = r"would take 10 GiB, and 8 GiB are the most"

NOT_UTF8 = model([node("Relu", ["x"], ["y"], name="replaced")]).SerializeToString()
NOT_UTF8 = NOT_UTF8.replace(b"replaced", b"replac\xec\xed")

WRONG: dict[str, tuple[ModelProto, str]] = {
    "circle": (
        model([node("Add", ["x", "b"], ["a"]), node("Relu", ["a"], ["b"]), node("Relu", ["b"], ["y"])]),
        "a node takes 'b', and one of its nodes depends on itself",
    ),
    "no_tensor": (model([node("Add", ["x", "z"], ["y"])]), "a node takes 'z', and no node makes it"),
    "no_output": (model([node("Relu", ["x"], ["z"])]), "no node makes its output 'y'"),
    "no_outputs": (model([RELU], outputs=[]), "it has no outputs"),
    "no_text": (ModelProto.FromString(NOT_UTF8), r"its NodeProto.name b'replac\\xec\\xed' is no text in UTF-8"),
    "no_operator": (model([node("", ["x"], ["y"])]), "a node has no operator"),
    "no_name": (model([node("Relu", [""], ["y"])], inputs=[value("", [1, 4])]), "one of its inputs has no name"),
    "double_output": (model([RELU, node("Exp", ["x"], ["y"])]), "two tensors of the name 'y'"),
    "input_again": (model([node("Exp", ["x"], ["x"]), RELU]), "two tensors of the name 'x'"),
    "shapes": (
        model([node("MatMul", ["x", "w"], ["y"])], [weight("w", np.ones((5, 4), np.float32))]),
        "its shapes do not fit together",
    ),
    "rank": (model([RELU], inputs=[value("x", [1] * 30)], outputs=[value("y", [1] * 30)]), "has 30 dimensions, and 26"),
    "opset": (model([RELU], opsets={"": 999}), "it is of opset 999, and the package onnx .* knows them up to"),
    "opset_of_others": (model([RELU], opsets={"": 17, "ai.onnx.ml": 2**40}), "is of opset 1099511627776 of ai.onnx.ml"),
    "opset_twice": (model([RELU], opsets={"": 17, "ai.onnx": 11}), "it names two versions of the operators of ONNX"),
    "format": (model([RELU], ir_version=999), "it is of version 999 of ONNX's format, and the package onnx"),
    "custom": (
        model([node("Fast", ["x"], ["y"], domain="com.acme")], opsets={"": 17, "com.acme": 1}),
        "the operator 'com.acme.Fast' is a custom one",
    ),
    "attribute": (model([node("Softmax", ["x"], ["y"], axis="last")]), "'axis' of a node Softmax is of the wrong type"),
    "short": (added(claim("w", [4], raw_data=b"1234")), r"the weight 'w' has 4 bytes, and its shape \[4\] takes 16"),
    "long": (added(claim("w", [1], raw_data=b"12345678")), r"has 8 bytes, and its shape \[1\] takes 4"),
    "negative": (added(claim("w", [-4], raw_data=b"")), r"the weight 'w' has the shape \[-4\]"),
    "type": (added(claim("w", [4], 99, raw_data=bytes(16))), "the weight 'w' is of type 99"),
    "sparse": (sparse(), "the weight 'w' is sparse, and only dense ones are read"),
    "recursive": (
        model([call("F", "x", "y")], opsets=LOCAL, functions=[function("F", [call("F", "a", "b")])]),
        "its function 'F' calls itself",
    ),
    "doubling": (
        model([call("F0", "x", "y")], opsets=LOCAL, functions=doubling_calls(40)),
        "with its functions inlined it has more than 1000000 nodes",
    ),
    "sequence": (
        model([node("SequenceAt", ["x", "i"], ["y"])], [weight("i", 0)], inputs=[sequence("x")]),
        f"'x' {TENSORS_ONLY}",
    ),
    "text": (
        model([RELU], inputs=[value("x", [4], TensorProto.STRING)], outputs=[value("y", [4], TensorProto.STRING)]),
        f"'x' {TENSORS_ONLY}",
    ),
    "giant_weight": (added(claim("w", [GIANT])), f"its tensor 'w' .*{TOO_LARGE}"),
    "overflowing_weight": (added(claim("w", [2**62, 2**62], raw_data=b"")), "its tensor 'w' .* GiB are the most"),
    "giant_input": (model([RELU], inputs=[value("x", [GIANT])], outputs=[value("y", [GIANT])]), f"'x' .*{TOO_LARGE}"),
    "giant_constant": (summed("ConstantOfShape", ["s"], [weight("s", [GIANT])]), f"'large' .*{TOO_LARGE}"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    wrong, message = WRONG[name]
    onnx.save(wrong, "wrong.onnx")
    with pytest.raises(UserInputError, match=f"network=wrong.onnx: .*{message}.*; (export|give|install)") as caught:
        load_network("wrong.onnx")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


FEATURES = node("Scaler", ["x"], ["y"], domain="ai.onnx.ml", offset=[0.5] * 4, scale=[2.0] * 4)
WITH_FEATURES = {"": 17, "ai.onnx.ml": 3}


def test_a_giant_is_found_before_features_are_computed_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(types, "start_session", lambda *_, **__: pytest.fail("it is loaded"))
    nodes = [FEATURES, node("ConstantOfShape", ["s"], ["large"]), node("ReduceSum", ["large"], ["z"])]
    wrong = model(nodes, [weight("s", [GIANT])], outputs=[value("y", [1, 4]), value("z", [1])], opsets=WITH_FEATURES)
    onnx.save(wrong, tmp_path / "wrong.onnx")
    with pytest.raises(UserInputError, match=f"'large' .*{TOO_LARGE}"):
        load_network(str(tmp_path / "wrong.onnx"))


@pytest.mark.parametrize("is_known", [True, False])
def test_a_loop_without_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_known: bool) -> None:
    """It is run for the types behind features, and for an output of which nobody knows the number of axes."""
    monkeypatch.setattr(types, "_MAX_RUN_S", 0.2)
    body = helper.make_graph(
        [node("Identity", ["c"], ["go on"]), node("Add", ["v", "v"], ["doubled"])],
        "body",
        [value("i", [], TensorProto.INT64), value("c", [], TensorProto.BOOL), value("v", [1])],
        [value("go on", [], TensorProto.BOOL), value("doubled", [1])],
    )
    endless = node("Loop", ["", "yes", "one"], ["z"], body=body)
    output = value("z", [1]) if is_known else helper.make_tensor_value_info("z", FLOAT, None)
    weights = [weight("yes", True), weight("one", np.float32([1]))]
    nodes = [FEATURES, endless]
    network = model(nodes, weights, outputs=[value("y", [1, 4]), output], opsets=WITH_FEATURES)
    onnx.save(network, tmp_path / "endless.onnx")
    if is_known:
        assert [output.shape for output in load_network(str(tmp_path / "endless.onnx")).outputs] == [(1, 4), (1,)]
    else:
        with pytest.raises(UserInputError, match=r"infer the shapes of its outputs \(a run does not end in time"):
            load_network(str(tmp_path / "endless.onnx"))


def test_names_of_any_length_are_one_line() -> None:
    long = "\n\x1b" + "a" * 10_000
    with pytest.raises(UserInputError, match="and no node makes it") as caught:
        require_sound(model([node("Relu", [long], ["y"])]), "given")
    assert "\n" not in str(caught.value)
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_nodes_in_any_order_are_sorted(tmp_path: Path) -> None:
    """Converters to 16 bits append their casts."""
    branch = helper.make_graph(
        [node("Neg", ["b"], ["n"]), node("Abs", ["a"], ["b"])], "branch", [], [value("n", [1, 4])]
    )
    nodes = [
        node("Relu", ["chosen"], ["y"]),
        node("If", ["condition"], ["chosen"], then_branch=branch, else_branch=branch),
        node("Exp", ["x"], ["a"]),
    ]
    inputs = [value("x", [1, 4]), value("condition", [], TensorProto.BOOL)]
    onnx.save(model(nodes, inputs=inputs), tmp_path / "nodes.onnx")
    found = load_network(str(tmp_path / "nodes.onnx")).model
    assert [node.op_type for node in found.graph.node] == ["Exp", "If", "Relu"]
    assert [node.op_type for node in found.graph.node[1].attribute[0].g.node] == ["Abs", "Neg"]
    onnx.checker.check_model(found)


def test_functions_of_a_model_are_inlined(tmp_path: Path) -> None:
    given = model([call("F0", "x", "y")], opsets=LOCAL, functions=doubling_calls(3))
    onnx.save(given, tmp_path / "functions.onnx")
    network = load_network(str(tmp_path / "functions.onnx"))
    assert [node.op_type for node in network.model.graph.node] == ["Relu"] * 8
    assert not network.model.functions
    x = {"x": np.array([[-1, 2, -3, 4]], np.float32)}
    outputs = [onnxruntime.InferenceSession(m.SerializeToString()).run(None, x) for m in (given, network.model)]
    np.testing.assert_array_equal(*outputs)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"location": "gone.bin"}, "gone.bin.*; put that file beside"),
        ({"location": "../outside.bin"}, "outside.bin.*; put that file beside"),
        ({"location": "below/../../outside.bin"}, "outside.bin.*; put that file beside"),
        ({"location": "/etc/hostname"}, "/etc/hostname.*; put that file beside"),
        ({"location": "link.bin"}, "link.bin.*; put that file beside"),
        ({"location": "fifo.bin"}, "fifo.bin.*; put that file beside"),
        ({}, "; put that file beside"),
        ({"location": "weights.bin"}, "has 10 bytes, and its shape .* takes 16"),
        ({"location": "weights.bin", "offset": 2**40}, "exceeds file size|cannot be read|has 0 bytes"),
        ({"location": "weights.bin", "length": 2**40}, "cannot be read|has 10 bytes"),
    ],
)
def test_weights_elsewhere(tmp_path: Path, entries: dict[str, Any], message: str) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "below").mkdir()
    (tmp_path / "outside.bin").write_bytes(bytes(16))
    (directory / "weights.bin").write_bytes(bytes(10))
    (directory / "link.bin").symlink_to(tmp_path / "outside.bin")
    os.mkfifo(directory / "fifo.bin")
    tensor = claim("w", [4], data_location=TensorProto.EXTERNAL)
    for key, entry in entries.items():
        tensor.external_data.add(key=key, value=str(entry))
    onnx.save(added(tensor), directory / "model.onnx")
    with pytest.raises(UserInputError, match=message):
        load_network(str(directory / "model.onnx"))


def test_giants_elsewhere_are_not_read(tmp_path: Path) -> None:
    with (tmp_path / "hole.bin").open("wb") as file:
        file.truncate(4 * GIANT)
    tensor = claim("w", [GIANT], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="hole.bin")
    onnx.save(added(tensor), tmp_path / "model.onnx")
    with pytest.raises(UserInputError, match=TOO_LARGE):
        load_network(str(tmp_path / "model.onnx"))


def whole_networks() -> list[ModelProto]:
    """What exporters write: layers with weights, shapes as weights, branches, functions; and what only ONNX Runtime
    can infer the shapes of."""
    builder = GraphBuilder(seed=0)
    data = builder.conv("conv", builder.input("data", (1, 3, 8, 8)), (4, 3, 3, 3), padding=1)
    data = builder.pool("MaxPool", "max", builder.relu("relu", builder.batch_norm("bn", data, 4)), (2, 2), stride=2)
    data = builder.node("Flatten", "flatten", builder.node("GlobalAveragePool", "average", data), axis=1)
    data = builder.node("Softmax", "softmax", builder.dense("logits", data, units=6, in_units=4), axis=-1)
    builder.node("Reshape", "column", data, builder.constant("shape", np.array([3, -1])))
    layers = builder.build("layers", {"column": (3, 2)})
    branches = {
        f"{name}_branch": helper.make_graph([node(op_type, ["x"], [name])], name, [], [value(name, [1, 4])])
        for name, op_type in (("then", "Neg"), ("else", "Abs"))
    }
    condition = [value("x", [1, 4]), value("condition", [], TensorProto.BOOL)]
    fused = model(
        [node("FusedMatMul", ["x", "w"], ["y"], domain="com.microsoft")],
        [weight("w", np.ones((4, 4), np.float32))],
        opsets={"": 17, "com.microsoft": 1},
    )
    fused.graph.output[0].type.tensor_type.ClearField("shape")
    return [
        layers,
        model([node("If", ["condition"], ["y"], **branches)], inputs=condition),
        model([call("F0", "x", "y")], opsets=LOCAL, functions=doubling_calls(2)),
        summed("ConstantOfShape", ["s"], [weight("s", [5])]),
        fused,
    ]


def damaged(content: bytes, rng: random.Random) -> bytes:
    """Cut short, with other bits or bytes, or with a part twice."""
    place = rng.randrange(len(content))
    kind = rng.choice(["cut", "bit", "bit", "bits", "bytes", "twice"])
    if kind == "cut":
        return content[:place]
    if kind == "bytes":
        new = bytes(rng.choice([0, 1, 0x7F, 0x80, 0xFF]) for _ in range(rng.randrange(8)))
        return content[:place] + new + content[place + rng.randrange(1, 6) :]
    if kind == "twice":
        return content[: place + rng.randrange(1, 60)] + content[place:]
    changed = bytearray(content)
    for where in [place] if kind == "bit" else rng.sample(range(len(content)), 3):
        changed[where] ^= 1 << rng.randrange(8)
    return bytes(changed)


NUM_DAMAGED = 60
"""Of each network; thousands were tried once."""


@pytest.mark.system
@pytest.mark.timeout(900)
def test_damaged_files_neither_crash_nor_hang_nor_take_all_memory(tmp_path: Path) -> None:
    rng = random.Random(0)
    for index, network in enumerate(whole_networks()):
        content = network.SerializeToString()
        (tmp_path / f"whole-{index}.onnx").write_bytes(content)
        for number in range(NUM_DAMAGED):
            (tmp_path / f"damaged-{index}-{number}.onnx").write_bytes(damaged(content, rng))
    for name, (wrong, _) in WRONG.items():
        onnx.save(wrong, tmp_path / f"wrong-{name}.onnx")
    probe = ROOT / "tests" / "helpers" / "loading_probe.py"
    done = subprocess.run([sys.executable, str(probe), str(tmp_path)], capture_output=True, text=True, check=False)
    *lines, last = done.stdout.splitlines()
    assert done.returncode == 0, f"{last}: {done.stderr[-2000:]}"
    outcomes = {}
    for line in (*lines, last):
        name, seconds, outcome = line.split(" ", 2)
        outcomes[name] = ast.literal_eval(outcome)
        assert float(seconds) < SECONDS, line
    assert [line for line in outcomes.items() if line[1] != "fine" and not line[1].startswith("UserInputError: ")] == []
    assert all("\n" not in outcome for outcome in outcomes.values())
    for name, outcome in outcomes.items():
        if name.startswith("whole"):
            assert outcome == "fine" or ": TVM " in outcome
        if name.startswith("wrong"):
            assert outcome != "fine"
