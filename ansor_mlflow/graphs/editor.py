"""How nodes of an ONNX graph are replaced by others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ansor_mlflow.graphs.types import known_dims, static_shape, value_infos
from ansor_mlflow.graphs.walk import (
    attributes_of,
    input_of,
    inputs_of,
    opset_version,
    remove_unused_initializers,
    rename,
    uses,
)

_T = TypeVar("_T")
_FIRST_OPSET_WITH_INPUT = {"Split": 13, "ReduceSum": 13, "Unsqueeze": 13}
"""Version from which sizes or axes of an operator are an input; from 18 on, those of all reductions are."""
_MAX_CONCAT = 8
"""Tensors that TVM joins at once: it asks for each element where it comes from, one tensor after the other."""


class Unchanged(Exception):  # noqa: N818 - it is no error
    """A node stays as it is: a rewriting does not apply to it, or too little is known of its tensors."""


class GraphEditor:
    """What a rewriting asks of a graph, and where it puts its nodes and new initializers.

    What is not known of a tensor raises `Unchanged`, so that the node stays as it is.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self.opset = opset_version(model)
        self.new_constants: list[onnx.TensorProto] = []
        self._constants = {initializer.name: initializer for initializer in model.graph.initializer}
        self._values = value_infos(model)
        self._consumers: dict[str, list[onnx.NodeProto]] = {}
        for node in model.graph.node:
            for name in node.input:
                self._consumers.setdefault(name, []).append(node)
        self._producers = {name: node for node in model.graph.node for name in node.output}
        self._uses = set(uses(model.graph))
        self._nodes: list[onnx.NodeProto] = []
        self._prefix = ""
        self._num_names = 0

    def rewrite(self, node: onnx.NodeProto, rewriting: Rewriting | None) -> list[onnx.NodeProto] | None:
        """The nodes that take the place of one; None if there is no rewriting or it does not apply."""
        self._nodes, self._prefix, self._num_names = [], next(filter(None, node.output), ""), 0
        if rewriting is not None:
            with contextlib.suppress(Unchanged):
                rewriting(node, self)
                return self._nodes
        return None

    def find_shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a tensor; None where it is not known, or not static."""
        if name in self._constants:
            return tuple(self._constants[name].dims)
        return static_shape(self._values.get(name))

    def shape(self, name: str) -> tuple[int, ...]:
        return _known(self.find_shape(name))

    def dims(self, name: str) -> tuple[int | None, ...]:
        """Sizes of a tensor's axes; None for those that are not static."""
        return self.find_shape(name) or _known(known_dims(self._values.get(name)))

    def dtype(self, name: str) -> int:
        """Element type of a tensor as ONNX numbers it."""
        if name in self._constants:
            return int(self._constants[name].data_type)
        value = self._values.get(name)
        return _known(int(value.type.tensor_type.elem_type) or None if value else None)

    def is_constant(self, name: str) -> bool:
        return name in self._constants

    def value(self, name: str) -> np.ndarray[Any, Any]:
        """The value of a constant."""
        return numpy_helper.to_array(self.tensor(name))

    def tensor(self, name: str) -> onnx.TensorProto:
        """A constant itself."""
        constant: onnx.TensorProto = _known(self._constants.get(name))
        return constant

    def consumers(self, name: str) -> list[onnx.NodeProto]:
        return self._consumers.get(name, [])

    def producer(self, name: str) -> onnx.NodeProto | None:
        """The node that a tensor comes from; None for an input, a constant, and what this rewriting put in."""
        return self._producers.get(name)

    def reduced_axes(self, node: onnx.NodeProto) -> list[int]:
        """The axes of a reduction, from the front, of which there is one at least."""
        shape, given, attributes = self.shape(node.input[0]), input_of(node, 1), attributes_of(node)
        axes = self.value(given) if given else attributes.get("axes", ())
        if not len(axes) and attributes.get("noop_with_empty_axes"):
            raise Unchanged
        return [int(axis) % len(shape) for axis in axes] or list(range(len(shape)))

    def is_used(self, node: onnx.NodeProto, output: int) -> bool:
        """Whether a node has an output of that number, and something takes it."""
        return output < len(node.output) and node.output[output] in self._uses

    def constant(self, value: Any, dtype: Any = None) -> str:
        """The name of a new constant; `dtype` is NumPy's, or one of ONNX's numbers."""
        dtype = helper.tensor_dtype_to_np_dtype(dtype) if isinstance(dtype, int) else dtype
        return self.add(numpy_helper.from_array(np.asarray(value, dtype)))

    def add(self, constant: onnx.TensorProto) -> str:
        """The name that a constant gets, which a branch has for itself."""
        tensor = onnx.TensorProto()
        tensor.CopyFrom(constant)
        tensor.name = self._new_name("constant")
        self.new_constants.append(tensor)
        self._constants[tensor.name] = tensor
        return str(tensor.name)

    def inline(self, branch: onnx.GraphProto, names: Mapping[str, str]) -> list[str]:
        """Puts in the nodes of a branch, and returns the names of its outputs; `names` has those of what it takes."""
        names = dict(names)
        for node in branch.node:
            copy = onnx.NodeProto()
            copy.CopyFrom(node)
            names |= {name: self._new_name(node.op_type.lower()) for name in node.output if name}
            rename(copy, names)
            copy.name = ""
            self._nodes.append(copy)
        return [names.get(output.name, output.name) for output in branch.output]

    def emit(self, op_type: str, *inputs: str, output: str | None = None, **attributes: Any) -> str:
        """Puts in a node of one of ONNX's own operators, and returns the name of its only output.

        An empty name among the inputs is an optional input that is not there; attributes that are None are left out.
        """
        return self.emit_all(op_type, inputs, [output or self._new_name(op_type.lower())], **attributes)[0]

    def emit_all(self, op_type: str, inputs: Sequence[str], outputs: list[str], **attributes: Any) -> list[str]:
        """Does what `emit` does, for a node with any number of outputs, whose names are given."""
        name = f"{outputs[0]}.{op_type}"
        self._nodes.append(helper.make_node(op_type, list(inputs), outputs, name=name, **attributes))
        return outputs

    def reshape(self, data: str, shape: Sequence[int], output: str | None = None) -> str:
        return self.emit("Reshape", data, self.constant(list(shape), np.int64), output=output)

    def slice(self, data: str, starts: list[int], ends: list[int], axes: list[int], output: str | None = None) -> str:
        ranges = (self.constant(values, np.int64) for values in (starts, ends, axes))
        return self.emit("Slice", data, *ranges, output=output)

    def split(self, data: str, num_parts: int, size: int, axis: int) -> list[str]:
        """Puts in a split into parts of the same size."""
        names = [self._new_name("split") for _ in range(num_parts)]
        if self.opset < _FIRST_OPSET_WITH_INPUT["Split"]:
            return self.emit_all("Split", (data,), names, axis=axis, split=[size] * num_parts)
        return self.emit_all("Split", (data, self.constant([size] * num_parts, np.int64)), names, axis=axis)

    def join(self, parts: Sequence[str], axis: int, output: str | None = None) -> str:
        """Puts in what joins tensors along an axis, a few at once."""
        while len(parts) > _MAX_CONCAT:
            groups = [parts[start : start + _MAX_CONCAT] for start in range(0, len(parts), _MAX_CONCAT)]
            parts = [group[0] if len(group) == 1 else self.emit("Concat", *group, axis=axis) for group in groups]
        if len(parts) == 1 and output is None:
            return parts[0]
        return self.emit("Concat", *parts, axis=axis, output=output)

    def unsqueeze(self, data: str, axis: int) -> str:
        """Puts in what gives a tensor an axis of the size 1."""
        if self.opset < _FIRST_OPSET_WITH_INPUT["Unsqueeze"]:
            return self.emit("Unsqueeze", data, axes=[axis])
        return self.emit("Unsqueeze", data, self.constant([axis], np.int64))

    def reduce(self, op_type: str, data: str, axes: list[int], output: str | None = None) -> str:
        """Puts in a reduction over some axes, which keep the size 1."""
        if self.opset < _FIRST_OPSET_WITH_INPUT.get(op_type, 18):
            return self.emit(op_type, data, axes=axes, output=output)
        return self.emit(op_type, data, self.constant(axes, np.int64), output=output)

    def _new_name(self, kind: str) -> str:
        """A name that no tensor has: what an earlier rewriting put in may end in the same output."""
        while True:
            self._num_names += 1
            name = f"{self._prefix}.{kind}{self._num_names}"
            if name not in self._constants and name not in self._producers:
                return name


