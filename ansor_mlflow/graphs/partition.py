"""Splits a graph where TVM cannot compute it: as few parts as possible, by turns in TVM and in ONNX Runtime.

Each node gets the earliest turn at which what it takes is there and its side is on. All nodes of a turn are one part,
whether they are connected or not, so that a graph has no more parts than its longest alternation.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import numpy as np
import onnx
from onnx import helper

from ansor_mlflow.graphs.types import ValueInfos, is_tensor, noted_value_infos, static_shape
from ansor_mlflow.graphs.walk import attributes_of, inputs_of, producers_of, uses

MIN_FLOPS = 2e6
"""The least that a part in TVM has to compute. Handing a tensor over twice and calling ONNX Runtime once more takes
some twenty microseconds, in which a core computes as much."""
_FLOPS_PER_BYTE = 8.0
"""Operations that a CPU computes while it reads a byte of memory: 236 GFLOP/s over 30 GB/s on two cores of Zen 4."""
_WITH_OTHERS = ""
"""The reason of operators that TVM could compute, but that are too few to pay, or share what is no tensor with others.
"""

_FREE = {"Cast", "Constant", "Flatten", "Identity", "Reshape", "Shape", "Squeeze", "Transpose", "Unsqueeze"}
_GATES = {"DynamicQuantizeLSTM": 4, "GRU": 3, "LSTM": 4, "RNN": 1}

Side = Literal["tvm", "onnxruntime"]


@dataclass(frozen=True)
class GraphPart:
    """A part of a graph, as a model whose inputs and outputs are tensors of the whole."""

    runs_in: Side
    model: onnx.ModelProto
    flops: float
    """Estimated floating point operations."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Why operators of it stay with ONNX Runtime; not among them are those that stay only because others do."""

    @property
    def operators(self) -> dict[str, int]:
        """Number of nodes of each operator."""
        return dict(sorted(Counter(node.op_type for node in self.model.graph.node).items()))


def partition(model: onnx.ModelProto, reasons: Mapping[int, str], values: ValueInfos) -> list[GraphPart]:
    """Splits a model, whose nodes are in topological order, into parts in the order in which they run.

    `reasons` says why a node stays with ONNX Runtime, by its place in the graph. All others may run in TVM, but for
    those that would be parts too small to pay for handing tensors over.
    """
    flops = [_num_flops(node, values) for node in model.graph.node]
    fallback = dict(reasons)
    bundles = _bundles(model.graph, values)
    fallback.update({index: fallback.get(index, _WITH_OTHERS) for bundle in bundles for index in bundle})
    turns = _turns(model.graph, fallback, bundles)
    while (small := _smallest(turns, fallback, flops)) is not None:
        fallback.update({index: _WITH_OTHERS for index, turn in enumerate(turns) if turn == small})
        turns = _turns(model.graph, fallback, bundles)
    parts = []
    for turn in sorted(set(turns)):
        indices = [index for index, other in enumerate(turns) if other == turn]
        kept = {model.graph.node[index].op_type: fallback[index] for index in indices[::-1] if fallback.get(index)}
        part = model if len(indices) == len(turns) else extract(model, indices, values)
        side: Side = "onnxruntime" if indices[0] in fallback else "tvm"
        parts.append(GraphPart(side, part, sum(flops[index] for index in indices), kept))
    return parts


