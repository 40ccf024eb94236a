"""A small builder of ONNX graphs with seeded weights, which the built-in networks are written with."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = 17
IR_VERSION = 8

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


def _per_axis(value: PerAxis, rank: int) -> list[int]:
    return [value] * rank if isinstance(value, int) else list(value)
