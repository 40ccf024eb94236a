"""What TVM cannot compute runs in ONNX Runtime: the parts of a network, that they compute the same, and their files."""

from __future__ import annotations

import itertools
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
from helpers.exports import branching, detector, make_model, tensor, text_recogniser
from helpers.untuned import compiled_untuned
from onnx import TensorProto, helper

from ansor_mlflow import flavor
from ansor_mlflow.device.targets import resolve_target
from ansor_mlflow.errors import MachineError, ModelError, UserInputError
from ansor_mlflow.graphs import value_infos
from ansor_mlflow.graphs.partition import MIN_FLOPS, partition, segments
from ansor_mlflow.lowering.lower import lower
from ansor_mlflow.lowering.network import LoweredNetwork
from ansor_mlflow.measuring.compare import ReferenceSession
from ansor_mlflow.model.loading import load_package
from ansor_mlflow.model.manifest import Manifest
from ansor_mlflow.model.package import CompiledNetwork, write_package
from ansor_mlflow.model.parts import part_entries
from ansor_mlflow.networks.load import Network, load_network
from ansor_mlflow.serving.pyfunc import get_signature
from ansor_mlflow.settings import LoweringSettings
from ansor_mlflow.tensors import OPEN, random_inputs

if TYPE_CHECKING:
    from tvm.target import Target


MODELS = {"branching": branching, "detector": detector}


