"""Recurrent layers: what they are, whether TVM can compute them, and step after step as nodes of ONNX.

See https://onnx.ai/onnx/operators/onnx__LSTM.html, …GRU and …RNN. For CPUs a layer becomes one function of all steps
(`lowering.recurrence`). For other devices short sequences are written out: what the inputs contribute to the gates is
one product of matrices for all steps; a step is one more product and a few elementwise operations. All steps are the
same functions, so that they are tuned once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx

from ansor_mlflow.graphs.editor import GraphEditor, Rewritings, Unchanged
from ansor_mlflow.graphs.operators.byte_sums import PACK
from ansor_mlflow.graphs.walk import attributes_of, input_of

_MAX_STEPS = 64
"""Longest sequence that is written out."""
_ACTIVATIONS = {
    "DynamicQuantizeLSTM": ["Sigmoid", "Tanh", "Tanh"],
    "GRU": ["Sigmoid", "Tanh"],
    "LSTM": ["Sigmoid", "Tanh", "Tanh"],
    "RNN": ["Tanh"],
}
_KNOWN_ACTIVATIONS = {"Relu", "Sigmoid", "Tanh"}
_WEIGHTS, _RECURRENT, _BIAS, _LENGTHS, _INITIAL_H, _INITIAL_C, _PEEPHOLES = 1, 2, 3, 4, 5, 6, 7
_SCALES, _ZERO_POINTS = (8, 10), (9, 11)
"""Positions of the inputs; the last ones are those of ONNX Runtime's DynamicQuantizeLSTM."""
_UNITS = 16
"""Units of a vector."""


def why_not_recurrent(node: onnx.NodeProto, graph: GraphEditor) -> str | None:
    """Why a recurrent operator stays with ONNX Runtime, however long its sequence is; None if it need not."""
    attributes = attributes_of(node)
    constants = [name for name in (*node.input[1:3], input_of(node, _BIAS)) if name]
    lengths, peepholes = input_of(node, _LENGTHS), input_of(node, _PEEPHOLES)
    obstacles = {
        "weights that are no constants": not all(map(graph.is_constant, constants)),
        "sequences of different lengths": bool(lengths) and not _is_all(lengths, _num_steps(node, graph), graph),
        "peepholes": bool(peepholes) and not _is_all(peepholes, 0, graph),
        "clipped or coupled gates": bool(attributes.get("clip") or attributes.get("input_forget")),
        "activations of its own": not {name for of in activations_of(node) for name in of} <= _KNOWN_ACTIVATIONS,
    }
    return next((reason for reason, applies in obstacles.items() if applies), None)


def why_not_quantized(node: onnx.NodeProto, graph: GraphEditor) -> str | None:
    """What `why_not_recurrent` says, of an LSTM whose weights are of 8 bits, [directions, inputs, gates · units]."""
    weights, (_, num_units, _) = [input_of(node, place) for place in (_WEIGHTS, _RECURRENT)], graph.shape(node.input[2])
    zero_points = filter(None, (input_of(node, place) for place in _ZERO_POINTS))
    obstacles = {
        "weights that are no signed bytes": any(graph.dtype(name) != onnx.TensorProto.INT8 for name in weights),
        "scales that are no constants": not all(graph.is_constant(input_of(node, place)) for place in _SCALES),
        "weights with a zero point": not all(_is_all(name, 0, graph) for name in zero_points),
        "units that are no vectors": bool(num_units % _UNITS or graph.shape(weights[0])[1] % PACK),
    }
    return why_not_recurrent(node, graph) or next((reason for reason, applies in obstacles.items() if applies), None)


def _num_steps(node: onnx.NodeProto, graph: GraphEditor) -> int:
    return graph.shape(node.input[0])[1 if attributes_of(node).get("layout", 0) else 0]


def _is_all(name: str, number: int, graph: GraphEditor) -> bool:
    return graph.is_constant(name) and bool((graph.value(name) == number).all())


