"""Concatenations cost nothing where each part may be written to its place in the whole."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
import tvm
from helpers.exports import make_model, tensor
from helpers.lanes import every_second
from helpers.one_operator import run_onnxruntime
from onnx import NodeProto, helper
from tvm.target import Target

from ansor_mlflow.codegen.concatenations import count_written_in_place
from ansor_mlflow.lowering.lower import lower
from ansor_mlflow.model import compile_tuned
from ansor_mlflow.settings import LoweringSettings

CHANNELS, SIZE = 16, 9
UNPADDED = LoweringSettings(pad_channels="off")


def conv(result: str, channels: int, kernel: int = 1, data: str = "x") -> NodeProto:
    """A convolution; the name of its weights says which they are."""
    return helper.make_node("Conv", [data, f"{result}/{channels}/{kernel}"], [result], pads=[kernel // 2] * 4)


def concat(parts: Sequence[str], result: str = "y", axis: int = 1) -> NodeProto:
    return helper.make_node("Concat", list(parts), [result], axis=axis)


PARTS = [conv("a", 16), conv("b", 7), conv("c", 32)]
LAST = conv("z", 24, data="y")
IN_PLACE: dict[str, list[NodeProto]] = {
    "channels": [*PARTS, concat("abc"), LAST],
    "in another order than they are computed": [*PARTS, concat("cab"), LAST],
    "rows": [conv("a", 8), conv("b", 8, 3), concat("ab", axis=2), LAST],
    "images": [conv("a", 8), conv("b", 8, 3), concat("ab", axis=0), LAST],
    "an activation and a pooling": [
        conv("s", 16, 3),
        helper.make_node("Relu", ["s"], ["r"]),
        conv("t", 8, 3, "r"),
        helper.make_node("Relu", ["t"], ["a"]),
        helper.make_node("MaxPool", ["r"], ["b"], kernel_shape=[3, 3], pads=[1] * 4),
        concat("ab"),
        LAST,
    ],
}
RESULT = "result of the network"
"""With the channels last, it is also transposed."""
WITH_COPIES: dict[str, list[NodeProto]] = {
    "a part has another use": [*PARTS, concat("abc"), LAST, conv("w", 8, data="a")],
    "a part comes twice": [conv("a", 16), concat("aa"), LAST],
    "a part is the network's input": [conv("a", 16), concat("ax"), LAST],
    "a part is a concatenation": [*PARTS, concat("ab", "d"), concat("dc"), LAST],
    "a part is a result, too": [conv("w", 16), conv("a", 16), concat("wa"), LAST],
}


def model(nodes: Sequence[NodeProto]) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    channels, weights = {"x": CHANNELS}, {}
    for node in nodes:
        of_inputs = [channels[name] for name in node.input if name in channels]
        if node.op_type == "Conv":
            outputs, kernel = map(int, node.input[1].split("/")[1:])
            shape = (outputs, *of_inputs, kernel, kernel)
            weights[node.input[1]] = rng.normal(size=shape) / 8
        else:
            is_sum = any(each.name == "axis" and each.i == 1 for each in node.attribute)
            outputs = sum(of_inputs) if is_sum else of_inputs[0]
        channels[node.output[0]] = outputs
    outputs = [tensor(name, None) for name in "wz" if name in channels]
    return make_model(nodes, [tensor("x", (2, CHANNELS, SIZE, SIZE))], outputs, weights, opset=13)


def kernels_and_outputs(
    given: onnx.ModelProto, target: Target, settings: LoweringSettings, library: Path, data: np.ndarray
) -> tuple[list[str], list[np.ndarray]]:
    """The names of the functions that a compiled network calls, and what it computes."""
    compile_tuned(lower(given, target, settings), target, None, library)
    machine = tvm.relax.VirtualMachine(tvm.runtime.load_module(str(library)), tvm.cpu())
    called = []
    machine.set_instrument(lambda _function, name, is_before, *_: called.append(name) if is_before else None)
    found = machine["main"](tvm.runtime.tensor(data))
    outputs = [found] if hasattr(found, "numpy") else list(found)
    return [name for name in called if not name.startswith("vm.")], [output.numpy() for output in outputs]


@pytest.mark.parametrize(
    ("case", "layout"),
    [(case, "NHWC") for case in IN_PLACE] + every_second((case, "NCHW") for case in [RESULT, *IN_PLACE]),
)
def test_parts_are_written_to_their_places(host_target: Target, tmp_path: Path, case: str, layout: str) -> None:
    given = model(IN_PLACE.get(case, [*PARTS, concat("abc", "z")]))
    settings = LoweringSettings(layout=layout, pad_channels="off")
    data = np.random.default_rng(1).normal(size=(2, CHANNELS, SIZE, SIZE)).astype(np.float32)
    called, outputs = kernels_and_outputs(given, host_target, settings, tmp_path / "model.so", data)
    assert not any("concatenate" in name for name in called)
    assert sum("_into" in name for name in called) >= 2
    np.testing.assert_allclose(outputs[0], run_onnxruntime(given, {"x": data})[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", WITH_COPIES)
def test_what_is_needed_elsewhere_is_copied(host_target: Target, tmp_path: Path, case: str) -> None:
    given = model(WITH_COPIES[case])
    data = np.random.default_rng(1).normal(size=(2, CHANNELS, SIZE, SIZE)).astype(np.float32)
    called, outputs = kernels_and_outputs(given, host_target, UNPADDED, tmp_path / "model.so", data)
    assert sum("concatenate" in name for name in called) == 1
    assert not any("_into" in name for name in called)
    for output, expected in zip(outputs, run_onnxruntime(given, {"x": data}), strict=True):
        np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-4)


def test_no_trial_is_spent_on_what_is_gone(host_target: Target) -> None:
    """The same function may be called elsewhere, where it copies."""
    once = lower(model(IN_PLACE["channels"]), host_target, UNPADDED)
    assert sum(count_written_in_place(once.mod).values()) == 1
    assert not any("concatenate" in task.info.name for task in once.tasks)
    assert [task.info.index for task in once.tasks] == list(range(len(once.tasks)))
    twice = [conv("a", 8), conv("b", 8), concat("ab"), conv("c", 8, data="y"), conv("d", 8, data="c")]
    twice += [concat("cd", "e"), conv("z", 8, data="e")]
    (task,) = (t for t in lower(model(twice), host_target, UNPADDED).tasks if "concatenate" in t.info.name)
    assert task.info.weight == 1