@pytest.fixture(scope="module", params=MODELS)
def network(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Network:
    path = tmp_path_factory.mktemp("network") / f"{request.param}.onnx"
    onnx.save(MODELS[request.param](), path)
    return load_network(str(path))


@pytest.fixture(scope="module")
def lowered(network: Network, host_target: Target) -> LoweredNetwork:
    return lower(network.model, host_target)


@pytest.fixture(scope="module")
def compiled(
    network: Network, lowered: LoweredNetwork, host_target: Target, tmp_path_factory: pytest.TempPathFactory
) -> CompiledNetwork:
    return compiled_untuned(network, lowered, host_target, tmp_path_factory.mktemp("compiled"))


@pytest.fixture
def saved(compiled: CompiledNetwork, tmp_path: Path) -> Path:
    flavor.save_model(compiled, str(tmp_path / "model"))
    return tmp_path / "model"


def assert_same(outputs: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert outputs.keys() == expected.keys()
    for name, values in expected.items():
        assert outputs[name].dtype == values.dtype
        np.testing.assert_allclose(outputs[name], values, rtol=0, atol=1e-4 * abs(values).max())


def chain(*op_types: str) -> onnx.ModelProto:
    names = ["x", *(f"t{index}" for index in range(len(op_types)))]
    nodes = [helper.make_node(op, [names[i]], [names[i + 1]]) for i, op in enumerate(op_types)]
    shape = (1, 2, 1000, 1000)
    return make_model(nodes, [tensor("x", shape)], [tensor(names[-1], shape)], {})


@pytest.mark.parametrize(
    ("stays", "expected"),
    [
        ({}, ["tvm"]),
        ({1}, ["tvm", "onnxruntime", "tvm"]),
        ({0, 1}, ["onnxruntime", "tvm"]),
        ({3}, ["tvm", "onnxruntime"]),
        ({0, 2}, ["onnxruntime", "tvm", "onnxruntime", "tvm"]),
        ({0, 1, 2, 3}, ["onnxruntime"]),
    ],
)
def test_parts_of_a_chain_are_as_few_as_can_be(stays: set[int], expected: list[str]) -> None:
    model = chain("Relu", "Exp", "Neg", "Abs")
    parts = partition(model, dict.fromkeys(stays, "not known"), value_infos(model))
    assert [part.runs_in for part in parts] == expected
    assert sum(sum(part.operators.values()) for part in parts) == 4
    assert parts[0].model.graph.input[0].name == "x"
    for before, after in itertools.pairwise(parts):
        assert [value.name for value in before.model.graph.output] == [value.name for value in after.model.graph.input]


def test_branches_that_do_not_depend_on_each_other_are_one_part() -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("Exp", ["x"], ["b"]),
        helper.make_node("Neg", ["a"], ["c"]),
        helper.make_node("Neg", ["b"], ["d"]),
    ]
    shape = (1, 2, 1000, 1000)
    model = make_model(nodes, [tensor("x", shape)], [tensor("c", shape), tensor("d", shape)], {})
    parts = partition(model, {2: "not known", 3: "not known"}, value_infos(model))
    assert [part.operators for part in parts] == [{"Exp": 1, "Relu": 1}, {"Neg": 2}]


def test_a_part_that_computes_too_little_stays_with_its_neighbours() -> None:
    """A boundary costs more than TVM could save."""
    model = chain("Relu", "Exp", "Neg", "Abs", "Neg")
    for value in (*model.graph.input, *model.graph.output):
        value.CopyFrom(tensor(value.name, (1, int(MIN_FLOPS / 2))))
    parts = partition(model, {1: "not known", 3: "not known"}, value_infos(model))
    assert [(part.runs_in, sum(part.operators.values())) for part in parts] == [("onnxruntime", 4), ("tvm", 1)]
    assert parts[0].reasons == {"Exp": "not known", "Abs": "not known"}


def test_sequences_that_need_each_other_are_in_one_part() -> None:
    """Each has an element that was computed of one of the other, between which nothing else lies."""
    shape = (1, 2, 1000, 1000)
    nodes = [
        *(helper.make_node("SequenceConstruct", [name], [f"of {name}"]) for name in "xy"),
        *(helper.make_node("SequenceAt", [f"of {name}", "zero"], [f"{name}0"]) for name in "xy"),
        *(helper.make_node("Relu", [f"{name}0"], [f"{name}1"]) for name in "xy"),
        helper.make_node("SequenceInsert", ["of x", "y1"], ["more of x"]),
        helper.make_node("SequenceInsert", ["of y", "x1"], ["more of y"]),
        *(helper.make_node("SequenceAt", [f"more of {name}", "zero"], [f"{name}2"]) for name in "xy"),
        *(helper.make_node("Relu", [f"{name}2"], [f"{name}3"]) for name in "xy"),
    ]
    inputs, outputs = ([tensor(f"{name}{end}", shape) for name in "xy"] for end in ("", "3"))
    model = make_model(nodes, inputs, outputs, {"zero": np.array(0)})
    values = value_infos(model)
    stays = [index for index, node in enumerate(nodes) if "Sequence" in node.op_type]
    parts = partition(model, dict.fromkeys(stays, "no tensors"), values)
    assert [(part.runs_in, part.operators.get("Relu")) for part in parts] == [("onnxruntime", 2), ("tvm", 2)]


def test_an_operator_that_tvm_does_not_know_is_the_only_one_that_stays(
    network: Network, lowered: LoweredNetwork
) -> None:
    operator, reason = {
        "branching": ("If", "control flow"),
        "detector": ("NonMaxSuppression", "shapes that depend on values"),
    }[network.name]
    staying = [part.graph for part in lowered.parts if part.graph.runs_in == "onnxruntime"]
    assert [part.reasons for part in staying] == [{operator: reason}]
    assert lowered.parts[0].graph.runs_in == "tvm"
    assert any("conv2d" in task.info.name for task in lowered.tasks)


def test_names_of_tasks_are_short_enough_for_metrics() -> None:
    """A recurrent layer that is written out makes functions of dozens of operators."""
    target = resolve_target("cuda -arch=sm_80", 1)
    names = [task.info.name for task in lower(fixed_text_recogniser(), target).tasks]
    assert 90 < max(map(len, names)) <= 100
    assert len(set(names)) == len(names)


def fixed_text_recogniser() -> onnx.ModelProto:
    model = text_recogniser()
    for tensor_ in (*model.graph.input, *model.graph.output):
        for dim in tensor_.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_value = {"batch": 1, "columns": 16}[dim.dim_param]
    return model


def test_partition_off_names_what_tvm_cannot_compute(network: Network, host_target: Target) -> None:
    operator = {"branching": "If", "detector": "NonMaxSuppression"}[network.name]
    with pytest.raises(UserInputError, match=rf"TVM cannot compute {operator} \(.*\); partition=auto leaves"):
        lower(network.model, host_target, LoweringSettings(partition="off"))


def test_a_network_without_anything_for_tvm_is_onnx_runtimes(host_target: Target) -> None:
    nodes = [helper.make_node("NonZero", ["x"], ["y"])]
    model = make_model(nodes, [tensor("x", (4,))], [tensor("y", ["n", "m"], TensorProto.INT64)], {})
    lowered = lower(model, host_target)
    assert lowered.is_onnxruntimes
    assert (lowered.tasks, lowered.constant_bytes, list(lowered.mod.functions_items())) == ((), 0, [])
    (part,) = part_entries(lowered)
    assert str(part) == "ONNX Runtime computes all 1 node (shapes that depend on values)"
    with pytest.raises(UserInputError, match=r"TVM cannot compute NonZero \(shapes that depend"):
        lower(model, host_target, LoweringSettings(partition="off"))


def test_a_network_of_constants_is_refused(host_target: Target) -> None:
    nodes = [helper.make_node("Shape", ["x"], ["y"])]
    model = make_model(nodes, [tensor("x", (4,))], [tensor("y", [1], TensorProto.INT64)], {})
    with pytest.raises(UserInputError, match="its outputs do not depend on its inputs, so there is nothing to tune"):
        lower(model, host_target)


@pytest.mark.parametrize("sign", [1, -1])
def test_parts_compute_what_onnxruntime_computes(compiled: CompiledNetwork, saved: Path, sign: int) -> None:
    """Both branches, since the sign of the input decides."""
    model = flavor.load_model(str(saved))
    reference = ReferenceSession(compiled.network, num_threads=1)
    inputs = {name: sign * abs(array) for name, array in random_inputs(compiled.inputs, seed=0).items()}
    assert_same(model.run(inputs), reference.run(inputs))


@pytest.mark.system
def test_parts_are_built_again_where_no_library_runs(compiled: CompiledNetwork, tmp_path: Path) -> None:
    here = compiled.fingerprint
    newer = replace(here, target={**here.target, "mcpu": "next"}, features=(*here.features, "avx1024f"))
    manifest = write_package(replace(compiled, fingerprint=newer), tmp_path)
    model = load_package(tmp_path, manifest)
    assert model.choice.level == "untuned"
    assert model.entry.parts == compiled.parts
    assert compiled.parts[1].name in str([part.name for part in model.entry.parts])
    inputs = random_inputs(compiled.inputs, seed=0)
    assert_same(model.run(inputs), ReferenceSession(compiled.network, num_threads=1).run(inputs))


def part_of(saved: Path) -> Path:
    (part,) = saved.glob("libraries/*/part*.onnx")
    return part


def test_onnxruntime_is_a_requirement_of_such_a_model_only(
    saved: Path, compiled: CompiledNetwork, tmp_path: Path
) -> None:
    assert "onnxruntime==" in (saved / "requirements.txt").read_text()
    flavor.save_model(replace(compiled, parts=()), str(tmp_path / "whole"))
    assert "onnxruntime" not in (tmp_path / "whole" / "requirements.txt").read_text()


@pytest.mark.parametrize("damage", ["changed", "gone", "another"])
def test_a_changed_part_is_refused_before_it_is_opened(saved: Path, damage: str) -> None:
    part = part_of(saved)
    if damage == "changed":
        part.write_bytes(part.read_bytes().replace(b"main_graph", b"main_grape"))
    elif damage == "gone":
        part.unlink()
    else:
        shutil.copy(part, part.with_name("part7.onnx"))
    with pytest.raises(ModelError, match=r"part\d\.onnx (does not match|is missing|has no SHA-256)"):
        flavor.load_model(str(saved))


@pytest.mark.parametrize(
    "name", ["../../network.onnx", "part9.onnx", "/etc/passwd"], ids=["elsewhere", "unknown", "absolute"]
)
def test_a_part_that_is_not_a_file_of_the_library_is_refused(saved: Path, name: str) -> None:
    manifest = Manifest.read(saved)
    parts = tuple(
        replace(part, name=name) if part.runs_in == "onnxruntime" else part for part in manifest.libraries[0].parts
    )
    manifest = replace(manifest, libraries=(replace(manifest.libraries[0], parts=parts),))
    with pytest.raises(ModelError, match="is not a file of the library"):
        load_package(saved, manifest)


def test_without_onnxruntime_the_error_says_what_is_missing(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    with pytest.raises(MachineError, match="a part of this network runs in ONNX Runtime, which is not installed"):
        flavor.load_model(str(saved))


@pytest.mark.parametrize("damage", [{"runs_in": "java"}, {"name": 7}, {"inputs": None}])
def test_a_damaged_part_of_a_manifest_is_an_error_of_the_model(
    compiled: CompiledNetwork, tmp_path: Path, damage: dict[str, Any]
) -> None:
    entry = write_package(compiled, tmp_path).to_dict()
    entry["libraries"][0]["parts"][0].update(damage)
    with pytest.raises(ModelError, match="MLmodel file is damaged"):
        Manifest.from_dict(entry)


def test_the_parts_share_the_operations(compiled: CompiledNetwork) -> None:
    assert sum(part.flops_share for part in compiled.parts) == pytest.approx(1)
    assert [part.runs_in for part in compiled.parts].count("onnxruntime") == 1


def test_a_library_of_an_older_model_has_no_parts(saved: Path) -> None:
    entry = Manifest.read(saved).to_dict()
    del entry["libraries"][0]["parts"]
    entry["format_version"] = 1
    assert Manifest.from_dict(entry).libraries[0].parts == ()


def test_an_output_of_an_open_size_is_open_in_the_signature(tmp_path: Path) -> None:
    onnx.save(detector(), tmp_path / "detector.onnx")
    network = load_network(str(tmp_path / "detector.onnx"))
    assert [spec.shape for spec in network.outputs] == [(OPEN, 3), (1, 2, 256)]
    assert [spec.shape for spec in get_signature(network.inputs, network.outputs).outputs.inputs] == [
        (-1, 3),
        (-1, 2, 256),
    ]


def test_segments_are_cut_where_one_tensor_is_handed_over() -> None:
    """Two blocks with a shortcut around each, as in a residual network, and a last layer."""
    nodes, taken = [], "x"
    for block in range(2):
        names = [f"{block}{name}" for name in ("first", "second", "sum")]
        for name, given in zip(names[:2], [taken, names[0]], strict=True):
            nodes.append(helper.make_node("MatMul", [given, "weights"], [name]))
        nodes.append(helper.make_node("Add", [names[1], taken], [taken := names[2]]))
    nodes.append(helper.make_node("MatMul", [taken, "weights"], ["y"]))
    weights = {"weights": np.eye(64, dtype=np.float32)}
    model = onnx.shape_inference.infer_shapes(
        make_model(nodes, [tensor("x", (8, 64))], [tensor("y", (8, 64))], weights)
    )

    def operators(most: int) -> list[list[str]]:
        return [[n.op_type for n in p.model.graph.node] for p in segments(model, value_infos(model), most)]

    block = ["MatMul", "MatMul", "Add"]
    assert operators(1) == [[*block, *block, "MatMul"]]
    assert operators(2) == [[*block, *block], ["MatMul"]]  # there is no place nearer to the middle but before it
    assert operators(8) == [block, block, ["MatMul"]]
    parts = segments(model, value_infos(model), 8)
    assert [[value.name for value in part.model.graph.input] for part in parts] == [["x"], ["0sum"], ["1sum"]]
    assert {part.runs_in for part in parts} == {"tvm"}