def _unroll(node: onnx.NodeProto, graph: GraphEditor) -> None:
    if _num_steps(node, graph) > _MAX_STEPS or why_not_recurrent(node, graph) is not None:
        raise Unchanged
    attributes, data, shape = attributes_of(node), node.input[0], graph.shape(node.input[0])
    if batch_first := bool(attributes.get("layout", 0)):
        data, shape = graph.emit("Transpose", data, perm=[1, 0, 2]), (shape[1], shape[0], shape[2])
    steps, batch, in_units = shape
    flat = graph.reshape(data, (steps * batch, in_units))
    sequences, last_hs, last_cs = [], [], []
    for index, (reverse, activations) in enumerate(zip(reverses_of(node), activations_of(node), strict=True)):
        cell = _Cell(node, graph, index, batch, activations)
        outputs, h, c = cell.run(flat, steps, reverse=reverse)
        sequences.append(graph.reshape(graph.join(outputs, 0), (steps, 1, batch, cell.units)))
        last_hs.append(h)
        last_cs.append(c)
    units, num = cell.units, len(sequences)
    joined = sequences[0] if num == 1 else graph.emit("Concat", *sequences, axis=1)  # [steps, directions, batch, units]
    if graph.is_used(node, 0):
        _finish(graph, joined, [2, 0, 1, 3] if batch_first else None, node.output[0])
    for position, states in ((1, last_hs), (2, last_cs)):
        if graph.is_used(node, position):
            parts = [graph.reshape(state, (1, batch, units)) for state in states]
            state = parts[0] if num == 1 else graph.emit("Concat", *parts, axis=0)
            _finish(graph, state, [1, 0, 2] if batch_first else None, node.output[position])