def segments(model: onnx.ModelProto, values: ValueInfos, most: int) -> list[GraphPart]:
    """Cuts a model that is TVM's alone where one tensor alone is handed over, into parts of about as many operations.

    Its nodes are in topological order. There are as many parts as may be, and as there are such places.
    """
    nodes, flops = model.graph.node, [_num_flops(node, values) for node in model.graph.node]
    last_use = {name: index for index, node in enumerate(nodes) for name in inputs_of(node)}
    last_use |= {output.name: len(nodes) for output in model.graph.output}
    alive = {value.name for value in model.graph.input if value.name in last_use}
    places: list[int] = []  # before which a node begins a part
    done, total, next_share = 0.0, sum(flops) or 1.0, 1
    for index, node in enumerate(nodes):
        alive = {name for name in alive if last_use[name] >= index}
        is_narrow = len(alive) == 1 and is_tensor(values.get(next(iter(alive))))
        if index and is_narrow and done >= next_share * total / most:
            places.append(index)
            next_share = math.floor(done / total * most) + 1
        alive |= {name for name in node.output if last_use.get(name, -1) > index}
        done += flops[index]
    bounds = [0, *places, len(nodes)]
    return [
        GraphPart("tvm", extract(model, range(start, stop), values), sum(flops[start:stop]))
        for start, stop in pairwise(bounds)
    ]


def _turns(graph: onnx.GraphProto, fallback: Mapping[int, str], bundles: Sequence[set[int]]) -> list[int]:
    """The turn of each node: even ones are TVM's. Nodes of a bundle wait for each other."""
    producer = producers_of(graph)
    waits: dict[int, int] = {}
    while True:
        turns: list[int] = []
        for index, node in enumerate(graph.node):
            earliest = max((turns[producer[name]] for name in inputs_of(node) if name in producer), default=-1)
            side = 1 if index in fallback else 0
            turns.append(max(earliest if earliest % 2 == side else earliest + 1, waits.get(index, -1)))
        last = {index: max(turns[other] for other in bundle) for bundle in bundles for index in bundle}
        if all(turns[index] == turn for index, turn in last.items()):
            return turns
        waits = last


def _bundles(graph: onnx.GraphProto, values: ValueInfos) -> list[set[int]]:
    """Nodes that must be in one part: those that hand over what is no tensor, and all that lie between such nodes.

    Two bundles that take from each other are one. So where the maker of what is no tensor waits for its taker, too,
    the bundles are the nodes that wait for one another: the strongly connected components.
    """
    producer = producers_of(graph)
    taken = [
        (producer[name], index, is_tensor(values.get(name)))
        for index, node in enumerate(graph.node)
        for name in inputs_of(node)
        if name in producer
    ]
    back = [(taker, maker) for maker, taker, is_free in taken if not is_free]
    if not back:
        return []
    from scipy.sparse import coo_array  # here, as few graphs need it
    from scipy.sparse.csgraph import connected_components

    edges = np.array([*((maker, taker) for maker, taker, _ in taken), *back]).T
    matrix = coo_array((np.ones(edges.shape[1]), edges), shape=(len(graph.node),) * 2)
    bundles: dict[int, set[int]] = defaultdict(set)
    for index, label in enumerate(connected_components(matrix, connection="strong")[1]):
        bundles[label].add(index)
    return [bundle for bundle in bundles.values() if len(bundle) > 1]


def _smallest(turns: list[int], fallback: Mapping[int, str], flops: list[float]) -> int | None:
    """TVM's turn that computes least, if it is too little and not the only one."""
    if not fallback:
        return None
    totals: dict[int, float] = defaultdict(float)
    for index, turn in enumerate(turns):
        if index not in fallback:
            totals[turn] += flops[index]
    smallest = min(totals, key=lambda turn: totals[turn], default=None)
    return smallest if smallest is not None and len(totals) > 1 and totals[smallest] < MIN_FLOPS else None


