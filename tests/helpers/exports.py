"""Small networks as people export them: with an operator of a varying size, a recurrent layer, dynamic axes, 8 bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

NUM_CLASSES = 4


def tensor(name: str, shape: Any, dtype: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    """The type of a tensor; a dimension may be a name."""
    return helper.make_tensor_value_info(name, dtype, shape)


def make_model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    constants: Mapping[str, np.ndarray],
    opset: int = 17,
) -> onnx.ModelProto:
    """A model with a graph of a name that PyTorch gives all of them; 64-bit floats become those of 32 bits."""
    weights = [
        numpy_helper.from_array(value.astype(np.float32) if value.dtype == np.float64 else value, name)
        for name, value in constants.items()
    ]
    graph = helper.make_graph(list(nodes), "main_graph", inputs, outputs, weights)
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", opset)])


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """float32 values of a layer, N(0, 2 / fan_in)."""
    return (rng.normal(size=shape) * np.sqrt(2 / np.prod(shape[1:]))).astype(np.float32)


def branching() -> onnx.ModelProto:
    """A convolution, a branch that its mean decides, and another convolution. An input is not used before the end."""
    image = (1, 8, 64, 64)
    rng = np.random.default_rng(0)
    branches = {
        key: helper.make_graph([helper.make_node(op, ["first", "two"], [key])], key, [], [tensor(key, image)])
        for key, op in (("then_branch", "Mul"), ("else_branch", "Sub"))
    }
    nodes = [
        helper.make_node("Conv", ["x", "w0"], ["first"], pads=[1, 1, 1, 1]),
        helper.make_node("ReduceMean", ["first"], ["mean"], keepdims=0),
        helper.make_node("Greater", ["mean", "zero"], ["is_positive"]),
        helper.make_node("If", ["is_positive"], ["branched"], **branches),
        helper.make_node("Conv", ["branched", "w1"], ["second"], pads=[1, 1, 1, 1]),
        helper.make_node("Add", ["second", "late"], ["y"]),
    ]
    constants = {
        "w0": rng.normal(size=(8, 8, 3, 3)).astype(np.float32),
        "w1": rng.normal(size=(8, 8, 3, 3)).astype(np.float32),
        "zero": np.array(0, np.float32),
        "two": np.array(2, np.float32),
    }
    return make_model(nodes, [tensor("x", image), tensor("late", (1, 1, 64, 64))], [tensor("y", image)], constants)


def detector(image: tuple[Any, ...] = (1, 8, 64, 64)) -> onnx.ModelProto:
    """Boxes (1, 256, 4) and scores (1, 2, 256) from a convolution, of which ONNX's NonMaxSuppression chooses some."""
    rng = np.random.default_rng(1)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["maps"], pads=[1, 1, 1, 1], strides=[4, 4]),
        helper.make_node("Reshape", ["maps", "flat"], ["rows"]),
        helper.make_node("Split", ["rows", "sizes"], ["coordinates", "scores"], axis=1),
        helper.make_node("Transpose", ["coordinates"], ["boxes"], perm=[0, 2, 1]),
        helper.make_node("NonMaxSuppression", ["boxes", "scores", "most", "overlap", "least"], ["chosen"]),
    ]
    constants = {
        "w": normal(rng, 6, 8, 3, 3),
        "flat": np.array([1, 6, 256]),
        "sizes": np.array([4, 2]),
        "most": np.array([5]),
        "overlap": np.array([0.3], np.float32),
        "least": np.array([0.1], np.float32),
    }
    outputs = [tensor("chosen", ["n", 3], TensorProto.INT64), tensor("scores", (1, 2, 256))]
    return make_model(nodes, [tensor("x", image)], outputs, constants)


def text_recogniser() -> onnx.ModelProto:
    """A line of text, (batch, 1, 16, 64) → logits (batch, 16, classes): convolutions, a bidirectional LSTM over the
    columns, and shape arithmetic between them, as PyTorch exports them with a dynamic batch.
    """
    rng = np.random.default_rng(2)
    hidden = 8
    nodes = [
        helper.make_node("Conv", ["line", "w0", "b0"], ["c0"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c0"], ["r0"]),
        helper.make_node("MaxPool", ["r0"], ["p0"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Conv", ["p0", "w1", "b1"], ["c1"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c1"], ["r1"]),
        helper.make_node("MaxPool", ["r1"], ["p1"], kernel_shape=[8, 2], strides=[8, 2]),
        helper.make_node("Shape", ["p1"], ["shape"]),
        helper.make_node("Slice", ["shape", "zero", "two"], ["batch_and_channels"]),
        helper.make_node("Concat", ["batch_and_channels", "rest"], ["without_rows"], axis=0),
        helper.make_node("Reshape", ["p1", "without_rows"], ["columns"]),
        helper.make_node("Transpose", ["columns"], ["sequence"], perm=[2, 0, 1]),
        helper.make_node("LSTM", ["sequence", "w", "r", "b"], ["both"], hidden_size=hidden, direction="bidirectional"),
        helper.make_node("Transpose", ["both"], ["by_batch"], perm=[2, 0, 1, 3]),
        helper.make_node("Reshape", ["by_batch", "joined"], ["features"]),
        helper.make_node("MatMul", ["features", "w2"], ["logits"]),
    ]
    constants = {
        "w0": normal(rng, 8, 1, 3, 3),
        "b0": normal(rng, 8),
        "w1": normal(rng, 16, 8, 3, 3),
        "b1": normal(rng, 16),
        "zero": np.array([0]),
        "two": np.array([2]),
        "rest": np.array([-1]),
        "w": normal(rng, 2, 4 * hidden, 16),
        "r": normal(rng, 2, 4 * hidden, hidden),
        "b": normal(rng, 2, 8 * hidden),
        "joined": np.array([0, 16, 2 * hidden]),
        "w2": normal(rng, 2 * hidden, NUM_CLASSES),
    }
    logits = tensor("logits", ["batch", "columns", NUM_CLASSES])
    return make_model(nodes, [tensor("line", ["batch", 1, 16, 64])], [logits], constants)