class _Cell:
    """One direction of a recurrent operator. Gates are in ONNX's order."""

    def __init__(
        self, node: onnx.NodeProto, graph: GraphEditor, index: int, batch: int, activations: tuple[str, ...]
    ) -> None:
        self.graph, self.kind, self.batch, self.activations = graph, node.op_type, batch, activations
        attributes, bias = attributes_of(node), input_of(node, _BIAS)
        self.weights = graph.value(node.input[_WEIGHTS])[index].T  # [in_units, gates · units]
        self.recurrent = graph.value(node.input[_RECURRENT])[index].T  # [units, gates · units]
        self.units, size = self.recurrent.shape
        both = graph.value(bias)[index] if bias else np.zeros(2 * size, self.weights.dtype)
        self.input_bias, self.recurrent_bias = both[:size], both[size:]
        self.linear_before_reset = bool(attributes.get("linear_before_reset", 0))

        def initial(position: int) -> str:
            if not (name := input_of(node, position)):
                return graph.constant(np.zeros((batch, self.units), self.weights.dtype))
            axis = 1 if attributes.get("layout", 0) else 0
            return graph.reshape(graph.slice(name, [index], [index + 1], [axis]), (batch, self.units))

        self.initial_h = initial(_INITIAL_H)
        self.initial_c = initial(_INITIAL_C) if self.kind == "LSTM" else ""

    def run(self, flat: str, steps: int, *, reverse: bool) -> tuple[list[str], str, str]:
        """Puts in all steps of the inputs [steps · batch, in_units]; reversed, the last step comes first.

        It returns the states [batch, units] after each step, in the order of the inputs, the last one, and the cell's.
        """
        bias, step = self._step()
        product = self.graph.emit("MatMul", flat, self.graph.constant(self.weights))
        gates = self.graph.emit("Add", product, self.graph.constant(bias))
        parts = self.graph.split(gates, steps, self.batch, axis=0) if steps > 1 else [gates]
        h, c, outputs = self.initial_h, self.initial_c, []
        for part in reversed(parts) if reverse else parts:
            h, c = step(part, h, c)
            outputs.append(h)
        return (outputs[::-1] if reverse else outputs), h, c

    def _step(self) -> tuple[np.ndarray[Any, Any], Callable[[str, str, str], tuple[str, str]]]:
        """The bias that is added to all steps at once, and what puts in a step: of gates of the input, and states."""
        if self.kind == "GRU":
            return self._gru_step()
        emit, recurrent = self.graph.emit, self.graph.constant(self.recurrent)

        def step(gates: str, h: str, c: str) -> tuple[str, str]:
            gates = emit("Add", emit("MatMul", h, recurrent), gates)
            return self._lstm_step(gates, c) if self.kind == "LSTM" else (emit(self.activations[0], gates), c)

        return self.input_bias + self.recurrent_bias, step

    def _lstm_step(self, gates: str, c: str) -> tuple[str, str]:
        """Gates i, o, f, c: C = f ⊙ C + i ⊙ c and H = o ⊙ h(C)."""
        emit = self.graph.emit
        gate, cell, hidden = self.activations
        i, o, f = (emit(gate, self._gate(gates, index)) for index in range(3))
        candidate = emit(cell, self._gate(gates, 3))
        c = emit("Add", emit("Mul", f, c), emit("Mul", i, candidate))
        return emit("Mul", o, emit(hidden, c)), c

    def _gru_step(self) -> tuple[np.ndarray[Any, Any], Callable[[str, str, str], tuple[str, str]]]:
        """Gates z, r, h: H = (1 − z) ⊙ h + z ⊙ H, which is h + z ⊙ (H − h)."""
        emit, constant, units = self.graph.emit, self.graph.constant, self.units
        gate, hidden = self.activations
        zr, of_h = slice(2 * units), slice(2 * units, None)
        bias, recurrent_bias = self.input_bias + self.recurrent_bias, np.zeros_like(self.recurrent_bias)
        if self.linear_before_reset:  # then one product does for all gates
            bias[of_h], recurrent_bias[of_h] = self.input_bias[of_h], self.recurrent_bias[of_h]
            recurrent, added = constant(self.recurrent), constant(recurrent_bias)
        else:
            recurrent, of_reset = constant(self.recurrent[:, zr]), constant(self.recurrent[:, of_h])

        def step(gates: str, h: str, c: str) -> tuple[str, str]:
            product = emit("MatMul", h, recurrent)
            if self.linear_before_reset:
                product = emit("Add", product, added)
            z, r = (emit(gate, emit("Add", self._gate(product, n), self._gate(gates, n))) for n in range(2))
            if self.linear_before_reset:
                reset = emit("Mul", r, self._gate(product, 2))
            else:
                reset = emit("MatMul", emit("Mul", r, h), of_reset)
            candidate = emit(hidden, emit("Add", reset, self._gate(gates, 2)))
            return emit("Add", candidate, emit("Mul", z, emit("Sub", h, candidate))), c

        return bias, step

    def _gate(self, gates: str, index: int) -> str:
        """One of the gates in [batch, gates · units]."""
        return self.graph.slice(gates, [index * self.units], [(index + 1) * self.units], [1])


def activations_of(node: onnx.NodeProto) -> tuple[tuple[str, ...], ...]:
    """Names of the activations of each direction."""
    given = [name.decode() for name in attributes_of(node).get("activations", [])]
    num_directions = len(reverses_of(node))
    names = given or _ACTIVATIONS[node.op_type] * num_directions
    size = len(names) // num_directions
    return tuple(tuple(names[index * size :][:size]) for index in range(num_directions))


def reverses_of(node: onnx.NodeProto) -> tuple[bool, ...]:
    """Whether each direction begins with the last step."""
    direction = attributes_of(node).get("direction", "forward")
    return {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}[direction]


def _finish(graph: GraphEditor, tensor: str, perm: list[int] | None, output: str) -> None:
    if perm is None:
        graph.emit("Identity", tensor, output=output)
    else:
        graph.emit("Transpose", tensor, perm=perm, output=output)


REWRITINGS: Rewritings = {("", "GRU"): _unroll, ("", "LSTM"): _unroll, ("", "RNN"): _unroll}
