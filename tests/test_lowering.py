"""Lowering gives the same functions every time, and functions that compute what the network computes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import onnx
import onnxruntime
import pytest
from helpers.small_networks import small_shapes
from onnx import TensorProto, helper, numpy_helper

from ansor_mlflow.device.targets import resolve_target
from ansor_mlflow.errors import UserInputError
from ansor_mlflow.lowering.lower import lower
from ansor_mlflow.lowering.network import LoweredNetwork
from ansor_mlflow.networks.families.builtin import BUILTIN_NETWORKS
from ansor_mlflow.networks.graph import GraphBuilder
from ansor_mlflow.networks.load import Network, load_network
from ansor_mlflow.settings import LoweringSettings
from ansor_mlflow.tensors import random_inputs

if TYPE_CHECKING:
    from tvm.target import Target

Layout = Literal["NHWC", "NCHW"]


def hashes(lowered: LoweredNetwork) -> list[str]:
    return [task.info.workload_hash for task in lowered.tasks]


def run_untuned(lowered: LoweredNetwork, target: Target, inputs: dict[str, np.ndarray]) -> np.ndarray:
    import tvm

    machine = tvm.relax.VirtualMachine(tvm.compile(lowered.mod, target), tvm.cpu())
    return machine["main"](*map(tvm.runtime.tensor, inputs.values())).numpy()


def run_onnxruntime(network: Network, inputs: dict[str, np.ndarray]) -> np.ndarray:
    session = onnxruntime.InferenceSession(network.model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, inputs)[0]


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


@pytest.mark.nightly
@pytest.mark.parametrize("name", BUILTIN_NETWORKS)
def test_every_builtin_network_can_be_lowered(name: str, host_target: Target) -> None:
    lowered = lower(load_network(name, input_shapes=small_shapes(name)).model, host_target)
    assert any("conv" in task.info.name or "matmul" in task.info.name for task in lowered.tasks)
    assert sum(task.info.weight * task.info.flops for task in lowered.tasks) > 0


def test_layouts_have_different_tasks(small_network: Network, host_target: Target) -> None:
    nhwc, nchw = (
        hashes(lower(small_network.model, host_target, LoweringSettings(layout=layout))) for layout in ("NHWC", "NCHW")
    )
    assert set(nhwc) != set(nchw)


def test_tasks_are_the_functions_of_the_network(small_network: Network, host_target: Target) -> None:
    lowered = lower(small_network.model, host_target)
    assert [task.info.index for task in lowered.tasks] == list(range(len(lowered.tasks)))
    assert len(set(hashes(lowered))) == len(lowered.tasks)
    assert all(task.info.weight == 1 for task in lowered.tasks)
    (convolution,) = (task for task in lowered.tasks if "conv2d" in task.info.name)
    assert "relu" in convolution.info.name  # fused
    assert convolution.info.flops >= 2 * 8 * 16 * 16 * 3 * 3 * 3


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
    output = run_untuned(lower(small_network.model, host_target, LoweringSettings(layout=layout)), host_target, inputs)
    expected = run_onnxruntime(small_network, inputs)
    assert np.ptp(expected) > 0.1
    np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-5)


def test_tasks_do_not_depend_on_the_number_of_threads(small_network: Network) -> None:
    one, four = (hashes(lower(small_network.model, resolve_target("llvm", threads))) for threads in (1, 4))
    assert one == four


def test_an_operator_that_nobody_knows_is_named() -> None:
    node = helper.make_node("Foo", ["x"], ["y"])
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 3]) for name in "xy")
    graph = helper.make_graph([node], "made-up", [x], [y])
    model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
    with pytest.raises(UserInputError, match=r"network=made-up: ONNX Runtime cannot load it \(.*Foo.*\); export it"):
        lower(model, resolve_target("llvm", 1))


def test_a_graph_whose_shapes_do_not_fit_is_a_users_error(tmp_path: Path) -> None:
    """ONNX's shape inference does not look at channels."""
    builder = GraphBuilder(seed=0)
    builder.conv("out", builder.input("data", (1, 3, 8, 8)), (4, 3, 3, 3), padding=1)
    onnx.save(builder.build("conv", {"out": (1, 4, 8, 8)}), tmp_path / "conv.onnx")
    network = load_network(str(tmp_path / "conv.onnx"), input_shapes={"data": [1, 5, 8, 8]})
    with pytest.raises(UserInputError, match=r"network=a/conv\.onnx: .* Conv \(.*channel size") as caught:
        lower(network.model, resolve_target("llvm", 1), called="a/conv.onnx")
    assert "\n" not in str(caught.value)


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
