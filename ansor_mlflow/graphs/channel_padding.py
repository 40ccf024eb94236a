"""Pads layers whose number of channels cannot be tiled well, and products with as many columns.

Vectors are powers of two that divide the channels. 386 channels are 2 × 193, so that a vector has 2 of them, where 384
are 24 vectors of 16. A few channels more, filled with zeros, cost less. The scores of an attention have a column for
each token, which are often a square and one more, such as 197.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from ansor_mlflow.graphs.editor import GraphEditor, Unchanged, rewrite
from ansor_mlflow.graphs.walk import attributes_of

_MIN_GAIN = 2.0
"""Predicted speedup above which a layer is padded: the prediction is optimistic."""
_MAX_GROWTH = 1.25
"""Largest number of padded channels over true channels."""
_MIN_ROWS, _MIN_TERMS = 8, 16
"""Rows and terms of a product for which the copies of its second factor, and of itself, cost little."""

_LAYERS = {"Conv", "Gemm", "MatMul"}
_POOLS = {"AveragePool", "GlobalAveragePool", "GlobalMaxPool", "MaxPool"}
_ELEMENTWISE = {
    *("Add", "Clip", "Elu", "HardSigmoid", "HardSwish", "Identity", "LeakyRelu", "Max", "Min", "Mul", "Relu"),
    *("Sigmoid", "Sub", "Tanh"),
}
"""Operators that make a finite number of zeros, so that what they do to channels that nobody needs is harmless."""


@dataclass(frozen=True)
class PaddedLayer:
    """A convolution or dense layer that would be faster with more output channels, of a group where it has several."""

    name: str
    channels: int
    padded_channels: int


def layers_to_pad(model: onnx.ModelProto, lanes: int) -> list[PaddedLayer]:
    """The layers that `pad_output_channels` would pad for vectors of so many elements, in the order of the graph."""
    constants = {initializer.name: initializer for initializer in model.graph.initializer}
    graph = GraphEditor(model)
    sizes = []
    for node in model.graph.node:
        layer = _layer(node, constants)
        others = _columns(node, graph) or _channels_of_group(node, constants)
        sizes.append((node, others if layer is None else layer.channels))
    return [
        PaddedLayer(node.name or node.output[0], size, padded)
        for node, size in sizes
        if size and (padded := best_padding(size, lanes)) != size
    ]


def best_padding(channels: int, lanes: int) -> int:
    """The number of channels to compute instead of `channels`: the same where padding promises too little."""

    def efficiency(size: int) -> float:
        """Useful share of the vector lanes; vectors of sketches are powers of two, as LLVM does badly with others."""
        return min(size & -size, lanes) / lanes * channels / size

    candidates = range(channels, int(channels * _MAX_GROWTH) + 1)
    best = max(candidates, key=lambda size: (efficiency(size), -size))
    return best if efficiency(best) / efficiency(channels) > _MIN_GAIN else channels


def pad_output_channels(model: onnx.ModelProto, padding: Callable[[int], int]) -> onnx.ModelProto:
    """A copy of the model with more output channels in its convolutions, dense layers and products of tensors.

    What follows a padded layer and treats channels alike (activations, pooling, sums) works on the padded tensor, and a
    next layer takes it as it is, with zeros among its weights. Everything else gets the true channels by a `Slice`.
    Of a grouped convolution each group gets more channels, which nothing else takes. Layers whose weights are no
    initializers are left alone. `padding` takes a number of output channels, and returns how many to compute.
    """
    padder = _Padder({initializer.name: initializer for initializer in model.graph.initializer}, padding)
    return rewrite(model, {("", op_type): padder.pad for op_type in _LAYERS | _POOLS | _ELEMENTWISE})


@dataclass(frozen=True)
class _WeightedLayer:
    """The constants of a convolution or dense layer, and where its channels are."""

    weight: onnx.TensorProto
    bias: onnx.TensorProto | None
    out_axis: int
    """Axis of the weight's output channels; `in_axis` is that of the input channels."""
    in_axis: int
    channel_axis: int
    """Axis of the channels in the data, before and after the layer, from the end: -1 is the last."""

    @property
    def channels(self) -> int:
        return int(self.weight.dims[self.out_axis])


