"""Parts of an ONNX graph as models of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

from ansor_mlflow.graphs import ancestors, extract, inputs_of, producers_of, static_shape

_KNOWN_FROM_SHAPES = {"Shape", "Size"}
"""Operators whose results do not depend on the values of their input."""


class CuttableGraph:
    """A graph to cut parts from.

    Args:
        model: Its nodes are in topological order, and its shapes were inferred. Stays as it is.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self._model = model
        graph = model.graph
        self._nodes = list(graph.node)
        self._taken = [[name for name in inputs_of(node) if name] for node in self._nodes]
        self._producers = producers_of(graph)
        self._values = {value.name: value for value in (*graph.input, *graph.value_info, *graph.output)}
        self._varying = self._find_varying()
        self._last_uses = self._find_last_uses()

    def cut(
        self,
        outputs: Sequence[str],
        given: Iterable[str] = (),
        constants: Mapping[str, npt.NDArray[Any]] = {},
    ) -> onnx.ModelProto:
        """The part that computes some tensors.

        Args:
            outputs: The tensors, of which shape and type are known.
            given: Tensors that it takes as inputs, beside those of the model, instead of computing them.
            constants: Tensors that it has as initializers instead of computing them.
        """
        indices = ancestors(self._model.graph, outputs, {*given, *constants})
        part = extract(self._model, indices, self._values, outputs)
        inputs = [value for value in part.graph.input if value.name not in constants]
        fixed = [value.name for value in part.graph.input if value.name in constants]
        del part.graph.input[:]
        part.graph.input.extend(inputs)
        part.graph.initializer.extend(numpy_helper.from_array(constants[name], name) for name in fixed)
        return part

    def prefix_lengths(self) -> list[int]:
        """How many nodes the beginning of the graph may have, rising, so that it can be cut off there."""
        blocked: set[int] = set()
        for name in self._varying & self._producers.keys():
            if not self.has_static_shape(name):
                blocked.update(range(self._producers[name] + 1, self._last_uses.get(name, 0) + 1))
        ends = {self._producers[name] + 1 for name in self._varying & self._producers.keys()}
        return sorted({*(ends - blocked), len(self._nodes)})

    def outputs_of_prefix(self, length: int) -> list[str]:
        """What the first nodes compute that others need, or that is an output of the model."""
        if length == len(self._nodes):
            return [output.name for output in self._model.graph.output]
        return [
            name
            for name, index in self._producers.items()
            if index < length <= self._last_uses.get(name, 0) and name in self._varying
        ]

    def ancestors(self, tensor: str) -> list[int]:
        """The nodes that a tensor is computed by: the one that makes it, then those before it, the last one first."""
        return ancestors(self._model.graph, [tensor])[::-1]

    def taken_from_others(self, indices: Iterable[int]) -> list[str]:
        """The tensors that nodes take from other nodes."""
        own = set(indices)
        taken = dict.fromkeys(name for index in sorted(own) for name in self._taken[index])
        return [name for name in taken if name in self._producers and self._producers[name] not in own]

    def place_of(self, tensor: str) -> int:
        """The number of nodes before the one that makes a tensor."""
        return self._producers[tensor]

    def is_varying(self, tensor: str) -> bool:
        """Whether a tensor depends on the values of the model's inputs."""
        return tensor in self._varying

    def has_static_shape(self, tensor: str) -> bool:
        """Whether a tensor can be an input or output of a part: it has a static shape, and a type of NumPy's."""
        value = self._values.get(tensor)
        if value is None or static_shape(value) is None:
            return False
        kind = value.type.tensor_type.elem_type
        if kind in (onnx.TensorProto.UNDEFINED, onnx.TensorProto.STRING):
            return False
        return helper.tensor_dtype_to_np_dtype(kind).isbuiltin == 1

    def _find_varying(self) -> set[str]:
        weights = {weight.name for weight in self._model.graph.initializer}
        varying = {value.name for value in self._model.graph.input} - weights
        for node, taken in zip(self._nodes, self._taken, strict=True):
            if node.op_type not in _KNOWN_FROM_SHAPES and not varying.isdisjoint(taken):
                varying.update(filter(None, node.output))
        return varying

    def _find_last_uses(self) -> dict[str, int]:
        last = {name: index for index, taken in enumerate(self._taken) for name in taken}
        return {**last, **{output.name: len(self._nodes) for output in self._model.graph.output}}
