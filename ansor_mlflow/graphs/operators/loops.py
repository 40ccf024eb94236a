"""Loops whose number of steps is known, written out: their nodes once for each step.

See https://onnx.ai/onnx/operators/onnx__Loop.html and …Scan. Exporters write a recurrent layer of their own, or a
function that is mapped over a batch, in this way, and a runtime takes longer to start each step than to compute it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property

import numpy as np
import onnx
from onnx import helper
from onnx.reference import ReferenceEvaluator

from ansor_mlflow.graphs.editor import GraphEditor, Rewritings, Unchanged
from ansor_mlflow.graphs.walk import MAX_SHAPE_ELEMENTS, attributes_of, input_of, inputs_of, nodes_of
from ansor_mlflow.tensors import Arrays

_MAX_NODES = 2048
"""Nodes of all steps together: a network of nearly as many takes TVM forty seconds."""
_MAX_CONDITION = 64
"""Nodes of a step from which the next one follows; more of them are no counter."""


def _loop(node: onnx.NodeProto, graph: GraphEditor) -> None:
    body: onnx.GraphProto = attributes_of(node)["body"]
    steps = _count_steps(node, body, graph)
    go_on = graph.constant(True)
    _write_out(node, body, steps, node.input[2:], lambda step: [graph.constant(step, np.int64), go_on], 1, graph)


def _scan(node: onnx.NodeProto, graph: GraphEditor) -> None:
    attributes = attributes_of(node)
    num_scanned = attributes["num_scan_inputs"]
    states, scanned = node.input[:-num_scanned], node.input[-num_scanned:]
    axes = attributes.get("scan_input_axes", [0] * num_scanned)
    reverses = attributes.get("scan_input_directions", [0] * num_scanned)
    steps = graph.shape(scanned[0])[axes[0]]

    def elements(step: int) -> Iterable[str]:
        for name, axis, reverse in zip(scanned, axes, reverses, strict=True):
            yield graph.emit("Gather", name, graph.constant(steps - 1 - step if reverse else step, np.int64), axis=axis)

    _write_out(node, attributes["body"], steps, states, elements, 0, graph)


def _write_out(
    node: onnx.NodeProto,
    body: onnx.GraphProto,
    steps: int,
    states: Iterable[str],
    inputs_of_step: Callable[[int], Iterable[str]],
    num_conditions: int,
    graph: GraphEditor,
) -> None:
    """Puts in the nodes of all steps, which hand `states` on, and joins what each of them gives besides.

    `num_conditions` is the number of the body's outputs before its states: a Loop says first whether it goes on.
    """
    if not 0 < steps <= _MAX_NODES // max(1, len(list(nodes_of(body.node)))) or body.sparse_initializer:
        raise Unchanged
    states = list(states)
    weights = {weight.name: graph.add(weight) for weight in body.initializer}
    given: list[list[str]] = []
    for step in range(steps):
        # A Loop's states are its last inputs, a Scan's the first.
        others = list(inputs_of_step(step))
        taken = [*others, *states] if num_conditions else [*states, *others]
        names = dict(zip((value.name for value in body.input), taken, strict=True))
        outputs = graph.inline(body, weights | names)[num_conditions:]
        states, collected = outputs[: len(states)], outputs[len(states) :]
        given.append(collected)
    attributes = attributes_of(node)
    axes, reverses = (attributes.get(f"scan_output_{name}", [0] * len(given[0])) for name in ("axes", "directions"))
    for position, state in enumerate(states):
        if graph.is_used(node, position):
            graph.emit("Identity", state, output=node.output[position])
    for place, (axis, reverse) in enumerate(zip(axes, reverses, strict=True)):
        if graph.is_used(node, len(states) + place):
            parts = [graph.unsqueeze(collected[place], axis) for collected in given]
            graph.join(parts[::-1] if reverse else parts, axis, output=node.output[len(states) + place])


def _count_steps(node: onnx.NodeProto, body: onnx.GraphProto, graph: GraphEditor) -> int:
    """Steps of a Loop: as many as it may have, or until its condition is false, where that follows from constants."""
    most, condition, states = input_of(node, 0), input_of(node, 1), node.input[2:]
    limit = int(graph.value(most).item()) if most else _MAX_NODES
    counter = _Counter(body, graph)
    values = {name: graph.value(states[place]) for place, name in enumerate(counter.states) if name in counter.needed}
    goes_on, steps = bool(graph.value(condition).item()) if condition else True, 0
    while goes_on and steps < limit:
        goes_on, values = counter.step(steps, values)
        steps += 1
        is_large = any(value.size > MAX_SHAPE_ELEMENTS for value in values.values())
        if steps * max(1, len(body.node)) > _MAX_NODES or is_large:
            raise Unchanged
    return steps


class _Counter:
    """The part of a loop's body on which it depends whether there is a next step."""

    def __init__(self, body: onnx.GraphProto, graph: GraphEditor) -> None:
        self._inputs = [value.name for value in body.input]
        self.states = self._inputs[2:]
        condition, *outputs = (value.name for value in body.output)
        following = dict(zip(self.states, outputs, strict=False))
        makers = {name: place for place, node in enumerate(body.node) for name in node.output if name}
        self.needed, places, wanted = {condition}, set[int](), [condition]
        while wanted:
            name = wanted.pop()
            others = list(inputs_of(body.node[makers[name]])) if name in makers else []
            others += [following[name]] if name in following else []
            places |= {makers[name]} if name in makers else set()
            wanted += [other for other in dict.fromkeys(others) if other and other not in self.needed]
            self.needed.update(others)
        if len(places) > _MAX_CONDITION:
            raise Unchanged
        weights = {weight.name: weight for weight in body.initializer}
        known = {*self._inputs, *makers, *weights, ""}
        constants = [weights[name] for name in self.needed if name in weights]
        constants += [graph.tensor(name) for name in self.needed - known]
        self._outputs = [condition, *(following[name] for name in self.states if name in self.needed)]
        nodes = [body.node[place] for place in sorted(places)]
        inputs, results = (map(helper.make_empty_tensor_value_info, names) for names in (self._inputs, self._outputs))
        model = helper.make_graph(nodes, "condition", list(inputs), list(results), constants)
        self._model = helper.make_model(model, opset_imports=[helper.make_opsetid("", graph.opset)])

    @cached_property
    def _evaluator(self) -> ReferenceEvaluator:
        return ReferenceEvaluator(self._model)

    def step(self, number: int, values: Arrays) -> tuple[bool, Arrays]:
        """Whether there is a next step, and its states."""
        inputs = dict(zip(self._inputs[:2], (np.array(number), np.array(True)), strict=True))
        try:
            goes_on, *others = self._evaluator.run(None, inputs | values)
        except Exception as err:  # the evaluator has no error class of its own
            raise Unchanged from err
        return bool(goes_on), dict(zip(values, others, strict=True))


REWRITINGS: Rewritings = {("", "Loop"): _loop, ("", "Scan"): _scan}
