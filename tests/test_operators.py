"""An operator by its name computes what it says, is tuned like a network, and what is wrong with it is said."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from helpers.commands import ROOT
from helpers.onnx_files import start
from onnx import numpy_helper

from ansor_mlflow.errors import UserInputError
from ansor_mlflow.lowering.lower import lower
from ansor_mlflow.model.library import compile_untuned
from ansor_mlflow.networks.graph import GraphBuilder
from ansor_mlflow.networks.load import Network, load_network
from ansor_mlflow.networks.operators import OPERATORS, is_operator
from ansor_mlflow.tensors import random_inputs

if TYPE_CHECKING:
    from tvm.target import Target


@dataclass(frozen=True)
class Convolution:
    """With one number for each axis of the image."""

    out_shape: tuple[int, ...]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int = 1
    relu: bool = False

    def __call__(self, data: np.ndarray, weight: np.ndarray, *bias: np.ndarray) -> np.ndarray:
        batch, channels = data.shape[:2]
        image = self.out_shape[2:]
        padded = np.pad(data, [(0, 0), (0, 0), *((size, size) for size in self.padding)])
        grouped = weight.reshape(self.groups, -1, *weight.shape[1:])
        output = np.zeros((batch, self.groups, weight.shape[0] // self.groups, *image))
        for place in np.ndindex(*weight.shape[2:]):
            along = zip(place, self.dilation, self.stride, image, strict=True)
            window = tuple(slice(at * step, at * step + (n - 1) * stride + 1, stride) for at, step, stride, n in along)
            seen = padded[(..., *window)].reshape(batch, self.groups, channels // self.groups, *image)
            output += np.einsum("bgi...,goi->bgo...", seen, grouped[(..., *place)])
        output = output.reshape(self.out_shape) + sum(values.reshape(-1, *[1] * len(image)) for values in bias)
        return np.maximum(output, 0) if self.relu else output


def dense(data: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    return data @ weight.T if bias is None else np.maximum(data @ weight.T + bias, 0)


def softmax(data: np.ndarray) -> np.ndarray:
    powers = np.exp(data)
    return powers / powers.sum(axis=1, keepdims=True)


@dataclass(frozen=True)
class Case:
    """An operator, what it computes from its inputs and weights, and in how many operations."""

    spec: str
    compute: Any
    flops: int
    inputs: dict[str, tuple[int, ...]] = field(default_factory=dict)


CASES = [
    Case(
        "conv2d:1,7,7,8,6,3,3,1,1",
        Convolution((1, 8, 7, 7), stride=(1, 1), padding=(1, 1), dilation=(1, 1)),
        flops=2 * 7 * 7 * 8 * 6 * 3 * 3,
        inputs={"data": (1, 6, 7, 7)},
    ),
    Case(
        "conv2d:2,9,8,6,4,3,2,2x1,1x0,dilation=1x2,groups=2,bias,relu",
        Convolution((2, 6, 5, 6), stride=(2, 1), padding=(1, 0), dilation=(1, 2), groups=2, relu=True),
        flops=2 * 2 * 5 * 6 * 6 * 4 // 2 * 3 * 2,
        inputs={"data": (2, 4, 9, 8)},
    ),
    Case(
        "depthwise_conv2d:1,8,10,5,3,3,2,1,relu",
        Convolution((1, 5, 4, 5), stride=(2, 2), padding=(1, 1), dilation=(1, 1), groups=5, relu=True),
        flops=2 * 4 * 5 * 5 * 3 * 3,
        inputs={"data": (1, 5, 8, 10)},
    ),
    Case(
        "conv3d:1,4,5,6,4,3,2,3,3,1,1x0x1",
        Convolution((1, 4, 5, 3, 6), stride=(1, 1, 1), padding=(1, 0, 1), dilation=(1, 1, 1)),
        flops=2 * 5 * 3 * 6 * 4 * 3 * 2 * 3 * 3,
        inputs={"data": (1, 3, 4, 5, 6)},
    ),
    Case(
        "conv3d:1,5,4,4,6,4,2,3,3,2,1,bias,relu,groups=2,dilation=2x1x1",
        Convolution((1, 6, 3, 2, 2), stride=(2, 2, 2), padding=(1, 1, 1), dilation=(2, 1, 1), groups=2, relu=True),
        flops=2 * 3 * 2 * 2 * 6 * 4 // 2 * 2 * 3 * 3,
        inputs={"data": (1, 4, 5, 4, 4)},
    ),
    Case("dense:3,5,7", dense, flops=2 * 3 * 5 * 7, inputs={"data": (3, 7)}),
    Case("dense:3,5,7,bias,relu", dense, flops=2 * 3 * 5 * 7, inputs={"data": (3, 7)}),
    Case("batch_matmul:2,3,5,7", np.matmul, flops=2 * 2 * 3 * 5 * 7, inputs={"a": (2, 3, 7), "b": (2, 7, 5)}),
    Case("softmax:4,9", softmax, flops=4 * 4 * 9, inputs={"data": (4, 9)}),
]
"""Softmax: a maximum, a difference, an exponential, a sum and a quotient; the last has no term in the count."""


def each_case() -> Any:
    return pytest.mark.parametrize("case", CASES, ids=[case.spec for case in CASES])


def expected(case: Case, network: Network, inputs: dict[str, np.ndarray]) -> np.ndarray:
    weights = [numpy_helper.to_array(weight) for weight in network.model.graph.initializer]
    return case.compute(*(values.astype(np.float64) for values in (*inputs.values(), *weights)))


def assert_same(output: np.ndarray, wanted: np.ndarray) -> None:
    assert output.shape == wanted.shape
    assert np.ptp(wanted) > 0.1
    np.testing.assert_allclose(output, wanted, rtol=0, atol=1e-5 * abs(wanted).max())


def test_every_operator_has_a_case_and_is_documented() -> None:
    assert {case.spec.partition(":")[0] for case in CASES} == set(OPERATORS)
    guide = (ROOT / "docs" / "operators.md").read_text()
    assert [form for form in OPERATORS.values() if f"| `{form}` |" not in guide] == []


@each_case()
def test_the_graph_computes_what_numpy_does(case: Case) -> None:
    network = load_network(case.spec)
    inputs = random_inputs(network.inputs, seed=1)
    assert network.name == case.spec
    assert network.path is None
    assert {spec.name: spec.shape for spec in network.inputs} == case.inputs
    assert {spec.dtype for spec in (*network.inputs, *network.outputs)} == {"float32"}
    (output,) = start(network).run(None, inputs)
    assert network.outputs[0].shape == output.shape
    assert_same(output, expected(case, network, inputs))


@each_case()
def test_the_tasks_compute_it_in_as_many_operations(case: Case, host_target: Target, tmp_path: Path) -> None:
    """Up to padding, which counts nothing, and two operations for each element of the output: bias and relu."""
    import tvm

    network = load_network(case.spec)
    lowered = lower(network.model, host_target)
    flops = sum(task.info.flops * task.info.weight for task in lowered.tasks)
    assert case.flops <= flops <= case.flops + 2 * np.prod(network.outputs[0].shape)

    compile_untuned(lowered, host_target, tmp_path / "model.so")
    machine = tvm.relax.VirtualMachine(tvm.runtime.load_module(str(tmp_path / "model.so")), tvm.cpu())
    inputs = random_inputs(network.inputs, seed=2)
    output = machine["main"](*map(tvm.runtime.tensor, inputs.values())).numpy()
    assert_same(output, expected(case, network, inputs))


def test_the_task_is_the_same_as_in_a_network(host_target: Target) -> None:
    """So that records of an operator serve the networks that have it."""
    builder = GraphBuilder(seed=0)
    data = builder.input("data", (1, 3, 10, 10))
    data = builder.relu("first.relu", builder.conv("first", data, (8, 3, 3, 3)))
    data = builder.relu("second.relu", builder.conv("second", data, (8, 8, 3, 3), padding=1, bias=True))
    network = builder.build("network", {data: (1, 8, 8, 8)})
    operator = load_network("conv2d:1,8,8,8,8,3,3,1,1,bias,relu").model
    tasks, all_tasks = (lower(model, host_target).tasks for model in (operator, network))
    (convolution,) = (task.info for task in tasks if "conv2d" in task.info.name)
    assert convolution.workload_hash in {task.info.workload_hash for task in all_tasks}


def test_an_operator_is_not_hidden_by_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "softmax:4,9").write_text("notes")
    monkeypatch.chdir(tmp_path)
    assert load_network("softmax:4,9").outputs[0].shape == (4, 9)


@pytest.mark.parametrize(
    "name", ["models:/resnet/1", "runs:/1/model", "net:1.onnx", "folder/conv2d:1,7", "./conv2d:1", "resnet-17", ""]
)
def test_other_names_are_no_operators(name: str) -> None:
    assert not is_operator(name)


CONV2D = "conv2d:1,7,7,8,6,3,3,1,1"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("conv2:1,7,7", r"there is no operator 'conv2'; perhaps you meant conv2d, conv3d"),
        ("pool:2,2", r"there is no operator 'pool'; known are conv2d, .*, softmax"),
        ("conv2d", rf"conv2d takes 9 numbers, 0 were given; write {re.escape(OPERATORS['conv2d'])}"),
        ("dense:3,5", r"dense takes 3 numbers, 2 were given; write dense:M,N,K\[,bias\]\[,relu\]"),
        ("dense:3,,7", r"N='' must be a whole number from 1"),
        ("dense:3,٥,7", r"N='٥' must be"),
        ("dense:0,5,7", r"M='0' must be a whole number from 1 to 999999999"),
        ("conv2d:1,7,7,8,6,3,3,0,1", r"stride='0' must be a whole number from 1"),
        ("conv2d:1,7,7,8,6,3,3,1,-1", r"padding='-1' must be a whole number from 0"),
        ("conv2d:1,7,7,8,6,3,3,1x1x1,1", r"stride=1x1x1 has 3 numbers; give one, or one for each of H, W, such as 1x1"),
        (f"{CONV2D},groups=two", r"groups='two' must be"),
        (f"{CONV2D},groups=4", r"CI=6 and CO=8 must be multiples of groups=4"),
        (f"{CONV2D},gelu", r"unknown option 'gelu'; conv2d takes dilation=, groups=, bias, relu"),
        (f"{CONV2D},relu,relu", r"option relu was given twice"),
        ("depthwise_conv2d:1,8,8,4,3,3,1,1,groups=2", r"unknown option 'groups=2'; depthwise_conv2d takes dilation="),
        ("conv2d:1,7,5,8,6,3,6,1,0", r"the kernel spans 6 along W, but the padded image only 5, so the output"),
        ("conv2d:1,4,9,8,6,3,3,1,1,dilation=3", r"the kernel spans 7 along H, but the padded image only 6, .* padding"),
        ("dense:1,100000,100000", r"its weights \[100000, 100000\] take more than 2 GiB"),
    ],
)
def test_what_is_wrong_with_an_operator_is_said(spec: str, message: str) -> None:
    with pytest.raises(UserInputError, match=f"network='{re.escape(spec)}': {message}") as caught:
        load_network(spec)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("arguments", [{"batch_size": 2}, {"input_shapes": {"data": [4, 9]}}])
def test_sizes_are_given_in_one_place(arguments: dict[str, Any]) -> None:
    message = r"network='softmax:4,9': it has its sizes in its name; .* leave out batch_size and input_shapes"
    with pytest.raises(UserInputError, match=message):
        load_network("softmax:4,9", **arguments)
