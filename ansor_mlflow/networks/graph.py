"""What the families of built-in networks are written with: a builder of ONNX graphs with seeded weights, what a family
declares about each of its members, and what image classifiers have in common.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ansor_mlflow.errors import UserInputError
from ansor_mlflow.networks.shapes import Shape

OPSET = 17
IR_VERSION = 8
NUM_CLASSES = 1000
"""Classes of ImageNet."""

PerAxis = int | tuple[int, ...]
"""One number for all spatial axes, or one for each of them."""


class GraphBuilder:
    """Collects nodes and weights of one network.

    Every method takes and returns tensor names and appends one node. Weights are drawn from
    `numpy.random.default_rng(seed)` in the order of the calls, so that one seed always gives the same network.
    """

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[onnx.TensorProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []

    def input(self, name: str, shape: tuple[int, ...], dtype: str = "float32") -> str:
        """Declares an input of the network; `dtype` is NumPy's name."""
        elem_type = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        self._inputs.append(helper.make_tensor_value_info(name, elem_type, shape))
        return name

    def constant(self, name: str, values: np.ndarray) -> str:
        """Adds an initializer with the dtype of `values`."""
        self._weights.append(numpy_helper.from_array(values, name))
        return name

    def weight(self, name: str, values: np.ndarray) -> str:
        """Adds a float32 initializer."""
        return self.constant(name, values.astype(np.float32, copy=False))

    def he_normal(self, name: str, shape: tuple[int, ...]) -> str:
        """Adds a weight of N(0, 2 / fan_in), fan_in being the product of shape[1:] (He et al., 2015)."""
        fan_in = math.prod(shape[1:])
        return self.weight(name, self._rng.standard_normal(shape, np.float32) * math.sqrt(2.0 / fan_in))

    def node(self, op_type: str, name: str, *inputs: str, **attributes: Any) -> str:
        """Appends a node with one output, which is named after the node."""
        self._nodes.append(helper.make_node(op_type, list(inputs), [name], name=name, **attributes))
        return name

    def conv(
        self,
        name: str,
        data: str,
        shape: tuple[int, ...],
        *,
        stride: PerAxis = 1,
        padding: PerAxis = 0,
        dilation: PerAxis = 1,
        groups: int = 1,
        bias: bool = False,
    ) -> str:
        """Appends a convolution (N, in, *image) -> (N, out, *image) with weights (out, in // groups, *kernel)."""
        rank = len(shape) - 2
        parameters = [self.he_normal(f"{name}.weight", shape)]
        if bias:
            parameters.append(self._small_bias(name, shape[0]))
        return self.node(
            "Conv",
            name,
            data,
            *parameters,
            kernel_shape=list(shape[2:]),
            strides=_per_axis(stride, rank),
            pads=_per_axis(padding, rank) * 2,
            dilations=_per_axis(dilation, rank),
            group=groups,
        )

    def pool(
        self,
        op_type: Literal["MaxPool", "AveragePool"],
        name: str,
        data: str,
        kernel: tuple[int, ...],
        *,
        stride: PerAxis = 1,
        padding: PerAxis = 0,
        **attributes: Any,
    ) -> str:
        """Appends a pooling; `kernel` has one size for each spatial axis."""
        rank = len(kernel)
        return self.node(
            op_type,
            name,
            data,
            kernel_shape=list(kernel),
            strides=_per_axis(stride, rank),
            pads=_per_axis(padding, rank) * 2,
            **attributes,
        )

    def batch_norm(self, name: str, data: str, channels: int, *, gain: float = 0.75) -> str:
        """Appends a BatchNormalization (inference form) whose statistics look like those of a trained network.

        The scales have the mean `gain`: with 1, activations keep their magnitude through many layers in a row.
        """
        parameters = {
            "scale": self._rng.uniform(gain - 0.25, gain + 0.25, channels),
            "bias": self._rng.uniform(-0.1, 0.1, channels),
            "mean": self._rng.uniform(-0.1, 0.1, channels),
            "var": self._rng.uniform(0.8, 1.2, channels),
        }
        names = [self.weight(f"{name}.{key}", values) for key, values in parameters.items()]
        return self.node("BatchNormalization", name, data, *names, epsilon=1e-5)

    def relu(self, name: str, data: str) -> str:
        return self.node("Relu", name, data)

    def dense(self, name: str, data: str, *, units: int, in_units: int) -> str:
        """Appends a fully connected layer with bias: (N, in_units) -> (N, units)."""
        weight = self.he_normal(f"{name}.weight", (units, in_units))
        return self.node("Gemm", name, data, weight, self._small_bias(name, units), transB=1)

    def _small_bias(self, name: str, channels: int) -> str:
        return self.weight(f"{name}.bias", self._rng.uniform(-0.1, 0.1, channels))

    def build(self, name: str, outputs: dict[str, tuple[int, ...]]) -> onnx.ModelProto:
        """Returns the model, checked; `outputs` has the shapes of its outputs."""
        graph = helper.make_graph(
            self._nodes,
            name,
            self._inputs,
            [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in outputs.items()],
            self._weights,
        )
        model = helper.make_model(
            graph, producer_name="ansor_mlflow", ir_version=IR_VERSION, opset_imports=[helper.make_opsetid("", OPSET)]
        )
        onnx.checker.check_model(model)
        return model


@dataclass(frozen=True, kw_only=True)
class BuiltinNetwork:
    """A network that is generated, with weights drawn from a seed."""

    default_shapes: Callable[[int], dict[str, Shape]]
    """Takes a batch size, returns the shape of every input."""
    build: Callable[[dict[str, Shape], int], onnx.ModelProto]
    """Takes the shape of every input and a seed. Raises UserInputError for sizes that the network cannot take."""


def image_classifier(
    name: str,
    append_layers: Callable[[GraphBuilder, Shape], None],
    *,
    image: Shape = (3, 224, 224),
    min_size: int = 32,
    num_classes: int = NUM_CLASSES,
) -> BuiltinNetwork:
    """A network with one input "data", float32 (N, *image), and one output "logits", float32 (N, num_classes).

    `append_layers` declares the input with the shape it is given, and appends all layers up to the logits. A video has
    its number of frames before height and width, of which each is at least `min_size`.
    """

    def build(input_shapes: dict[str, Shape], seed: int) -> onnx.ModelProto:
        shape = input_shapes["data"]
        if shape[1] != image[0] or min(shape[-2:]) < min_size:
            axes = ", ".join("DHW"[-len(shape[2:]) :])
            raise UserInputError(
                f"input_shapes gives 'data' of {name} {list(shape)}; it must be [N, {image[0]}, {axes}] with H and W "
                f"at least {min_size}"
            )
        builder = GraphBuilder(seed)
        append_layers(builder, shape)
        return builder.build(name, {"logits": (shape[0], num_classes)})

    return BuiltinNetwork(default_shapes=lambda batch_size: {"data": (batch_size, *image)}, build=build)


def append_pooled_logits(builder: GraphBuilder, data: str, *, channels: int, num_classes: int = NUM_CLASSES) -> None:
    """Appends the usual end: mean over the image, then a dense layer "logits"; data is (N, channels, ...)."""
    data = builder.node("GlobalAveragePool", "head.pool", data)
    data = builder.node("Flatten", "head.flatten", data, axis=1)
    builder.dense("logits", data, units=num_classes, in_units=channels)


def _per_axis(value: PerAxis, rank: int) -> list[int]:
    return [value] * rank if isinstance(value, int) else list(value)