@dataclass(frozen=True)
class _Padding:
    axis: int
    """Axis of the channels, from the end: -1 is the last."""
    channels: int
    padded_channels: int


def _layer(node: onnx.NodeProto, constants: dict[str, onnx.TensorProto]) -> _WeightedLayer | None:
    """The layer that a node is; None where it is none that can be padded."""
    if node.op_type not in _LAYERS or not {name for name in node.input[1:] if name} <= constants.keys():
        return None
    weight = constants[node.input[1]]
    bias = constants[node.input[2]] if len(node.input) > 2 and node.input[2] else None
    if node.op_type == "Conv" and attributes_of(node).get("group", 1) == 1:
        layer = _WeightedLayer(weight, bias, out_axis=0, in_axis=1, channel_axis=1 - len(weight.dims))
    elif node.op_type == "Gemm" and not attributes_of(node).get("transA", 0):
        out_axis = 0 if attributes_of(node).get("transB", 0) else 1
        layer = _WeightedLayer(weight, bias, out_axis=out_axis, in_axis=1 - out_axis, channel_axis=-1)
    elif node.op_type == "MatMul" and len(weight.dims) == 2:
        layer = _WeightedLayer(weight, bias, out_axis=1, in_axis=0, channel_axis=-1)
    else:
        return None
    return layer if bias is None or list(bias.dims) == [layer.channels] else None


def _channels_of_group(node: onnx.NodeProto, constants: dict[str, onnx.TensorProto]) -> int:
    """Output channels of each group of a convolution; 0 where it has none, or they have one alone, or no constants."""
    groups = int(attributes_of(node).get("group", 1)) if node.op_type == "Conv" else 1
    if groups == 1 or not {name for name in node.input[1:] if name} <= constants.keys():
        return 0
    channels = int(constants[node.input[1]].dims[0]) // groups
    return channels if channels > 1 else 0


def _columns(node: onnx.NodeProto, graph: GraphEditor) -> int:
    """Columns of a product whose second factor is computed; 0 where it is none that can be padded."""
    if node.op_type != "MatMul" or graph.is_constant(node.input[1]):
        return 0
    first, second = map(graph.find_shape, node.input)
    if first is None or second is None or min(len(first), len(second)) < 2:
        return 0
    return second[-1] if first[-2] >= _MIN_ROWS and first[-1] >= _MIN_TERMS else 0