def _num_flops(node: onnx.NodeProto, values: ValueInfos) -> float:
    """Floating point operations of a node; a multiplication and an addition are two.

    An operator that does not multiply matrices counts one for each element of its first output, one that only moves
    elements none, and a node whose shapes are not known none.
    """
    shapes = [static_shape(values.get(name)) for name in (*node.input[:3], *node.output[:1])]
    output = shapes.pop()
    weight = shapes[1] if len(shapes) > 1 else None  # then there are both
    if node.op_type in _GATES and weight and shapes[0]:
        length, batch, num_inputs = shapes[0]
        directions, gates = weight[0], weight[2 if node.op_type == "DynamicQuantizeLSTM" else 1]
        return 2.0 * length * batch * directions * gates * (num_inputs + gates // _GATES[node.op_type])
    if output is None or node.op_type in _FREE:
        return 0.0
    if weight and shapes[0]:
        if node.op_type in ("Conv", "ConvInteger"):
            return 2.0 * math.prod(output) * math.prod(weight[1:])
        if node.op_type == "ConvTranspose":
            return 2.0 * math.prod(shapes[0]) * math.prod(weight[1:])
        if node.op_type in ("Gemm", "MatMul", "MatMulInteger"):
            inner = shapes[0][0 if attributes_of(node).get("transA", 0) else -1]
            return 2.0 * math.prod(output) * inner
    return float(math.prod(output))


def flops_of_nodes(model: onnx.ModelProto) -> list[float]:
    """Floating point operations of the nodes of a model with inferred, static shapes."""
    values = noted_value_infos(model.graph)
    return [_num_flops(node, values) for node in model.graph.node]


def estimated_cost(model: onnx.ModelProto) -> float:
    """The estimated time of a call of a model with inferred, static shapes, in operations that take as long.

    Each node takes as long as it computes, or as its weights take to read, whichever is longer (the roofline model:
    Williams et al., 2009); activations are in the caches. The constant of a call is that of `MIN_FLOPS`.
    """
    values = noted_value_infos(model.graph)
    weight_bytes = {
        weight.name: math.prod(weight.dims) * helper.tensor_dtype_to_np_dtype(weight.data_type).itemsize
        for weight in model.graph.initializer
    }
    cost = MIN_FLOPS
    for node in model.graph.node:
        is_table = node.op_type == "Gather"  # few of its rows are read
        num_bytes = 0 if is_table else sum(weight_bytes.get(name, 0) for name in node.input)
        cost += max(_num_flops(node, values), _FLOPS_PER_BYTE * num_bytes)
    return cost


def extract(
    model: onnx.ModelProto,
    indices: Sequence[int],
    values: ValueInfos,
    outputs: Sequence[str] | None = None,
    num_uses: Counter[str] | None = None,
) -> onnx.ModelProto:
    """The model of some nodes of a graph, given by their places, which takes what they need of the others.

    It returns `outputs`, by default all that others need of these nodes. `num_uses` spares counting how often each
    tensor is taken.
    """
    graph = model.graph
    nodes = [graph.node[index] for index in indices]
    constants = {weight.name: weight for weight in graph.initializer}
    produced = {name for node in nodes for name in node.output if name}
    needed = dict.fromkeys(name for node in nodes for name in inputs_of(node) if name and name not in produced)
    if outputs is None:
        total = Counter(uses(graph)) if num_uses is None else num_uses
        inside = Counter(name for node in nodes for name in inputs_of(node))
        outputs = [name for node in nodes for name in node.output if name and total[name] > inside[name]]
    return helper.make_model(
        helper.make_graph(
            nodes,
            graph.name,
            [values[name] for name in needed if name in values and name not in constants],  # a branch has names, too
            [values.get(name) or onnx.ValueInfoProto(name=name) for name in outputs],
            [constants[name] for name in needed if name in constants],
            value_info=[values[name] for name in sorted(produced - set(outputs)) if name in values],
        ),
        opset_imports=model.opset_import,
        ir_version=max(model.ir_version, 4),
        functions=model.functions,
    )


def ancestors(graph: onnx.GraphProto, tensors: Iterable[str], given: Collection[str] = ()) -> list[int]:
    """Places of the nodes that compute tensors, in order; those that are given need not be computed."""
    producers = producers_of(graph)
    indices: set[int] = set()
    left = [name for name in tensors if name not in given]
    while left:
        index = producers.get(left.pop())
        if index is not None and index not in indices:
            indices.add(index)
            left += [name for name in inputs_of(graph.node[index]) if name not in given]
    return sorted(indices)