Rewriting = Callable[[onnx.NodeProto, GraphEditor], None]
"""Puts in what takes the place of a node, or raises `Unchanged`."""
Rewritings = Mapping[tuple[str, str], Rewriting]
"""A rewriting for each operator: its domain, empty for ONNX's own, and its name."""


def rewrite(model: onnx.ModelProto, rewritings: Rewritings) -> onnx.ModelProto:
    """A copy of the model with other nodes in the place of some; itself where there is nothing to do.

    Its constants are its initializers. What rewritings put in is not looked at again.
    """
    is_new_enough = opset_version(model) >= 11  # slices and pads have their ranges as inputs
    if not is_new_enough or not any(_operator(node) in rewritings for node in model.graph.node):
        return model
    editor = GraphEditor(model)
    replaced = [editor.rewrite(node, rewritings.get(_operator(node))) for node in model.graph.node]
    if not any(replaced):
        return model
    rewritten = onnx.ModelProto()
    rewritten.CopyFrom(model)
    graph = rewritten.graph
    nodes = [node for old, new in zip(model.graph.node, replaced, strict=True) for node in new or [old]]
    needed, used = {output.name for output in graph.output}, []
    for node in reversed(nodes):
        if not needed.isdisjoint(node.output):
            used.append(node)
            needed.update(inputs_of(node))
    del graph.node[:]
    graph.node.extend(used[::-1])
    graph.initializer.extend(editor.new_constants)
    remove_unused_initializers(graph)
    return rewritten


def _known(value: _T | None) -> _T:
    if value is None:
        raise Unchanged
    return value


def _operator(node: onnx.NodeProto) -> tuple[str, str]:
    return ("" if node.domain == "ai.onnx" else str(node.domain)), str(node.op_type)