class _Padder:
    """Rewrites nodes one after the other, and keeps in mind which tensors are there padded."""

    def __init__(self, constants: dict[str, onnx.TensorProto], padding: Callable[[int], int]) -> None:
        self._constants, self._padding = constants, padding
        self._padded: dict[str, _Padding] = {}
        """Padding of each padded tensor, by the name of the tensor with the true channels."""

    def pad(self, node: onnx.NodeProto, graph: GraphEditor) -> None:
        """Puts in a node on padded tensors; a `Slice` after it gives the tensor of the old name."""
        name, attributes = node.output[0], attributes_of(node)
        if channels := _channels_of_group(node, self._constants):
            self._pad_groups(node, channels, graph)
            return
        if columns := _columns(node, graph):
            padding = _Padding(-1, columns, self._padding(columns))
            inputs = [node.input[0], self._pad_columns(node.input[1], padding, graph)]
        elif (layer := _layer(node, self._constants)) is None:
            padding = self._common_padding(node)
            inputs = [self._padded_input(each, padding, graph) for each in node.input]
        else:
            padding = _Padding(layer.channel_axis, layer.channels, self._padding(layer.channels))
            inputs = self._inputs_of_layer(node, layer, padding, graph)
        if padding.padded_channels == padding.channels:
            graph.emit(node.op_type, *inputs, output=name, **attributes)
            return
        self._padded[name] = padding
        whole = graph.emit(node.op_type, *inputs, output=f"{name}.padded", **attributes)
        graph.slice(whole, [0], [padding.channels], [padding.axis], output=name)

    def _pad_groups(self, node: onnx.NodeProto, channels: int, graph: GraphEditor) -> None:
        """Puts in a convolution with more channels in each group, of which only the true ones are kept."""
        padded, shape, groups = self._padding(channels), graph.shape(node.output[0]), attributes_of(node)["group"]
        if not channels < padded <= _MAX_GROWTH * channels:
            raise Unchanged
        constants = []
        for values in map(graph.value, filter(None, node.input[1:])):
            grown = _grown(values.reshape(groups, channels, *values.shape[1:]), 1, padded)
            constants.append(graph.constant(grown.reshape(-1, *values.shape[1:])))
        whole = graph.emit("Conv", node.input[0], *constants, **attributes_of(node))
        apart = graph.reshape(whole, (shape[0], groups, padded, *shape[2:]))
        graph.reshape(graph.slice(apart, [0], [channels], [2]), shape, output=node.output[0])

    def _inputs_of_layer(
        self, node: onnx.NodeProto, layer: _WeightedLayer, after: _Padding, graph: GraphEditor
    ) -> list[str]:
        inputs, weight = list(node.input), graph.value(node.input[1])
        before = self._padded.get(node.input[0])
        if before is not None and before.axis == layer.channel_axis:
            inputs[0] = f"{node.input[0]}.padded"
            weight = _grown(weight, layer.in_axis, before.padded_channels)
        weight = _grown(weight, layer.out_axis, after.padded_channels)
        if list(weight.shape) == list(layer.weight.dims):
            raise Unchanged
        inputs[1] = graph.constant(weight)
        if layer.bias is not None:
            inputs[2] = graph.constant(_grown(graph.value(node.input[2]), 0, after.padded_channels))
        return inputs

    def _pad_columns(self, name: str, padding: _Padding, graph: GraphEditor) -> str:
        """A tensor with zeros at the end of its last axis."""
        if padding.padded_channels == padding.channels:
            raise Unchanged
        before = [0] * len(graph.shape(name))
        after = [*before[1:], padding.padded_channels - padding.channels]
        return graph.emit("Pad", name, graph.constant(before + after, np.int64))

    def _common_padding(self, node: onnx.NodeProto) -> _Padding:
        """How all inputs of a node are padded, if it can work on them so."""
        if len(node.output) != 1 or node.op_type not in _POOLS | _ELEMENTWISE:
            raise Unchanged
        paddings = {self._padded.get(name) for name in node.input if name and name not in self._constants}
        padding = paddings.pop() if len(paddings) == 1 else None
        if padding is None or (node.op_type in _POOLS and padding.axis == -1):
            raise Unchanged
        constants = [self._constants[name].dims for name in node.input if name in self._constants]
        if any(dims[padding.axis] not in (1, padding.channels) for dims in constants if len(dims) >= -padding.axis):
            raise Unchanged  # it repeats a single channel
        return padding

    def _padded_input(self, name: str, padding: _Padding, graph: GraphEditor) -> str:
        constant = self._constants.get(name)
        if constant is None:
            return f"{name}.padded" if name else ""
        if len(constant.dims) < -padding.axis or constant.dims[padding.axis] == 1:
            return name  # it is the same for all channels
        return graph.constant(_grown(graph.value(name), len(constant.dims) + padding.axis, padding.padded_channels))


def _grown(values: np.ndarray[Any, Any], axis: int, size: int) -> np.ndarray[Any, Any]:
    """An array with zeros at the end of an axis."""
    return np.pad(values, [(0, size - dim if index == axis else 0) for index, dim in enumerate(values.shape)])
