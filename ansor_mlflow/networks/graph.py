"""A small builder of ONNX graphs with seeded weights, which the built-in networks are written with."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = 17
IR_VERSION = 8


class GraphBuilder:
    """Collects nodes and weights of one network.

    Every method takes and returns tensor names and appends one node. Weights are drawn from
    `numpy.random.default_rng(seed)` in the order of the calls, so that one seed always gives the same network.

    Args:
        seed: Seed of the weights.
    """

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[onnx.TensorProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []

    def input(self, name: str, shape: tuple[int, ...]) -> str:
        """Declares a float32 input of the network."""
        self._inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
        return name

    def weight(self, name: str, values: np.ndarray) -> str:
        """Adds a float32 initializer."""
        self._weights.append(numpy_helper.from_array(values.astype(np.float32), name))
        return name

    def he_normal(self, name: str, shape: tuple[int, ...]) -> str:
        """Adds a weight of N(0, 2 / fan_in), fan_in being the product of shape[1:] (He et al., 2015)."""
        fan_in = math.prod(shape[1:])
        return self.weight(name, self._rng.standard_normal(shape) * math.sqrt(2.0 / fan_in))

    def node(self, op_type: str, name: str, *inputs: str, **attributes: Any) -> str:
        """Appends a node with one output, which is named after the node."""
        self._nodes.append(helper.make_node(op_type, list(inputs), [name], name=name, **attributes))
        return name

    def conv(self, name: str, data: str, shape: tuple[int, ...], *, stride: int = 1, padding: int = 0) -> str:
        """Appends a convolution without bias; `shape` is (out channels, in channels, kernel height, kernel width)."""
        weight = self.he_normal(f"{name}.weight", shape)
        rank = len(shape) - 2
        return self.node(
            "Conv",
            name,
            data,
            weight,
            kernel_shape=list(shape[2:]),
            strides=[stride] * rank,
            pads=[padding] * (2 * rank),
        )

    def batch_norm(self, name: str, data: str, channels: int) -> str:
        """Appends a BatchNormalization (inference form) whose statistics look like those of a trained network."""
        parameters = {
            "scale": self._rng.uniform(0.5, 1.0, channels),
            "bias": self._rng.uniform(-0.1, 0.1, channels),
            "mean": self._rng.uniform(-0.1, 0.1, channels),
            "var": self._rng.uniform(0.8, 1.2, channels),
        }
        names = [self.weight(f"{name}.{key}", values) for key, values in parameters.items()]
        return self.node("BatchNormalization", name, data, *names, epsilon=1e-5)

    def relu(self, name: str, data: str) -> str:
        """Appends max(x, 0)."""
        return self.node("Relu", name, data)

    def dense(self, name: str, data: str, *, units: int, in_units: int) -> str:
        """Appends a fully connected layer with bias: (N, in_units) -> (N, units)."""
        weight = self.he_normal(f"{name}.weight", (units, in_units))
        bias = self.weight(f"{name}.bias", self._rng.uniform(-0.1, 0.1, units))
        return self.node("Gemm", name, data, weight, bias, transB=1)

    def build(self, name: str, outputs: dict[str, tuple[int, ...]]) -> onnx.ModelProto:
        """Returns the model, checked.

        Args:
            name: Name of the graph.
            outputs: Name of every output tensor and its shape.
        """
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
