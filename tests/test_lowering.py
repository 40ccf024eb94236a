"""Lowering gives the same functions every time, which compute what the network computes, nearly in 16 bits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import pytest
from helpers.one_operator import run_lowered, run_onnxruntime
from helpers.small_networks import small_shapes
from onnx import TensorProto, helper, numpy_helper

from ansor_mlflow.device.cpu import has_arithmetic
from ansor_mlflow.device.targets import resolve_target
from ansor_mlflow.lowering.lower import lower
from ansor_mlflow.lowering.network import LoweredNetwork
from ansor_mlflow.measuring.checking import TOLERANCES, compare_outputs
from ansor_mlflow.measuring.compare import ReferenceSession
from ansor_mlflow.model.library import compile_untuned
from ansor_mlflow.networks.families import BUILTIN_NETWORKS
from ansor_mlflow.networks.graph import GraphBuilder
from ansor_mlflow.networks.load import Network, load_network
from ansor_mlflow.records import fields_of
from ansor_mlflow.settings import Dtype, LoweringSettings
from ansor_mlflow.tensors import random_inputs

if TYPE_CHECKING:
    from tvm.target import Target

Layout = Literal["NHWC", "NCHW"]


def hashes(lowered: LoweredNetwork) -> list[str]:
    return [task.info.workload_hash for task in lowered.tasks]


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_lowering_twice_gives_the_same_tasks(small_network: Network, host_target: Target, layout: Layout) -> None:
    first, second = (lower(small_network.model, host_target, LoweringSettings(layout=layout)) for _ in range(2))
    assert hashes(first)
    assert hashes(first) == hashes(second)
    assert [task.info for task in first.tasks] == [task.info for task in second.tasks]


def test_tasks_do_not_depend_on_the_values_of_weights(host_target: Target) -> None:
    """So that records of a generated network serve a trained one."""

    def lower_with(seed: int) -> LoweredNetwork:
        builder = GraphBuilder(seed)
        data = builder.input("data", (1, 3, 8, 8))
        data = builder.batch_norm("bn", builder.conv("conv", data, (4, 3, 3, 3), padding=1), 4)
        return lower(builder.build("seeded", {data: (1, 4, 8, 8)}), host_target)

    assert hashes(lower_with(0)) == hashes(lower_with(1))


@pytest.mark.parametrize(
    "operator", ["ReduceMean", "ReduceMax", "ReduceProd", "ArgMax", "Softmax", "GlobalAveragePool"]
)
def test_functions_are_alike_wherever_they_stand(operator: str, host_target: Target) -> None:
    """A trace finds blocks by their names, so that a record would not apply to a part of its network."""

    def blocks_behind(num_layers: int) -> dict[str, list[str]]:
        builder = GraphBuilder(seed=0)
        data = builder.input("data", (1, 4, 8, 8))
        for number in range(num_layers):
            data = builder.conv(f"conv{number}", data, (4, 4, 1, 1))
        shapes = {"ArgMax": (1, 1, 8, 8), "Softmax": (1, 4, 8, 8), "GlobalAveragePool": (1, 4, 1, 1)}
        outputs = {"last": shapes.get(operator, (1, 1, 1, 1))}
        builder.node(operator, "last", data, **({"axis": 1} if operator in ("ArgMax", "Softmax") else {}))
        if operator == "ArgMax":
            builder.node("Cast", "floats", "last", to=TensorProto.FLOAT)
            outputs = {"floats": outputs["last"]}
        model = builder.build("alike", outputs)
        tasks = lower(model, host_target).tasks
        return {task.info.workload_hash: re.findall(r'sblock\("(\w+)"\)', task.mod.script()) for task in tasks}

    short, long = blocks_behind(1), blocks_behind(9)
    assert short.keys() & long.keys()
    assert all(long.get(task, names) == names for task, names in short.items())


def test_older_records_name_reductions_after_variables() -> None:
    line = '[3, [[[["GetSBlock", [], ["lv486_red", "main"], ["b0"]], ["Fuse", ["lv4_red"], [1], ["l1"]]], []], [1.0]]]'
    assert '"GetSBlock", [], ["red", "main"]' in fields_of(line)
    assert '["lv4_red"]' in fields_of(line)


@pytest.mark.nightly
@pytest.mark.parametrize("name", BUILTIN_NETWORKS)
def test_every_builtin_network_can_be_lowered(name: str, host_target: Target) -> None:
    lowered = lower(load_network(name, input_shapes=small_shapes(name)).model, host_target)
    assert any("conv" in task.info.name or "matmul" in task.info.name for task in lowered.tasks)
    assert sum(task.info.weight * task.info.flops for task in lowered.tasks) > 0


def test_tasks_are_the_functions_of_the_network(small_network: Network, host_target: Target) -> None:
    lowered = lower(small_network.model, host_target)
    assert [task.info.index for task in lowered.tasks] == list(range(len(lowered.tasks)))
    assert len(set(hashes(lowered))) == len(lowered.tasks)
    assert all(task.info.weight == 1 for task in lowered.tasks)
    (convolution,) = (task for task in lowered.tasks if "conv2d" in task.info.name)
    assert "relu" in convolution.info.name  # fused
    assert convolution.info.flops >= 2 * 8 * 16 * 16 * 3 * 3 * 3


def test_what_follows_a_product_is_part_of_its_function(host_target: Target) -> None:
    """A GELU and the sum with what came before: no reshaping to two axes stands between them."""
    builder = GraphBuilder(seed=0)
    data = builder.input("data", (1, 13, 32))
    weights = [builder.weight(name, np.ones(shape)) for name, shape in (("up", (32, 64)), ("down", (64, 32)))]
    biases = [builder.weight(name, np.ones(size)) for name, size in (("first", 64), ("second", 32))]
    hidden = builder.node("Add", "hidden", builder.node("MatMul", "product", data, weights[0]), biases[0])
    erf = builder.node(
        "Erf", "erf", builder.node("Div", "scaled", hidden, builder.constant("root", np.float32(1.4142)))
    )
    gelu = builder.node(
        "Mul", "gelu", hidden, builder.node("Add", "shifted", erf, builder.constant("one", np.float32(1)))
    )
    added = builder.node("Add", "added", builder.node("MatMul", "back", gelu, weights[1]), biases[1])
    model = builder.build("block", {builder.node("Add", "output", data, added): (1, 13, 32)})
    names = [task.info.name for task in lower(model, host_target).tasks]
    assert sorted(name[: len("fused_matmul")] for name in names) == ["fused_matmul"] * 2
    assert sum("erf" in name for name in names) == 1


def test_a_function_that_is_called_twice_is_one_task(host_target: Target) -> None:
    builder = GraphBuilder(seed=0)
    data = builder.input("data", (1, 8, 16, 16))
    for name in ("first", "second"):
        data = builder.relu(f"{name}.relu", builder.conv(name, data, (8, 8, 3, 3), padding=1))
    lowered = lower(builder.build("twice", {data: (1, 8, 16, 16)}), host_target)
    assert [task.info.weight for task in lowered.tasks if "conv2d" in task.info.name] == [2]


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_untuned_kernels_agree_with_onnxruntime(small_network: Network, host_target: Target, layout: Layout) -> None:
    inputs = random_inputs(small_network.inputs, seed=5)
    lowered = lower(small_network.model, host_target, LoweringSettings(layout=layout))
    (output,) = run_lowered(lowered, host_target, inputs)
    (expected,) = run_onnxruntime(small_network.model, inputs)
    assert np.ptp(expected) > 0.1
    np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-5)


def test_tasks_do_not_depend_on_the_number_of_threads(small_network: Network) -> None:
    one, four = (hashes(lower(small_network.model, resolve_target("llvm", threads))) for threads in (1, 4))
    assert one == four


@pytest.mark.parametrize(("shape", "axis"), [((3, 8, 1, 4, 32), -3), ((8, 1, 32), -2), ((8, 1, 32), 1)])
def test_a_squeeze_may_count_its_axes_from_the_end(host_target: Target, shape: tuple[int, ...], axis: int) -> None:
    """As those of attention do, by which TVM's conversion of layouts crashes."""
    squeezed = [size for position, size in enumerate(shape) if position != axis % len(shape)]
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["r"]), helper.make_node("Squeeze", ["r", "axes"], ["y"])],
        "squeeze",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, squeezed)],
        [numpy_helper.from_array(np.array([axis], np.int64), "axes")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    assert [int(size) for size in lower(model, host_target).mod["main"].ret_ty.shape] == squeezed


def test_a_padded_convolution_is_tiled_without_its_slice(host_target: Target) -> None:
    """The slice is part of what follows; as a part of the convolution it would ask for tiles of 386 channels again."""
    settings = LoweringSettings(pad_channels=8, algorithm="direct")
    lowered = lower(load_network("conv2d:1,13,13,386,192,3,3,1,1").model, host_target, settings)
    (convolution,) = [task for task in lowered.tasks if "conv2d" in task.info.name]
    (slicing,) = [task for task in lowered.tasks if "strided_slice" in task.info.name]
    assert convolution is not slicing
    assert "transpose" in slicing.info.name


@pytest.mark.parametrize("dtype", get_args(Dtype))
def test_outputs_equal_the_references(
    small_network: Network, small_onnx: Path, host_target: Target, tmp_path: Path, dtype: Dtype
) -> None:
    from tvm import cpu, relax, runtime

    lowered = lower(small_network.model, host_target, LoweringSettings(dtype=dtype))
    compile_untuned(lowered, host_target, tmp_path / "model.so")
    (values,) = random_inputs(small_network.inputs, seed=0).values()
    machine = relax.VirtualMachine(runtime.load_module(str(tmp_path / "model.so")), cpu())
    logits = machine["main"](runtime.tensor(values)).numpy()
    assert logits.dtype == np.float32
    error = compare_outputs({"logits": logits}, ReferenceSession(small_onnx, 1).run({"data": values})).max_rel_error
    assert error <= TOLERANCES[dtype]
    assert (error > TOLERANCES["float32"]) == (dtype != "float32")


def test_convolutions_take_16_bits_and_add_up_in_32(small_network: Network, host_target: Target) -> None:
    from tvm.s_tir.meta_schedule.arg_info import ArgInfo

    for dtype in ("float16", "bfloat16"):
        (conv,) = (
            task
            for task in lower(small_network.model, host_target, LoweringSettings(dtype=dtype)).tasks
            if "conv2d" in task.info.name
        )
        data, weight, *_ = ArgInfo.from_entry_func(conv.mod, remove_preproc=True)
        assert {str(data.dtype), str(weight.dtype)} == {dtype}
        assert 'T.Cast("float32"' in conv.mod.script()


@pytest.mark.parametrize(
    ("spec", "dtype", "expected"),
    [
        ("llvm -mcpu=sapphirerapids", "float16", True),
        ("llvm -mcpu=sapphirerapids", "bfloat16", True),
        ("llvm -mcpu=haswell", "float16", False),
        ("llvm -mcpu=haswell", "bfloat16", False),
        ("llvm -mcpu=haswell", "float32", True),
        ("cuda -arch=sm_90", "bfloat16", True),
    ],
)
def test_which_targets_have_instructions_for_16_bits(spec: str, dtype: str, expected: bool) -> None:
    assert has_arithmetic(resolve_target(spec, 1), dtype) is expected
